"""Promises of the scheduler, by arithmetic: every `now` is a literal number of seconds."""

from __future__ import annotations

import math
import sys
import weakref

import pytest

from batched._core.capacity import Room
from batched._core.linger import AT_ONCE, Hindsight
from batched._core.policy import Flush
from batched._core.scheduler import Batch, Request, Scheduler
from scheduling import all_ran, call, ran, scheduler, submitted, taken


def windowed(batch_size: int = 4, timeout_ms: float = 1000) -> Scheduler:
    return scheduler(batch_size, flush="window", timeout_ms=timeout_ms)


def requests_of(batch: Batch) -> list[Request]:
    return [request for request, _, _ in batch.slices]


@pytest.mark.parametrize("flush", ["auto", "eager", "window"])
@pytest.mark.parametrize("sizes", [(4,), (1, 1, 1, 1), (2, 3)])
def test_a_full_batch_leaves_at_once_under_every_flush(
    flush: Flush, sizes: tuple[int, ...]
) -> None:
    busy = scheduler(flush=flush, timeout_ms=1e6)
    submitted(busy, *map(call, sizes))
    assert busy.next_deadline() == AT_ONCE
    batch = taken(busy)
    assert (batch.size, batch.reason) == (4, "full")


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


def test_a_held_group_never_keeps_a_worker_from_another_group() -> None:
    busy = windowed()
    held, full = call(1, "held"), call(4, "full")
    busy.submit(held, 0.0)
    busy.submit(full, 0.5)
    assert busy.next_deadline() == AT_ONCE
    assert requests_of(ran(busy, 0.5)) == [full]
    assert busy.take(0.5) is None
    assert requests_of(ran(busy, 1.0)) == [held]


@pytest.mark.parametrize("before", [0, 1, 18, 19])
def test_a_small_call_in_the_middle_of_a_call_of_80_is_in_the_very_next_batch(before: int) -> None:
    busy = scheduler()
    small, large = call(), call(80)
    submitted(busy, large)
    for _ in range(before):
        assert requests_of(ran(busy)) == [large]
    busy.submit(small, 0.0)
    assert requests_of(ran(busy)) == [small, large]
    assert sum(batch.size for batch in all_ran(busy)) == 80 - 4 * before - 3


@pytest.mark.parametrize("batch_size", [1, 3, 8, 9, 64])
@pytest.mark.parametrize("groups", [("g",), ("h",), ("g", "h")])
def test_a_large_call_is_finished_in_time_behind_any_amount_of_small_traffic(
    batch_size: int, groups: tuple[str, ...]
) -> None:
    """Batches count from the moment when the call is the oldest large call."""
    busy, larges = scheduler(batch_size), [call(size) for size in (9, 80, 9, 33, 10, 64)]
    submitted(busy, *larges)
    for large in larges:
        batches = 0
        while large.dispatched < large.size:
            for group in groups:  # where more than two batches of small calls always wait
                waiting = sum(each.group_key == group and each.size == 1 for each in busy)
                submitted(busy, *(call(1, group) for _ in range(2 * batch_size + 1 - waiting)))
            ran(busy)
            batches += 1
            assert batches <= math.ceil(4 * large.size / batch_size) + 1


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("batches", [0, 1, 5])
def test_a_call_that_has_run_or_was_cancelled_is_not_kept_alive(batches: int) -> None:
    busy = windowed(timeout_ms=1e9)
    owner = set[int]()
    gone = weakref.ref(owner)
    ending = Request([0] * 9, 9, "g", waker=None, owner=owner)
    submitted(busy, call(1, "held"), ending, call(9), call(1))
    for _ in range(batches):
        ran(busy)
    busy.cancel(ending)
    del owner, ending
    assert gone() is None
    assert busy.waiting


def test_only_a_batch_that_would_take_the_last_free_worker_is_held() -> None:
    queue = scheduler(batch_size=4, timeout_ms=1000, max_concurrent_batches=2)
    rule = queue._rule
    assert isinstance(rule, Hindsight)
    rule.linger, rule.holds, rule.reason = 0.5, True, "settled"
    rule.note_outstanding(4)
    assert queue.ready_at(queue.submit(call(), 1.0)) == AT_ONCE, "two workers are free"
    first = taken(queue, 1.0)
    assert first.reason == "eager"
    assert queue.ready_at(queue.submit(call(), 2.0)) == 2.5
    assert queue.take(2.0) is None
    queue.finished(first, 2.25)
    assert taken(queue, 2.25).reason == "eager"


def test_a_held_group_that_fills_a_batch_once_memory_is_short_leaves() -> None:
    held = scheduler(4, flush="window", timeout_ms=1e9, max_concurrent_batches=2)
    submitted(held, call(4), call(1, "older"))
    submitted(held, call(2, "full then"), now=1.0)
    batch = taken(held, 1.0)
    assert held.take(1.0) is None
    batch.too_big, batch.fitted = [(4, 0)], False
    held.finished(batch, 1.0)
    assert ran(held, 1.0).size == 2


@pytest.mark.once
@pytest.mark.parametrize("flush", ["eager", "window"])
@pytest.mark.parametrize("lengths", [None, [7]])
def test_the_work_for_a_batch_does_not_grow_with_the_waiting_groups(
    flush: Flush, lengths: list[int] | None
) -> None:
    def calls_of_functions(groups: int) -> int:
        queue = scheduler(8, flush=flush, timeout_ms=1e6, queue_timeout_ms=1e6)
        requests = [Request([0], 1, number, lengths=lengths) for number in range(groups)]
        late = [Request([0], 1, "late", lengths=lengths) for _ in range(9)]
        submitted(queue, *requests)
        queue.take(0.0)
        queue.next_deadline()
        events: list[str] = []
        sys.setprofile(lambda _frame, event, _argument: events.append(event))
        try:
            submitted(queue, *late)
            if (batch := queue.take(1.0)) is not None:
                queue.finished(batch, 1.5)
            queue.cancel(late[-1])
            queue.cancel(requests[-1])
            queue.next_deadline()
            queue.expire(1.5)
            queue.join("late", Room(queue.capacity, 1, 7, 4), 1.5)
        finally:
            sys.setprofile(None)
        return len(events)

    assert calls_of_functions(400) <= 1.2 * calls_of_functions(40)
