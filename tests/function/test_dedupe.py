"""dedupe: equal items of one call, and of one batch, are computed once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import batched
from stage import BOUND, Gate


class Deduping:
    """A deduplicating function that records what it computes."""

    def __init__(self, **settings: Any) -> None:
        self.computed: list[list[Any]] = []
        self.gate = Gate()
        self.gate.opened.set()
        self.fn: Any = batched.dynamically(**{"dedupe": True, **settings})(self.compute)

    def compute(self, items: list[Any]) -> list[Any]:
        self.gate(items)
        self.computed.append(items.copy())
        return [KeyError(item) if item == "bad" else [item, {}] for item in items]

    def together(self, *items: Any) -> list[Any]:
        """Return the futures of items that share a batch, which has run."""
        self.gate.opened.clear()
        first = self.fn.submit("first")
        assert self.gate.entered.wait(BOUND)
        futures = [self.fn.submit(item) for item in items]
        self.gate.opened.set()
        first.result(BOUND)
        return futures


def test_equal_items_of_one_batch_are_computed_once_and_each_caller_has_its_own_result() -> None:
    deduping = Deduping()
    results = [each.result(BOUND) for each in deduping.together("a", "b", "a", "a")]
    assert results == [["a", {}], ["b", {}], ["a", {}], ["a", {}]]
    assert deduping.computed == [["first"], ["a", "b"]]
    assert len({id(part) for result in results for part in (result, result[1])}) == 8


def test_a_list_is_as_large_as_its_distinct_items() -> None:
    deduping = Deduping(batch_size=2, max_queue_size=3, on_full="raise", isolate_errors=True)
    results = deduping.fn([*"abab" * 100, "c"])
    assert results == [[letter, {}] for letter in [*"abab" * 100, "c"]]
    assert len({id(result) for result in results}) == 401
    assert deduping.computed == [["a", "b"], ["c"]]
    assert (deduping.fn.stats.calls, deduping.fn.stats.total_processed) == (1, 3)
    with pytest.raises(KeyError, match="bad"):
        deduping.fn(["a", "bad", "a", "bad"])


def test_results_are_in_the_order_of_the_call_where_items_are_sorted_by_length() -> None:
    deduping = Deduping(length=len, batch_size=2)
    items = ["a", "ccc", "bb", "a", "ccc", "dddd"]
    assert deduping.fn(items) == [[item, {}] for item in items]
    assert sorted(each for some in deduping.computed for each in some) == sorted({*items})


def test_items_are_equal_by_type_and_value() -> None:
    deduping = Deduping()
    deduping.together(1, 1.0, True, (1,), (True,), 1)[-1].result(BOUND)
    assert len(deduping.computed[1]) == 5


def test_a_function_may_return_the_key_of_an_item() -> None:
    deduping = Deduping(dedupe=lambda item: item["id"])
    assert len(deduping.fn([{"id": 1}, {"id": 2}, {"id": 1}])) == 3
    assert deduping.computed == [[{"id": 1}, {"id": 2}]]
    with pytest.raises(KeyError, match="id"):
        deduping.fn({})


def test_an_item_without_a_hash_is_an_error_of_its_caller() -> None:
    with pytest.raises(TypeError, match=r"compute: dedupe needs items .* a hash, got \[1\];"):
        Deduping().fn.submit([1])


def test_a_result_that_cannot_be_copied_is_an_error_that_names_dedupe() -> None:
    @batched.dynamically(dedupe=True)
    def locks(items: list[int]) -> list[Any]:
        return [threading.Lock() for _ in items]

    with pytest.raises(batched.BatchFunctionError, match="with dedupe, callers of equal items"):
        locks([1, 1])
    assert len(locks([1, 2])) == 2


def test_arrays_are_copied_and_texts_are_shared() -> None:
    buffer = np.zeros((2, 3))
    arrays: Any = batched.dynamically(dedupe=True)(lambda items: buffer[: len(items)])
    first, second, other = arrays([1, 1, 2])
    first[:] = 7
    assert (second.sum(), other.sum(), buffer.sum()) == (0, 0, 0)
    texts: Any = batched.dynamically(dedupe=True)(lambda items: [f"{each} text" for each in items])
    one, same = texts(["a", "a"])
    assert one is same
