"""Tests of batch functions that answer one call while the rest of the batch runs on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import batched
from batched._runtime import runtime
from batched._runtime.waits import current_worker


class Holding:
    """Batch function that answers "early" at once, and returns when the test allows it."""

    def __init__(self, result: Any = "soon") -> None:
        self.result = result
        self.told: list[bool] = []
        self.go = threading.Event()

    def __call__(self, items: list[str]) -> list[str]:
        worker = current_worker()
        assert worker is not None
        self.told += [
            worker.answer_early(item, self.result) for item in items if item.startswith("early")
        ]
        assert self.go.wait(30)
        return [f"{item} at last" for item in items]


def decorated(holding: Holding, size: int) -> Any:
    return batched.dynamically(batch_size=size, flush="window", timeout_ms=60_000)(holding)


async def awaited(fn: Any, item: str) -> str:
    found: str = await fn.acall(item)
    return found


WAYS: list[Callable[[Any, str], str]] = [
    lambda fn, item: str(fn(item)),
    lambda fn, item: str(fn.submit(item).result()),
    lambda fn, item: asyncio.run(awaited(fn, item)),
    lambda fn, item: str(next(fn.map([item]))),
]


@pytest.mark.parametrize("call", WAYS, ids=["call", "submit", "acall", "map"])
def test_a_call_is_answered_before_its_batch_has_ended(call: Callable[[Any, str], str]) -> None:
    holding = Holding()
    fn = decorated(holding, 2)
    with fn, ThreadPoolExecutor(1) as other:
        late = other.submit(fn, "late")
        assert call(fn, "early") == "soon"
        assert not late.done()
        assert fn.stats.in_flight == 1
        holding.go.set()
        assert late.result(30) == "late at last"
    assert holding.told == [True]
    assert (fn.stats.total_processed, fn.stats.errors) == (2, 0)


def test_a_list_is_answered_as_a_whole() -> None:
    holding = Holding()
    holding.go.set()
    with decorated(holding, 3) as fn:
        assert fn(["early one", "b", "early two"]) == [
            "early one at last",
            "b at last",
            "early two at last",
        ]
    assert holding.told == [False, False]


def test_an_early_error_is_that_of_its_caller_alone() -> None:
    holding = Holding(ValueError("no"))
    with decorated(holding, 2) as fn, ThreadPoolExecutor(1) as other:
        late = other.submit(fn, "late")
        with pytest.raises(ValueError, match="no"):
            fn("early")
        holding.go.set()
        assert late.result(30) == "late at last"


def test_all_of_a_batch_may_be_answered_early_and_the_next_one_runs() -> None:
    holding = Holding()
    with decorated(holding, 2) as fn, ThreadPoolExecutor(2) as callers:
        assert list(callers.map(fn, ["early one", "early two"])) == ["soon", "soon"]
        holding.go.set()
        assert fn(["a", "b"]) == ["a at last", "b at last"]


def test_a_failure_during_an_early_answer_leaves_no_caller_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> int:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(runtime, "complete", broken)
    with decorated(Holding(), 2) as fn, ThreadPoolExecutor(2) as callers:
        early, late = callers.submit(fn, "early"), callers.submit(fn, "late")
        assert early.result(30) == "soon"
        assert isinstance(late.exception(30), MemoryError)


def test_a_caller_who_has_gone_is_not_answered() -> None:
    entered, holding = threading.Event(), Holding()

    def function(items: list[str]) -> list[str]:
        entered.set()
        assert left.wait(30)
        return holding(items)

    async def main() -> None:
        task = asyncio.create_task(fn.acall("early"))
        await asyncio.to_thread(entered.wait, 30)
        task.cancel()
        await asyncio.wait([task])
        left.set()

    left = threading.Event()
    fn = batched.dynamically(function)
    holding.go.set()
    with fn:
        asyncio.run(main())
    assert holding.told == [True]


def test_on_a_loop_calls_are_answered_with_their_batch() -> None:
    told: list[bool] = []

    @batched.aio.dynamically
    async def fn(items: list[str]) -> list[str]:
        worker = current_worker()
        assert worker is not None
        told.append(worker.answer_early(items[0], "soon"))
        return items

    assert asyncio.run(fn.acall("early")) == "early"
    assert told == [False]
