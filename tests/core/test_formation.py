"""Contents and sizes of batches of similar lengths, by arithmetic."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from batched._core.capacity import PATIENCE
from batched._core.cost import ENOUGH
from batched._core.length_index import LOOK_AHEAD
from batched._core.linger import AT_ONCE
from batched._core.scheduler import Batch, Request, Scheduler
from scheduling import all_ran, departure, ran, scheduler, submitted, taken, windowed


def call(*lengths: int, group: Hashable = "g") -> Request:
    """Return a call of items of these lengths, longest first."""
    assert list(lengths) == sorted(lengths, reverse=True)
    return Request(list(lengths), len(lengths), group, waker=None, lengths=list(lengths))


def lengths(batch: Batch) -> list[int]:
    """Return the lengths of all items in a batch, longest first."""
    of_each = [request.items[start:stop] for request, start, stop in batch.slices]
    return sorted((length for some in of_each for length in some), reverse=True)


def leader(batch: Batch) -> Request:
    return batch.slices[0][0]


# ---------------------------------------------------------------- when all fits


def test_calls_that_fit_one_batch_leave_together_in_the_order_of_arrival() -> None:
    busy = scheduler()
    first, second, third = call(5), call(90, 7), call(40)
    submitted(busy, first, second, third)
    batch = ran(busy)
    assert batch.slices == [(first, 0, 1), (second, 0, 2), (third, 0, 1)]
    assert (batch.size, batch.longest) == (4, 90)
    assert (busy.waiting, busy._groups) == (0, {})


def test_the_rest_of_a_call_that_has_begun_leaves_at_once_with_later_calls() -> None:
    busy = scheduler(batch_size=4, small_batch_threshold=2)
    large, small = call(90, 50, 10, 9), call(50)
    submitted(busy, large, small)
    first = ran(busy)
    assert (leader(first), lengths(first)) == (small, [50, 50, 10, 9])
    assert busy.waiting == 1
    submitted(busy, call(10))
    rest = ran(busy)
    assert lengths(rest) == [90, 10]
    assert rest.reason == "eager"  # a call of the group had begun


def test_a_batch_without_lengths_has_no_longest_item() -> None:
    busy = scheduler()
    submitted(busy, Request([0], 1, "g", waker=None))
    batch = ran(busy)
    assert (batch.longest, list(batch.too_big), batch.cells, batch.padding) == (0, [], 0, 0)


# ---------------------------------------------------------------- a small call leads


def test_the_items_nearest_in_length_join_the_oldest_small_call() -> None:
    busy = scheduler(batch_size=3)
    submitted(busy, *map(call, [20, 90, 10, 80, 30, 70, 40, 60, 50]))
    batches = all_ran(busy)
    assert [lengths(batch) for batch in batches] == [[30, 20, 10], [90, 80, 70], [60, 50, 40]]
    assert [leader(batch).items for batch in batches] == [[20], [90], [40]]
    assert [batch.longest for batch in batches] == [30, 90, 60]


def test_calls_beyond_the_look_ahead_are_not_brought_forward() -> None:
    """Earlier calls are nearer in line, even if a later call has the length of the leader."""
    busy = scheduler(batch_size=2)
    near = [call(50), *(call(100 + number) for number in range(2 * LOOK_AHEAD - 1))]
    far = [call(50), call(50), call(99)]
    submitted(busy, *near, *far)
    assert [request for request, _, _ in ran(busy).slices] == near[:2]
    assert [request for request, _, _ in ran(busy).slices] == near[2:4]
    # the order is the same without a later call
    assert busy.cancel(far[2])
    assert [request for request, _, _ in ran(busy).slices] == near[4:6]


# ---------------------------------------------------------------- large calls


def test_room_that_small_calls_leave_goes_to_items_of_large_calls_nearest_in_length() -> None:
    busy = scheduler(batch_size=4, small_batch_threshold=1)
    large = call(90, 60, 50, 40, 30)
    small = call(55)
    submitted(busy, large, small)
    batch = ran(busy)
    assert batch.slices == [(small, 0, 1), (large, 1, 4)]
    assert batch.longest == 60


def test_large_calls_give_longer_items_only_as_long_as_they_fit() -> None:
    busy = scheduler(batch_size=8, small_batch_threshold=1, max_batch_tokens=120)
    large = call(90, 80, 70, 41, 40, 20)
    small = call(30)
    submitted(busy, large, small)
    batch = ran(busy)
    assert batch.slices == [(small, 0, 1), (large, 4, 6)]
    assert (batch.size, batch.longest) == (3, 40)


def earns(busy: Scheduler, large: Request, batches: int) -> None:
    """Let `large` earn its share in `batches` batches of another group."""
    submitted(busy, large)
    for _ in range(batches):
        submitted(busy, call(1, group="other"))
        assert leader(ran(busy)) is not large


def test_room_that_a_large_leader_does_not_need_goes_to_small_calls_nearest_in_length() -> None:
    busy = scheduler(batch_size=5, small_batch_threshold=1)
    large = call(50, 40)
    earns(busy, large, 2)
    submitted(busy, *map(call, [80, 60, 49, 55, 50, 5, 70, 48]))
    batch = ran(busy)
    assert batch.slices[0] == (large, 0, 2)
    assert (lengths(batch), batch.longest) == ([50, 50, 49, 48, 40], 50)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1000, [60, 55, 50, 49]),
        (239, [55, 50, 49]),
        (170, [55, 50, 49]),
        (164, [50, 49]),
        (60, [50]),
    ],
)
def test_small_calls_beside_a_large_leader_may_be_longer_if_they_fit(
    budget: int, expected: list[int]
) -> None:
    busy = scheduler(batch_size=4, small_batch_threshold=1, max_batch_tokens=budget)
    large = call(50, 49)
    earns(busy, large, {1000: 2, 239: 2, 170: 3, 164: 3, 60: 4}[budget])
    submitted(busy, *map(call, [90, 60, 55]))
    batch = ran(busy)
    assert leader(batch) is large
    assert lengths(batch) == expected


@pytest.mark.parametrize(
    ("size", "budget"), [(4, None), (16, None), (4, 300), (16, 500), (4, 100), (16, 50)]
)
@pytest.mark.parametrize("groups", ["g", "h", "gh"])
def test_a_large_call_is_finished_in_time_behind_any_amount_of_small_traffic(
    size: int, budget: int | None, groups: str
) -> None:
    """The limit is four times the batches that the call would need alone, plus one."""
    busy = scheduler(batch_size=size, max_batch_tokens=budget)
    large = call(*(120 - 115 * number // 60 for number in range(61)))
    alone = at = 0
    while at < large.size:
        at += busy.capacity.max_items(large.items[at])
        alone += 1
    submitted(busy, large)
    batches = 0
    while large.dispatched < large.size:
        for number in range(2 * size + 1):
            submitted(
                busy, *(call(5 + (batches + 7 * number) % 116, group=group) for group in groups)
            )
        ran(busy)
        batches += 1
        assert batches <= 4 * alone + 1
    assert budget is not None or batches <= -(-4 * large.size // size) + 1


# ---------------------------------------------------------------- bounded waiting


@pytest.mark.parametrize("length", [1, 60, 119, 120, 121, 500])
@pytest.mark.parametrize("budget", [None, 500, 1])
@pytest.mark.parametrize("threshold", [1, 8])
def test_a_small_call_begins_in_time_behind_later_calls_of_any_length(
    length: int, budget: int | None, threshold: int
) -> None:
    """Each batch that a small call leads takes the oldest small call.

    Behind k small calls, a call is in one of the next k + 1 batches that small calls lead.
    """
    busy = scheduler(batch_size=4, small_batch_threshold=threshold, max_batch_tokens=budget)
    submitted(busy, *(call(*[120] * 9) for _ in range(3)))
    older = [call(5 + 53 * number % 116) for number in range(40)]
    one = call(length)
    submitted(busy, *older, one)
    in_all = led_by_small = number = 0
    while not one.dispatched:
        submitted(
            busy, *(call(5 + (number + 31 * index) % 116) for index in range(5)), call(*[100] * 9)
        )
        led_by_small += leader(ran(busy)).size == 1
        in_all += 1
        number += 1
    assert led_by_small <= len(older) + 1
    assert in_all <= 3 * (len(older) + 1)


# ---------------------------------------------------------------- padding that costs too much

FIXED, CELL = 0.010, 0.001
"""Fixed time of a batch, and time of each of its cells (s): a batch costs as much as ten cells."""


def experienced(**settings: Any) -> Scheduler:
    """Return a scheduler that has learned these times."""
    busy = scheduler(flush="eager", **settings)
    for cells in (10, 30) * ENOUGH:
        busy.capacity.cost.add(cells, FIXED + CELL * cells)
    assert busy.capacity.cost.fixed_size == pytest.approx(10)
    return busy


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([[3], [100], [2], [3]], [[3, 3, 2], [100]]),
        ([[100], [3], [2], [3]], [[100], [3, 3, 2]]),
        ([[4], [3], [2], [3]], [[4, 3, 3, 2]]),
        ([[5], [8], [9], [12]], [[9, 8, 5], [12]]),
        ([[90], [5], [5], [5], [5], [4], [4], [85]], [[90, 85], [5, 5, 5, 5, 4, 4]]),
        ([[60, 2], [61], [3], [3]], [[61, 60], [3, 3, 2]]),
        ([[200, 195, *[5] * 12]], [[200, 195], [5] * 12]),
        ([[3], [50] * 12, [200]], [[3], [200], [50] * 12]),
        ([[50], [51, *[49] * 4, *[10] * 20]], [[51, 50, 49, 49, 49, 49], [10] * 16, [10] * 4]),
    ],
    ids=str,
)
def test_calls_leave_in_several_batches_if_their_padding_takes_longer(
    calls: list[list[int]], expected: list[list[int]]
) -> None:
    busy = experienced(batch_size=16)
    submitted(busy, *(call(*lengths) for lengths in calls))
    assert [lengths(batch) for batch in all_ran(busy)] == expected


def test_padding_is_not_limited_until_its_cost_is_known() -> None:
    busy = scheduler(flush="eager")
    submitted(busy, call(1000), call(1), call(1))
    assert lengths(ran(busy)) == [1000, 1, 1]


# ---------------------------------------------------------------- when a batch leaves


def test_a_batch_is_full_when_one_more_item_would_not_fit_the_token_budget() -> None:
    held = windowed(8, max_batch_tokens=49)
    for _ in range(3):
        assert departure(held, call(10), 0.0) == 1.0
    assert departure(held, call(10), 0.0) == AT_ONCE
    batch = ran(held)
    assert (batch.size, batch.reason) == (4, "full")


def test_an_item_larger_than_the_token_budget_leaves_at_once_and_alone() -> None:
    held = windowed(8, max_batch_tokens=40)
    assert departure(held, call(10), 0.0) == 1.0
    giant = call(41)
    assert departure(held, giant, 0.25) == AT_ONCE
    assert [lengths(ran(held, 0.5)) for _ in range(2)] == [[10], [41]]


# ---------------------------------------------------------------- memory errors


@pytest.mark.parametrize("with_lengths", [False, True])
def test_after_a_memory_error_batches_are_smaller(with_lengths: bool) -> None:
    busy = scheduler(batch_size=8)
    for _ in range(30):
        submitted(busy, call(7) if with_lengths else Request([0], 1, "g", waker=None))
    assert ran(busy, too_big=[(8, 7 * with_lengths), (4, 7 * with_lengths)]).size == 8
    assert [batch.size for batch in all_ran(busy)] == [2] * 11


def test_a_memory_error_of_long_items_leaves_batches_of_short_ones_as_they_were() -> None:
    busy = scheduler(batch_size=4)
    submitted(busy, *(call(90) for _ in range(4)))
    ran(busy, too_big=[(4, 90)])
    submitted(busy, *(call(length) for length in (90, 90, 90, 90, 10, 10, 10, 10)))
    assert [lengths(batch) for batch in all_ran(busy)] == [[90, 90], [90, 90], [10, 10, 10, 10]]


def test_batches_grow_again_after_many_full_batches() -> None:
    busy = scheduler(batch_size=4)
    submitted(busy, Request([0] * 4, 4, "g", waker=None))
    ran(busy, too_big=[(4, 0)])
    submitted(busy, Request([0] * 3000, 3000, "g", waker=None))
    sizes = [batch.size for batch in all_ran(busy)]
    assert sizes[: 2 * PATIENCE + 1] == [2] * PATIENCE + [3] * PATIENCE + [4]


def test_the_time_of_a_batch_that_failed_does_not_count() -> None:
    busy = scheduler(batch_size=8)
    for failed, seconds in ((False, 2.0), (True, 9.0)):
        submitted(busy, call(7))
        batch = taken(busy)
        batch.attempts, batch.fitted = 1, not failed
        busy.finished(batch, seconds)
        assert busy.capacity.cost.mean == 2.0


# ---------------------------------------------------------------- cancelling


def test_a_call_cancelled_in_the_length_index_is_never_in_a_batch() -> None:
    busy = scheduler(batch_size=2)
    calls = [call(length) for length in (50, 10, 40, 20, 30, 10)]
    submitted(busy, *calls)
    ran(busy)
    assert busy.cancel(calls[3]) is True
    assert busy.cancel(calls[3]) is False
    assert [lengths(batch) for batch in all_ran(busy)] == [[10, 10], [30]]
