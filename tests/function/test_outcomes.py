"""Outcomes: one call whose items end one by one, as runs over datasets need it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import batched
from stage import BOUND, wait_until


class Ended(dict[int, Any]):
    """Outcomes by place; each place ends once."""

    def __call__(self, places: list[int], outcomes: list[Any]) -> None:
        for place, outcome in zip(places, outcomes, strict=True):
            assert place not in self
            self[place] = outcome


def compute(items: list[str]) -> list[Any]:
    if "down" in items:
        raise OSError("down")
    return [ValueError(item) if item == "bad" else [item] for item in items]


@pytest.mark.parametrize("batch_size", [2, 64])
@pytest.mark.parametrize(
    "settings", [{}, {"length": len}, {"dedupe": True}, {"max_concurrent_batches": 3}], ids=str
)
def test_each_item_ends_once_at_its_place_whatever_becomes_of_the_others(
    settings: dict[str, Any], batch_size: int
) -> None:
    fn = batched.dynamically(batch_size=batch_size, isolate_errors=True, **settings)(compute)
    items = ["a", "bad", "cc", "down", "eee", "a", "bad", "ff"]
    ended = Ended()
    with fn:
        assert fn._batcher.outcomes(items, ended).result(BOUND) is None
    assert sorted(ended) == list(range(8))
    for place, item in enumerate(items):
        expected = {"bad": "ValueError('bad')", "down": "OSError('down')"}.get(item, f"['{item}']")
        assert repr(ended[place]) == expected
    assert fn.stats.calls == 1


def test_items_that_end_do_not_wait_for_a_slow_one() -> None:
    slow, ended = threading.Event(), Ended()

    def work(items: list[int]) -> list[int]:
        assert 0 not in items or slow.wait(BOUND)
        return items

    fn: Any = batched.dynamically(batch_size=1, max_concurrent_batches=2)(work)
    with fn:
        future = fn._batcher.outcomes(range(10), ended)
        wait_until(lambda: len(ended) == 9)
        assert 0 not in ended
        slow.set()
        future.result(BOUND)
    assert len(ended) == 10


def test_a_batch_that_is_held_leaves_when_its_owner_says_so_or_when_fewer_items_fill_it() -> None:
    sizes: list[int] = []

    @batched.dynamically(batch_size=8, flush="window", timeout_ms=1e9)
    def note(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return items

    runtime = note._batcher.runtime
    with note:
        third = note._batcher.outcomes([0, 1, 2], Ended())
        runtime.adjust(draining=True, batch_size=8)
        third.result(BOUND)
        runtime.adjust(draining=False, batch_size=8)
        last = note._batcher.outcomes(range(4), Ended())
        runtime.adjust(draining=False, batch_size=2)
        last.result(BOUND)
    assert sizes == [3, 2, 2]
