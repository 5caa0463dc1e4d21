"""Promises of the scheduler, by arithmetic: every `now` is a literal number of seconds."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from typing import Literal

import pytest

from batched._core.linger import AT_ONCE, NEVER, Hindsight
from batched._core.policy import Flush
from batched._core.scheduler import Request, Scheduler
from scheduling import (
    all_ran,
    call,
    departure,
    ran,
    requests_of,
    scheduler,
    submitted,
    taken,
    windowed,
)

FLUSHES: tuple[Flush, ...] = ("auto", "eager", "window")


class Owner:
    """Object that lives as long as its call."""


# ---------------------------------------------------------------- when a batch leaves


@pytest.mark.parametrize("flush", FLUSHES)
@pytest.mark.parametrize("sizes", [(4,), (1, 1, 1, 1), (3, 1), (2, 3), (80,)])
def test_a_full_batch_leaves_at_once_under_every_flush(
    flush: Flush, sizes: tuple[int, ...]
) -> None:
    busy = scheduler(flush=flush, timeout_ms=1e6)
    submitted(busy, *map(call, sizes))
    assert busy.next_deadline() == AT_ONCE
    batch = taken(busy)
    assert (batch.size, batch.reason) == (4, "full")


@pytest.mark.parametrize("flush", ["auto", "eager"])
def test_eager_holds_no_call_and_auto_holds_none_before_it_has_learned(
    flush: Literal["auto", "eager"],
) -> None:
    eager = scheduler(flush=flush, timeout_ms=1e6)
    one = call()
    assert departure(eager, one, 7.0) == AT_ONCE
    assert eager.next_deadline() == AT_ONCE
    batch = taken(eager, 7.0)
    assert (batch.slices, batch.reason) == ([(one, 0, 1)], "eager")


def test_a_window_holds_until_the_timeout_and_not_a_moment_longer() -> None:
    held = windowed(timeout_ms=250)
    one = call()
    held.submit(one, 10.0)
    assert held.next_deadline() == 10.25
    assert held.take(math.nextafter(10.25, 0.0)) is None
    batch = taken(held, 10.25)
    assert (batch.slices, batch.reason, batch.started) == ([(one, 0, 1)], "timeout", 10.25)


@pytest.mark.parametrize("threshold", [0, 2, 8])
def test_a_window_counts_from_the_oldest_item_of_either_class(threshold: int) -> None:
    """With a threshold of 2, the oldest call is once the small call and once the large call."""
    for sizes in ((1, 3), (3, 1)):
        held = windowed(5, small_batch_threshold=threshold)
        for size, arrival in zip(sizes, (2.0, 2.75), strict=True):
            held.submit(call(size), arrival)
        assert held.next_deadline() == 3.0
        assert held.take(math.nextafter(3.0, 0.0)) is None
        assert taken(held, 3.0).size == 4


def test_time_behind_a_busy_worker_counts_for_the_window() -> None:
    busy = windowed()
    submitted(busy, call(4))
    running = taken(busy)
    late = call()
    busy.submit(late, 0.25)
    assert busy.take(5.0) is None
    busy.finished(running, 5.0)
    assert busy.next_deadline() == 1.25
    assert taken(busy, 5.0).slices == [(late, 0, 1)]


@pytest.mark.parametrize("size", [5, 6, 7])
@pytest.mark.parametrize("threshold", [0, 8])
def test_a_call_that_has_partly_run_is_never_held(size: int, threshold: int) -> None:
    held = windowed(small_batch_threshold=threshold)
    begun = call(size)
    submitted(held, begun)
    assert ran(held).slices == [(begun, 0, 4)]
    assert held.next_deadline() == AT_ONCE
    rest = ran(held)
    assert (rest.slices, rest.reason) == ([(begun, 4, size)], "eager")


def test_separate_items_that_leave_do_not_hurry_the_rest() -> None:
    held = windowed()
    rows = call(6)
    rows.separate = True
    submitted(held, rows)
    assert ran(held).slices == [(rows, 0, 4)]
    assert held.take(0.0) is None
    held.cancel(rows)
    submitted(held, call())
    assert held.take(0.0) is None, "no call of the group has begun"


@pytest.mark.parametrize("how", ["ran", "cancelled"])
def test_a_group_is_held_again_when_none_of_its_calls_has_begun(how: str) -> None:
    held = windowed()
    begun = call(5)
    submitted(held, begun)
    ran(held)
    if how == "ran":
        # one call more than fits with the rest
        submitted(held, *(call() for _ in range(4)), now=2.0)
        assert requests_of(ran(held, 2.0))[0] is begun
    else:
        held.submit(call(), 2.0)
        assert held.next_deadline() == AT_ONCE
        held.cancel(begun)
    assert held.waiting == 1
    assert held.next_deadline() == 3.0
    assert held.take(2.5) is None


# ---------------------------------------------------------------- contents of a batch


def test_a_call_that_does_not_fit_is_split_and_goes_on_where_it_stopped() -> None:
    busy = scheduler()
    first, long, last = call(3), call(6), call(2)
    submitted(busy, first, long, last)
    assert [batch.slices for batch in all_ran(busy)] == [
        [(first, 0, 3), (long, 0, 1)],
        [(long, 1, 5)],
        [(long, 5, 6), (last, 0, 2)],
    ]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 24, 100])
def test_batches_are_filled_as_far_as_possible(batch_size: int) -> None:
    busy = scheduler(batch_size, small_batch_threshold=2)
    submitted(busy, *(call(size) for size in (1, 5, 2, 9, 1, 3, 3)))
    sizes = [batch.size for batch in all_ran(busy)]
    assert sizes == [batch_size] * (24 // batch_size) + [24 % batch_size] * (24 % batch_size > 0)


def test_groups_never_mix() -> None:
    busy = scheduler(batch_size=8)
    submitted(busy, *(call(1, number % 3) for number in range(12)))
    batches = all_ran(busy)
    assert [{request.group_key for request in requests_of(batch)} for batch in batches] == [
        {0},
        {1},
        {2},
    ]
    assert [batch.size for batch in batches] == [4, 4, 4]


def test_the_oldest_small_call_of_all_groups_leads() -> None:
    busy = scheduler()
    submitted(busy, call(1, "b"), call(1, "a"), call(1, "b"), call(1, "c"))
    assert [(requests_of(batch)[0].group_key, batch.size) for batch in all_ran(busy)] == [
        ("b", 2),
        ("a", 1),
        ("c", 1),
    ]


def test_a_held_group_never_keeps_a_worker_from_another_group() -> None:
    busy = windowed()
    held, full = call(1, "held"), call(4, "full")
    busy.submit(held, 0.0)
    busy.submit(full, 0.5)
    assert busy.next_deadline() == AT_ONCE
    assert requests_of(ran(busy, 0.5)) == [full]
    assert busy.take(0.5) is None
    assert requests_of(ran(busy, 1.0)) == [held]


# ---------------------------------------------------------------- small first


@pytest.mark.parametrize("groups", [("g", "g"), ("g", "h")])
@pytest.mark.parametrize(
    ("batch_size", "size"),
    [(4, 9), (9, 9), (32, 320), (64, 9)],
)
def test_a_small_call_goes_before_a_large_one_that_came_first(
    batch_size: int, size: int, groups: tuple[str, str]
) -> None:
    busy = scheduler(batch_size)
    large, small = call(size, groups[0]), call(1, groups[1])
    submitted(busy, large, small)
    assert requests_of(taken(busy))[0] is small


@pytest.mark.parametrize("threshold", [0, 1, 8])
def test_a_call_of_exactly_the_threshold_is_small_and_one_item_more_is_not(threshold: int) -> None:
    busy = scheduler(small_batch_threshold=threshold)
    larger, exact = call(threshold + 1), call(max(1, threshold))
    submitted(busy, larger, exact)
    assert requests_of(taken(busy))[0] is (exact if threshold else larger)


@pytest.mark.parametrize("size", [1, 9])
def test_each_class_is_served_first_come_first_served(size: int) -> None:
    busy = scheduler(batch_size=size)
    calls = [call(size, group) for group in "abcabacc"]
    submitted(busy, *calls)
    assert [requests_of(batch) for batch in all_ran(busy)] == [[one] for one in calls]


def test_a_small_call_that_was_split_is_still_small_and_still_first_of_its_group() -> None:
    busy = scheduler()
    first, split, large, late = call(3), call(2), call(9), call(1)
    submitted(busy, first, split, large)
    assert ran(busy).slices == [(first, 0, 3), (split, 0, 1)]
    busy.submit(late, 0.0)
    assert ran(busy).slices == [(split, 1, 2), (late, 0, 1), (large, 0, 2)]


def test_a_large_call_does_not_become_small_as_its_end_comes_near() -> None:
    busy = scheduler(small_batch_threshold=2)
    large, late, small = call(6), call(3), call(1)
    submitted(busy, large, late)
    assert ran(busy).slices == [(large, 0, 4)]
    busy.submit(small, 0.0)
    assert ran(busy).slices == [(small, 0, 1), (large, 4, 6), (late, 0, 1)]


@pytest.mark.parametrize("before", range(20))
def test_a_small_call_in_the_middle_of_a_call_of_80_is_in_the_very_next_batch(before: int) -> None:
    busy = scheduler()
    small, large = call(), call(80)
    submitted(busy, large)
    for _ in range(before):
        assert requests_of(ran(busy)) == [large]
    busy.submit(small, 0.0)
    assert requests_of(ran(busy)) == [small, large]
    assert sum(batch.size for batch in all_ran(busy)) == 80 - 4 * before - 3


# ---------------------------------------------------------------- large calls get their share

Traffic = Callable[[Scheduler, int], None]


def steady(*groups: str) -> Traffic:
    """Keep more than two batches of small calls waiting in each of `groups`."""

    def arrive(busy: Scheduler, _: int) -> None:
        waiting = {
            group: sum(request.group_key == group and request.size == 1 for request in busy)
            for group in groups
        }
        for group, count in waiting.items():
            submitted(
                busy, *(call(1, group) for _ in range(2 * busy.policy.batch_size + 1 - count))
            )

    return arrive


def with_gaps(period: int, places: int) -> Traffic:
    """Fill every batch with small calls, but leave `places` free in one of every `period`."""

    def arrive(busy: Scheduler, number: int) -> None:
        waiting = sum(request.size == 1 for request in busy)
        room = busy.policy.batch_size - (places if number % period == 1 else 0)
        submitted(busy, *(call() for _ in range(room - waiting)))

    return arrive


def batches_per_large_call(busy: Scheduler, larges: list[Request], arrive: Traffic) -> list[int]:
    """Return the number of batches until each of `larges` was finished.

    The count begins when the call is the oldest large call.
    """
    submitted(busy, *larges)
    counts: list[int] = []
    number = 0
    for large in larges:
        count = 0
        while large.dispatched < large.size:
            arrive(busy, number)
            ran(busy)
            count += 1
            number += 1
            assert count <= 10 * large.size + 10, "starved"
        counts.append(count)
    return counts


def bound(size: int, batch_size: int) -> int:
    return math.ceil(4 * size / batch_size) + 1


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 8, 9, 10, 32, 64])
@pytest.mark.parametrize("groups", [("g",), ("h",), ("h", "i", "j"), ("g", "h")])
@pytest.mark.parametrize("sizes", [(9,), (9, 9, 9, 9), (80,), (80, 9, 33, 10, 64)])
def test_a_large_call_is_finished_in_time_behind_any_amount_of_small_traffic(
    batch_size: int, groups: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    counts = batches_per_large_call(
        scheduler(batch_size), [call(size) for size in sizes], steady(*groups)
    )
    for size, count in zip(sizes, counts, strict=True):
        assert count <= bound(size, batch_size)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 7, 9, 16, 32])
def test_a_large_call_is_finished_in_time_also_when_it_fills_gaps_now_and_then(
    batch_size: int,
) -> None:
    for period in range(2, 8):
        for places in {1, batch_size // 2, batch_size - 1, batch_size} - {0}:
            for size in {9, 80, 20 * batch_size}:
                (count,) = batches_per_large_call(
                    scheduler(batch_size), [call(size)], with_gaps(period, places)
                )
                assert count <= bound(size, batch_size), (period, places, size)


def test_an_unused_share_is_not_saved() -> None:
    """A large call that had many batches to itself has no claim on later batches."""
    busy = scheduler()
    large = call(400)
    submitted(busy, large)
    for _ in range(50):
        assert requests_of(ran(busy)) == [large]
    for number in range(3):
        steady("g")(busy, number)
        assert large not in requests_of(ran(busy))


def test_a_large_call_does_not_pay_for_batches_that_it_had_to_itself() -> None:
    busy = scheduler()
    large = call(400)
    submitted(busy, large)
    for _ in range(90):
        assert requests_of(ran(busy)) == [large]
    for number in range(bound(40, 4)):
        steady("g")(busy, number)
        ran(busy)
    assert large.dispatched == 400


def test_the_next_large_call_starts_without_credit() -> None:
    busy = scheduler()
    first, second = call(400), call(400)
    submitted(busy, first)
    for _ in range(3):
        steady("g")(busy, 0)
        assert first not in requests_of(ran(busy))
    busy.cancel(first)
    ran(busy)
    submitted(busy, second)
    for _ in range(3):
        steady("g")(busy, 0)
        assert second not in requests_of(ran(busy))


@pytest.mark.parametrize("batch_size", [1, 4, 8, 32, 36, 64, 1000])
@pytest.mark.parametrize("sizes", [(9,), (16,), (17,), (80,), (9, 80), (33, 40, 65)])
@pytest.mark.parametrize("groups", [("passage",), ("passage", "title", "query"), tuple("abcdefgh")])
def test_small_calls_never_wait_for_more_than_two_batches_in_a_row_that_large_ones_lead(
    batch_size: int, sizes: tuple[int, ...], groups: tuple[str, ...]
) -> None:
    busy = scheduler(batch_size)
    in_a_row = 0
    for number in range(60):
        submitted(
            busy,
            *(
                call(size, groups[(number + index) % len(groups)])
                for index, size in enumerate(sizes)
            ),
        )
        if not any(request.size == 1 for request in busy):
            submitted(busy, call(1, "query"))
        in_a_row = 0 if requests_of(ran(busy))[0].size == 1 else in_a_row + 1
        assert in_a_row <= 2


# ---------------------------------------------------------------- workers


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_no_more_batches_run_at_once_than_allowed(workers: int) -> None:
    busy = scheduler(max_concurrent_batches=workers)
    submitted(busy, call(80))
    running = [taken(busy) for _ in range(workers)]
    assert not busy.has_room
    assert busy.take(0.0) is None
    assert busy.next_deadline() == NEVER
    busy.finished(running[-1], 1.0)
    assert busy.has_room
    assert busy.next_deadline() == AT_ONCE
    taken(busy, 1.0)
    assert busy.take(1.0) is None


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_prefetch_is_the_number_of_batches_that_are_formed_early(
    workers: int, prefetch: int
) -> None:
    busy = scheduler(max_concurrent_batches=workers, prefetch=prefetch)
    submitted(busy, call(80))
    running = [taken(busy) for _ in range(workers + prefetch)]
    assert busy.take(0.0) is None
    busy.finished(running[0], 1.0)
    taken(busy, 1.0)
    assert busy.take(1.0) is None


# ---------------------------------------------------------------- cancelling


def test_a_cancelled_call_that_was_partly_handed_out_loses_its_rest() -> None:
    busy = scheduler()
    begun, late = call(9), call()
    submitted(busy, begun)
    running = taken(busy)
    assert busy.cancel(begun) is False
    assert (busy.waiting, busy.in_flight) == (0, 4)
    busy.submit(late, 0.0)
    busy.finished(running, 1.0)
    assert [requests_of(batch) for batch in all_ran(busy, 1.0)] == [[late]]


# ---------------------------------------------------------------- counts


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("size", [1, 9])
@pytest.mark.parametrize("how", ["ran", "cancelled", "part ran, rest cancelled"])
def test_a_call_that_has_ended_is_not_kept_alive(how: str, size: int) -> None:
    busy = scheduler()
    owner = Owner()
    gone = weakref.ref(owner)
    ending = Request([0] * size, size, "g", waker=None, owner=owner)
    submitted(busy, ending, call(9), call(1))
    if how == "ran":
        all_ran(busy)
    elif how == "cancelled":
        busy.cancel(ending)
    else:
        ran(busy)
        busy.cancel(ending)
    del owner, ending
    assert gone() is None


# ---------------------------------------------------------------- failing keys


class Key:
    """Group key that can be made to fail comparisons. All keys have the same hash."""

    failing = False

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        if Key.failing:
            raise RuntimeError("no comparison")
        return self is other


def test_a_key_that_cannot_be_compared_fails_only_the_call_that_brought_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = scheduler()
    first, bad = call(1, Key()), call(1, Key())
    submitted(busy, first)
    monkeypatch.setattr(Key, "failing", True)
    with pytest.raises(RuntimeError, match="no comparison"):
        busy.submit(bad, 0.0)
    assert (busy.waiting, list(busy)) == (1, [first])
    assert requests_of(ran(busy)) == [first]
    assert (busy.waiting, busy._groups) == (0, {})


# ---------------------------------------------------------------- closing


def test_closing_drains_everything_in_order() -> None:
    held = windowed(batch_size=3)
    calls = [call(1, group) for group in "abcabacab"]
    submitted(held, *calls)
    held.draining = True
    batches = all_ran(held)
    assert [(requests_of(batch)[0].group_key, batch.size, batch.reason) for batch in batches] == [
        ("a", 3, "full"),
        ("b", 3, "full"),
        ("c", 2, "drain"),
        ("a", 1, "drain"),
    ]
    assert (held.waiting, held._groups, list(held)) == (0, {}, [])


def test_calls_that_have_left_are_freed_while_another_call_waits() -> None:
    held = windowed(batch_size=2, timeout_ms=1e9)
    submitted(held, call())
    gone: list[weakref.ref[Owner]] = []
    for _ in range(50):
        owner = Owner()
        gone.append(weakref.ref(owner))
        submitted(held, *(Request([0], 1, "other", waker=None, owner=owner) for _ in range(2)))
        assert ran(held).size == 2
    del owner
    assert sum(ref() is not None for ref in gone) <= 1
    assert held.waiting == 1


# ---------------------------------------------------------------- several workers, and ahead


def test_a_batch_that_is_not_full_is_not_made_ready_while_all_workers_are_busy() -> None:
    queue = scheduler(batch_size=2, flush="eager", prefetch=1)
    submitted(queue, call())
    first = taken(queue)
    submitted(queue, call())
    assert queue.take(1.0) is None
    assert queue.next_deadline() == NEVER
    queue.finished(first, 2.0)
    assert queue.next_deadline() <= 2.0
    assert taken(queue, 2.0).size == 1


def test_a_full_batch_is_made_ready_while_all_workers_are_busy() -> None:
    queue = scheduler(batch_size=2, flush="eager", prefetch=1)
    submitted(queue, call())
    taken(queue)
    submitted(queue, call(), call(), call(), call())
    assert taken(queue, 1.0).size == 2
    assert queue.take(1.0) is None, "there is one ready already"


def test_a_batch_that_blocks_the_queue_is_made_ready_though_it_is_not_full() -> None:
    """The queue is full, so no call can join the batch."""
    queue = scheduler(batch_size=4, flush="eager", prefetch=1, max_queue_size=2)
    submitted(queue, call(2))
    taken(queue)
    submitted(queue, call(2), call(1))
    assert taken(queue, 1.0).size == 2


@pytest.mark.parametrize("waits", [1, 9])
def test_no_call_starves_behind_batches_that_are_made_ready(waits: int) -> None:
    """A small or large call waits in another group, while other callers always fill a batch."""
    queue = scheduler(batch_size=4, flush="eager", prefetch=1, small_batch_threshold=8)
    submitted(queue, call(4), call(4))
    running = [taken(queue), taken(queue)]
    late = call(waits, "other")
    submitted(queue, late)
    batches = 0
    while late.dispatched < late.size:
        submitted(queue, *[call() for _ in range(8)])
        queue.finished(running.pop(0), 1.0)
        while (batch := queue.take(1.0)) is not None:
            running.append(batch)
            batches += 1
        assert queue.next_deadline() > 1.0, "it takes whatever it says may leave"
    assert batches <= 4 * 9 / 4 + 4


def test_a_window_holds_calls_even_if_workers_are_free() -> None:
    queue = scheduler(flush="window", timeout_ms=1000, max_concurrent_batches=2)
    assert departure(queue, call(), 5.0) == 6.0


def test_only_a_batch_that_would_take_the_last_free_worker_is_held() -> None:
    queue = scheduler(batch_size=4, timeout_ms=1000, max_concurrent_batches=2)
    rule = queue._rule
    assert isinstance(rule, Hindsight)
    rule._linger, rule.holds, rule.reason = 0.5, True, "settled"
    rule.note_outstanding(4)
    assert departure(queue, call(), 1.0) == AT_ONCE, "two workers are free"
    first = taken(queue, 1.0)
    assert first.reason == "eager"
    assert departure(queue, call(), 2.0) == 2.5
    assert queue.take(2.0) is None
    queue.finished(first, 2.25)
    assert taken(queue, 2.25).reason == "eager"


@pytest.mark.once
@pytest.mark.parametrize("flush", ["auto", "eager"])
def test_the_cost_of_taking_a_batch_does_not_grow_with_the_queue(flush: Flush) -> None:
    """The cost is a number of function calls. The first batches sort the waiting calls."""

    def count(waiting: int) -> int:
        queue = scheduler(batch_size=8, flush=flush)
        for number in range(waiting):
            queue.submit(Request([0], 1, "g", lengths=[number * 7 % 512 + 1]), 0.0)
        calls = 0

        def noted(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        for now in range(1, 6):
            queue.finished(taken(queue, float(now)), now + 0.5)
        sys.setprofile(noted)
        try:
            queue.take(7.0)
        finally:
            sys.setprofile(None)
        return calls

    assert count(20_000) <= 3 * count(100)
