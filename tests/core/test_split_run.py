"""Batches that are cut because their padding would take longer than another batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batched._core.cost import ENOUGH, TimeBySize
from batched._core.formation import split_run
from batched._core.policy import BatchPolicy
from batched._core.request import Request
from batched._core.scheduler import Batch, Scheduler

FIXED, CELL = 0.010, 0.001
"""Fixed time of a batch, and time of each of its cells (s)."""


def call(*lengths: int) -> Request:
    return Request([0] * len(lengths), len(lengths), "g", None, lengths=list(lengths))


def taken(of: Scheduler) -> list[int]:
    """Run the next batch. Return its lengths, longest first."""
    batch = of.take(0.0)
    assert batch is not None
    finish(of, batch)
    return sorted(
        (request.lengths or [])[position]
        for request, start, stop in batch.slices
        for position in range(start, stop)
    )[::-1]


def finish(of: Scheduler, batch: Batch) -> None:
    batch.attempts = 1
    batch.started = -(FIXED + CELL * batch.size * batch.longest)
    of.finished(batch, 0.0)


def experienced(batch_size: int = 8) -> Scheduler:
    """Return a scheduler that has learned the costs: a batch costs as much as ten cells."""
    scheduler = Scheduler(BatchPolicy(batch_size=batch_size, flush="eager"))
    for number in range(6 * ENOUGH):
        scheduler.submit(call(*[5 + number % 2] * (1 + number % 3)), 0.0)
        taken(scheduler)
    return scheduler


# ---------------------------------------------------------------- gain of a cut


def saved(lengths: list[int], place: int) -> int:
    return (lengths[0] - lengths[place]) * (len(lengths) - place)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.data(), st.integers(0, 500))
@settings(max_examples=300, deadline=None)
def test_a_part_holds_its_item_and_no_further_cut_pays(
    lengths: list[int], data: st.DataObject, batch_in_cells: int
) -> None:
    lengths.sort(reverse=True)
    at = data.draw(st.integers(0, len(lengths) - 1))
    low, high = split_run(lengths, at, batch_in_cells)
    assert 0 <= low <= at < high <= len(lengths)
    of_part = lengths[low:high]
    assert all(saved(of_part, place) <= batch_in_cells for place in range(1, len(of_part)))
    if low or high < len(lengths):
        assert max(saved(lengths, place) for place in range(1, len(lengths))) > batch_in_cells


def test_no_batch_is_cut_until_the_cost_of_a_batch_is_known() -> None:
    assert split_run([1000, 1, 1], 0, math.inf) == (0, 3)
    fresh = Scheduler(BatchPolicy(batch_size=4, flush="eager"))
    for length in (1000, 1, 1):
        fresh.submit(call(length), 0.0)
    assert taken(fresh) == [1000, 1, 1]


# ---------------------------------------------------------------- which batches leave


def test_calls_that_fit_one_batch_leave_in_two_if_two_take_less_time() -> None:
    busy = experienced()
    for length in (3, 100, 2, 3):
        busy.submit(call(length), 0.0)
    assert taken(busy) == [3, 3, 2]
    assert taken(busy) == [100]


def test_the_oldest_call_goes_first_even_if_it_is_the_longest() -> None:
    busy = experienced()
    for length in (100, 3, 2, 3):
        busy.submit(call(length), 0.0)
    assert taken(busy) == [100]
    assert taken(busy) == [3, 3, 2]


def test_little_padding_is_no_reason_for_another_batch() -> None:
    busy = experienced()
    for length in (4, 3, 2, 3):
        busy.submit(call(length), 0.0)
    assert taken(busy) == [4, 3, 3, 2]


def test_a_run_of_a_backlog_is_cut_too() -> None:
    busy = experienced(batch_size=4)
    for length in (90, 5, 5, 5, 5, 4, 4, 85):
        busy.submit(call(length), 0.0)
    assert [taken(busy) for _ in range(3)] == [[90, 85], [5, 5, 5, 5], [4, 4]]


def test_a_small_call_of_several_items_goes_whole() -> None:
    busy = experienced()
    for lengths in ((60, 2), (61,), (3,), (3,)):
        busy.submit(call(*lengths), 0.0)
    assert taken(busy) == [61, 60, 2]
    assert taken(busy) == [3, 3]


def test_a_large_call_is_cut_by_its_lengths() -> None:
    busy = experienced(batch_size=16)
    busy.submit(call(*[200, 195], *[5] * 12), 0.0)
    assert taken(busy) == [200, 195]
    assert taken(busy) == [5] * 12


@pytest.mark.parametrize(
    "waiting", [[[200], [3], [50] * 12], [[200], [50] * 12], [[3], [50] * 12], [[50] * 12, [3]]]
)
def test_no_batch_is_filled_with_items_that_need_more_padding_than_a_batch_costs(
    waiting: list[list[int]],
) -> None:
    busy = experienced(batch_size=16)
    for lengths in waiting:
        busy.submit(call(*lengths), 0.0)
    assert sorted(taken(busy) for _ in waiting) == sorted(waiting)


def test_items_that_need_little_padding_fill_up_a_batch() -> None:
    busy = experienced(batch_size=16)
    for lengths in ([50], [51, *[49] * 4, *[10] * 20]):
        busy.submit(call(*lengths), 0.0)
    assert taken(busy) == [51, 50, 49, 49, 49, 49]
    assert taken(busy) == [10] * 16


@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=1, max_size=30),
    st.integers(1, 8),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([None, 100]),
)
@settings(max_examples=200, deadline=None)
def test_every_item_leaves_once_in_batches_that_fit(
    calls: list[list[int]], batch_size: int, small: int, most_tokens: int | None
) -> None:
    busy = Scheduler(
        BatchPolicy(
            batch_size=batch_size,
            flush="eager",
            small_batch_threshold=small,
            max_batch_tokens=most_tokens,
        )
    )
    for cells in (10, 30) * ENOUGH:
        busy.capacity.cost.add(cells, 20 + cells)  # a batch costs as much as 20 cells
    requests = [call(*sorted(lengths, reverse=True)) for lengths in calls]
    for request in requests:
        busy.submit(request, 0.0)
    left = {(request, position) for request in requests for position in range(request.size)}
    while (batch := busy.take(0.0)) is not None:
        items = [
            (request, position)
            for request, start, stop in batch.slices
            for position in range(start, stop)
        ]
        assert len(set(items)) == len(items) == batch.size <= batch_size
        assert batch.longest == max(
            (request.lengths or [])[position] for request, position in items
        )
        assert most_tokens is None or batch.size == 1 or batch.size * batch.longest <= most_tokens
        left -= set(items)
        busy.finished(batch, 0.0)
    assert not left
    assert not busy.waiting


# ---------------------------------------------------------------- known costs


def test_the_fixed_size_is_the_offset_of_the_line_divided_by_its_slope() -> None:
    cost = TimeBySize()
    for size in (10, 40, 20, 80, 10, 60, 30, 50) * 4:
        cost.add(size, FIXED + CELL * size)
    assert cost.fixed_size == pytest.approx(FIXED / CELL, rel=0.05)


def test_the_fixed_size_is_unknown_if_times_do_not_grow_with_sizes() -> None:
    cost = TimeBySize()
    for size, seconds in ((10, 0.05), (40, 0.01), (20, 0.08), (80, 0.03)) * 8:
        cost.add(size, seconds)
    assert cost.fixed_size == math.inf


def test_the_fixed_size_is_never_zero() -> None:
    cost = TimeBySize()
    for size in (10, 40, 20, 80) * 4:
        cost.add(size, CELL * size)
    assert cost.fixed_size == pytest.approx(0.05 * 37.5, rel=0.1)
