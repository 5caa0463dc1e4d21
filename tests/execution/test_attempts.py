"""Attempts at a batch, without a queue, waker, lock or clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from batched._collate.arguments import Arguments
from batched._collate.collator import Call, Collator, GroupsNeeded
from batched._collate.items import ItemCollator
from batched._core.policy import BatchPolicy
from batched._core.scheduler import Batch, Request, Scheduler, Slice
from batched._execution.attempts import ErrorTest, Outcomes
from batched._execution.execution import Execution, is_failure, never
from batched._execution.memory import is_out_of_memory
from batched._runtime.settling import complete, settle
from batched.errors import BatchFunctionError

NO_ARGUMENTS = Arguments((), {})
COLLATOR = ItemCollator("fn")


def attempt(
    batch: Batch,
    function: Callable[[list[Any]], list[Any]],
    collator: Collator = COLLATOR,
    *,
    splits: ErrorTest = never,
    isolates: ErrorTest = never,
) -> Outcomes:
    """Run a batch, and return the outcomes."""
    return Execution(function, collator, splits=splits, isolates=isolates).run(batch)


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


def run(
    batch: Batch, function: Function, splits: ErrorTest = never, isolates: ErrorTest = never
) -> list[tuple[int, Any, int]]:
    """Return the row, the result and the number of attempts of each single call, in order."""
    outcomes = attempt(batch, function, splits=splits, isolates=isolates)
    found = [
        (request.items, result, tried)
        for (request, _, _), result, tried in zip(*outcomes, strict=True)
    ]
    return sorted(found, key=lambda each: each[0])


@pytest.mark.parametrize("bad", range(20))
def test_twenty_rows_with_one_bad_and_memory_for_eight_take_13_calls_or_fewer(bad: int) -> None:
    function, batch = Function(8, {bad}), batch_of(*rows(20))
    found = run(batch, function, is_out_of_memory, is_failure)
    assert [row for row, _, _ in found] == list(range(20))
    for row, result, _ in found:
        if row == bad:
            assert isinstance(result, ValueError)
            assert str(result) == f"bad row {bad}"
        else:
            assert result == row * 10
    assert len(function.calls) == batch.attempts <= 13


def test_attempts_are_counted_for_each_slice() -> None:
    function = Function(memory=4, bad={1})
    found = run(batch_of(*rows(8)), function, is_out_of_memory, is_failure)
    # all eight; the first four; two of them; each of these alone
    assert [tried for _, _, tried in found] == [4, 4, 3, 3, 2, 2, 2, 2]
    assert [sum(row in call for call in function.calls) for row in range(8)] == [
        tried for _, _, tried in found
    ]


@pytest.mark.parametrize(
    ("memory", "bad", "count", "fitted"),
    [(8, set(), 3, True), (8, {1}, 3, False), (2, set(), 3, False), (0, set(), 1, False)],
)
def test_a_batch_has_fitted_if_one_call_returned_for_all_of_it(
    memory: int, bad: set[int], count: int, fitted: bool
) -> None:
    batch = batch_of(*rows(count))
    run(batch, Function(memory, bad), is_out_of_memory, is_failure)
    assert batch.fitted is fitted


def test_separate_items_of_a_call_fail_alone() -> None:
    function = Function(8, {0, 5})
    call = Request(list(range(8)), 8, NO_ARGUMENTS, listed=True, separate=True)
    slices, results, _ = attempt(batch_of(call), function, isolates=is_failure)
    found: dict[int, Any] = {}
    for (_, start, stop), result in zip(slices, results, strict=True):
        some = [str(result)] if isinstance(result, ValueError) else result
        found.update(zip(range(start, stop), some, strict=True))
    assert found == {
        0: "bad row 0",
        **{row: row * 10 for row in (1, 2, 3, 4, 6, 7)},
        5: "bad row 5",
    }


def test_a_call_sorted_by_length_gets_the_error_of_its_first_bad_item() -> None:
    lengths, order = [9, 8, 7, 6], [3, 2, 1, 0]  # the longest came last
    call = Request([3, 2, 1, 0], 4, NO_ARGUMENTS, None, True, None, lengths, order)
    function = Function(8, {3, 0})
    outcomes = attempt(batch_of(call), function, isolates=is_failure)
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
    outcomes = attempt(batch, function, OneParity("fn"), isolates=is_failure)
    assert function.calls == [[0, 1, 2, 3, 4], [0, 2, 4], [-1, -3], [-1], [-3]]
    assert [str(result) for result in outcomes[1]] == ["0", "20", "40", "-10", "bad row -3"]
    assert (outcomes[2], batch.attempts) == ([2, 2, 2, 3, 3], 5)


@pytest.mark.parametrize("coroutine", [False, True])
def test_each_attempt_at_the_calls_of_a_method_gets_the_instance(coroutine: bool) -> None:
    function = Function(8, {1})
    owner = object()

    def method(self: object, items: list[int]) -> list[int]:
        assert self is owner
        return function(items)

    async def awaited(self: object, items: list[int]) -> list[int]:
        return method(self, items)

    batch = batch_of(*rows(4))
    for request, _, _ in batch.slices:
        request.owner = owner
    execution = Execution(awaited if coroutine else method, COLLATOR, isolates=is_failure)
    outcomes = asyncio.run(execution.run_async(batch)) if coroutine else execution.run(batch)
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


@pytest.mark.parametrize("coroutine", [False, True])
@pytest.mark.parametrize("step", ["collate", "split", "join"])
def test_an_error_of_the_collator_reaches_the_callers_of_its_batch(
    step: str, coroutine: bool
) -> None:
    def fail(*_: Any) -> Any:
        raise SystemExit

    async def returned(items: list[Any]) -> list[Any]:
        return items

    collator = ItemCollator("fn")
    setattr(collator, step, fail)
    execution = Execution(returned if coroutine else list, collator)
    scheduler = Scheduler(BatchPolicy(batch_size=3))  # the calls are split
    requests = [Request([i] * 4, 4, NO_ARGUMENTS, waker=object(), listed=True) for i in range(2)]
    for request in requests:
        scheduler.submit(request, 0.0)
    ended: list[Request] = []
    while (batch := scheduler.take(0.0)) is not None:
        outcomes = asyncio.run(execution.run_async(batch)) if coroutine else execution.run(batch)
        scheduler.finished(batch, 1.0)
        ended += settle(scheduler, outcomes)[1]
    assert complete(ended, collator.join, "fn") == 2
    for request in requests:
        assert isinstance(request.error, BatchFunctionError)
        assert isinstance(request.error.__cause__, SystemExit)
