"""Attempts at a batch, without a queue, waker, lock or clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from batched._collate.arguments import Arguments
from batched._collate.collator import Call, Collator, GroupsNeeded
from batched._collate.items import ItemCollator
from batched._core.scheduler import Batch, Request, Slice
from batched._execution.attempts import ErrorTest, Outcomes, passes
from batched._execution.execution import Execution, is_failure, never
from batched._execution.memory import is_out_of_memory

NO_ARGUMENTS = Arguments((), {})
COLLATOR = ItemCollator("fn")


def attempt(
    batch: Batch,
    function: Callable[..., Any],
    collator: Collator = COLLATOR,
    *,
    splits: ErrorTest = never,
) -> Outcomes:
    """Run a batch, in parts after errors, and return the outcomes."""
    return Execution(function, collator, splits=splits, isolates=is_failure).run(batch)


class Function:
    """A batch function with memory for a few items, which fails for some of them."""

    def __init__(self, memory: int, bad: set[int]) -> None:
        self.memory = memory  # items
        self.bad = bad
        self.calls: list[list[int]] = []

    def __call__(self, items: list[int]) -> list[int]:
        self.calls.append(items)
        if len(items) > self.memory:
            raise MemoryError("too many")
        for item in items:
            if item in self.bad:
                raise ValueError(f"bad row {item}")
        return [item * 10 for item in items]


def batch_of(*requests: Request) -> Batch:
    slices = [(request, 0, request.size) for request in requests]
    longest = max([request.lengths[0] if request.lengths else 0 for request in requests])
    size = sum([request.size for request in requests])
    return Batch(slices, size, "full", 0.0, longest)


def rows(count: int) -> list[Request]:
    """Return one call for each row, without a waker."""
    return [Request(row, 1, NO_ARGUMENTS) for row in range(count)]


@pytest.mark.parametrize("bad", range(20))
def test_twenty_rows_with_one_bad_and_memory_for_eight_take_13_calls_or_fewer(bad: int) -> None:
    function, batch = Function(8, {bad}), batch_of(*rows(20))
    slices, results, _ = attempt(batch, function, splits=is_out_of_memory)
    found = {request.items: result for (request, _, _), result in zip(slices, results, strict=True)}
    assert sorted(found) == list(range(20))
    for row, result in found.items():
        if row == bad:
            assert isinstance(result, ValueError)
            assert str(result) == f"bad row {bad}"
        else:
            assert result == row * 10
    assert len(function.calls) == batch.attempts <= 13
    assert not batch.fitted


def test_a_call_sorted_by_length_gets_the_error_of_its_first_bad_item() -> None:
    lengths, order = [9, 8, 7, 6], [3, 2, 1, 0]  # the longest came last
    call = Request([3, 2, 1, 0], 4, NO_ARGUMENTS, None, True, None, lengths, order)
    outcomes = attempt(batch_of(call), Function(8, {3, 0}))
    errors = [result for result in outcomes[1] if isinstance(result, ValueError)]
    assert [str(error) for error in errors] == ["bad row 0", "bad row 3"]


class OneParity(ItemCollator):
    """A collator that cannot split an output for odd and even numbers. It negates odd ones."""

    def split(self, output: list[Any], slices: list[Slice], context: Any) -> Any:
        if len({request.items % 2 for request, _, _ in slices}) == 1:
            return super().split(output, slices, context)
        even = [each for each in slices if each[0].items % 2 == 0]
        odd = [each for each in slices if each[0].items % 2 == 1]
        raise GroupsNeeded([(even, self.collate), (odd, self.collate_negated)])

    def collate_negated(self, slices: list[Slice], batch: Batch) -> Call:
        (items,), kwargs, context = self.collate(slices, batch)
        return ([-item for item in items],), kwargs, context


def test_a_batch_whose_output_cannot_be_split_is_run_in_groups_and_each_call_counts() -> None:
    function, batch = Function(8, {-3}), batch_of(*rows(5))
    outcomes = attempt(batch, function, OneParity("fn"))
    assert function.calls == [[0, 1, 2, 3, 4], [0, 2, 4], [-1, -3], [-1], [-3]]
    assert [str(result) for result in outcomes[1]] == ["0", "20", "40", "-10", "bad row -3"]
    assert (outcomes[2], batch.attempts) == ([2, 2, 2, 3, 3], 5)


def test_each_attempt_at_the_calls_of_a_method_gets_the_instance() -> None:
    function, owner, batch = Function(8, {1}), object(), batch_of(*rows(4))

    def method(self: object, items: list[int]) -> list[int]:
        assert self is owner
        return function(items)

    for request, _, _ in batch.slices:
        request.owner = owner
    outcomes = attempt(batch, method)
    assert sorted(map(str, outcomes[1])) == ["0", "20", "30", "bad row 1"]


def test_a_cancelled_task_makes_no_further_attempt() -> None:
    calls: list[list[int]] = []

    async def function(items: list[int]) -> list[int]:
        calls.append(items)
        raise ValueError if len(calls) == 1 else asyncio.CancelledError

    def is_cancellation(error: BaseException) -> bool:
        return isinstance(error, asyncio.CancelledError)

    execution = Execution(function, COLLATOR, isolates=is_failure, ends_task=is_cancellation)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(execution.run_async(batch_of(*rows(4))))
    assert calls == [[0, 1, 2, 3], [0, 1]]


def test_a_test_of_an_error_that_fails_counts_as_false() -> None:
    assert not passes(lambda error: bool(1 / 0), ValueError())
