"""Batches of similar lengths: bounds of padding, waiting and memory, by arithmetic."""

from __future__ import annotations

import random

import pytest

from batched._core.cost import ENOUGH
from batched._core.scheduler import Batch, Request
from scheduling import all_ran, ran, scheduler, submitted


def call(*lengths: int) -> Request:
    return Request(list(lengths), len(lengths), "g", lengths=sorted(lengths, reverse=True))


def lengths(batch: Batch) -> list[int]:
    of_each = [each.lengths[start:stop] for each, start, stop in batch.slices if each.lengths]
    return sorted((length for some in of_each for length in some), reverse=True)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([[3], [100], [2], [3]], [[3, 3, 2], [100]]),
        ([[90], [5], [5], [5], [5], [4], [4], [85]], [[90, 85], [5, 5, 5, 5, 4, 4]]),
        ([[200, 195, *[5] * 12]], [[200, 195], [5] * 12]),
        ([[3], [50] * 12, [200]], [[3], [200], [50] * 12]),
    ],
    ids=str,
)
def test_padding_takes_no_longer_than_another_batch(
    calls: list[list[int]], expected: list[list[int]]
) -> None:
    """A batch costs as much as ten cells, by the times of past batches."""
    busy = scheduler(16, flush="eager")
    for cells in (10, 30) * ENOUGH:
        busy.capacity.cost.add(cells, 0.010 + 0.001 * cells)
    submitted(busy, *(call(*each) for each in calls))
    assert [lengths(batch) for batch in all_ran(busy)] == expected


def test_a_backlog_leaves_with_a_fraction_of_the_padding_of_arrival_order() -> None:
    dice, busy = random.Random(1), scheduler(32)
    arrived = [dice.randint(5, 120) for _ in range(1000)]
    submitted(busy, *map(call, arrived))
    batches = all_ran(busy)
    unsorted = [arrived[at : at + 32] for at in range(0, 1000, 32)]
    padding = sum(batch.size * batch.longest for batch in batches) - sum(arrived)
    assert padding < 0.15 * (sum(len(batch) * max(batch) for batch in unsorted) - sum(arrived))
    assert len(batches) == len(unsorted), "no batch more than without"


@pytest.mark.parametrize(("size", "budget"), [(4, None), (16, 500), (16, 50)])
def test_a_large_call_is_finished_in_time_behind_any_amount_of_small_traffic(
    size: int, budget: int | None
) -> None:
    """The limit is four times the batches that the call would need alone, plus one."""
    busy = scheduler(batch_size=size, max_batch_tokens=budget)
    large = call(*[60] * 31)
    submitted(busy, large)
    alone, batches = -(-31 // busy.capacity.max_items(60)), 0
    while large.dispatched < large.size:
        submitted(busy, *(call(5 + (batches + 7 * number) % 116) for number in range(2 * size)))
        ran(busy)
        batches += 1
    assert batches <= 4 * alone + 1


@pytest.mark.parametrize("length", [1, 60, 119, 500])
def test_a_small_call_begins_in_time_behind_later_calls_of_any_length(length: int) -> None:
    """Behind k small calls, it is in one of the next 3 * (k + 1) batches."""
    busy = scheduler(batch_size=4, small_batch_threshold=1, max_batch_tokens=500)
    one, batches = call(length), 0
    submitted(busy, *(call(5 + 53 * number % 116) for number in range(10)), one)
    while not one.dispatched:
        submitted(busy, *(call(5 + batches % 7) for _ in range(5)), call(*[100] * 9))
        ran(busy)
        batches += 1
    assert batches <= 3 * 11


def test_what_a_large_call_leaves_free_goes_to_the_next_large_call() -> None:
    busy = scheduler(4, flush="eager", small_batch_threshold=1)
    submitted(busy, call(*[10] * 6), call(*[9] * 6))
    assert [lengths(batch) for batch in all_ran(busy)] == [[10] * 4, [10, 10, 9, 9], [9] * 4]


def test_calls_within_and_behind_the_look_ahead_can_be_cancelled() -> None:
    busy = scheduler(2, flush="eager", small_batch_threshold=1)
    calls = [call(number) for number in range(1, 500)]
    submitted(busy, *calls)
    ran(busy)
    busy.cancel(calls[2])
    busy.cancel(calls[-1])
    ran_then = [length for batch in all_ran(busy) for length in lengths(batch)]
    assert sorted(ran_then) == list(range(4, 499))
