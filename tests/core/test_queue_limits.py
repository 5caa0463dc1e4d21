"""Admission to a full queue, and expiry, by arithmetic: each `now` is a literal (s)."""

from __future__ import annotations

import math

from batched._core.linger import AT_ONCE, NEVER
from batched._core.scheduler import Request, Scheduler
from scheduling import call, departure, ran, requests_of, scheduler, taken


def submitted(to: Scheduler, *sizes: int, now: float = 0.0) -> list[Request]:
    requests = [call(size) for size in sizes]
    for request in requests:
        to.submit(request, now)
    return requests


# ---------------------------------------------------------------- room in the queue


def test_a_call_larger_than_the_queue_holds_newer_ones_back_and_enters_alone() -> None:
    full = scheduler(max_queue_size=3, batch_size=2)
    first, giant, newer = submitted(full, 1, 7, 1)
    assert requests_of(ran(full)) == [first]
    assert (full.waiting, len(full.blocked), list(full.admitted)) == (7, 1, [giant])
    for left in (5, 3):
        assert requests_of(ran(full)) == [giant]
        assert (full.waiting, len(full.blocked)) == (left, 1)
    assert requests_of(ran(full)) == [giant]
    assert list(full.admitted) == [giant, newer], (
        "one item of the large call waits, and so there is room"
    )
    assert set(requests_of(ran(full))) == {newer, giant}


def test_a_call_that_leaves_makes_room() -> None:
    full = scheduler(max_queue_size=2)
    first, second, third, fourth = submitted(full, 2, 2, 1, 1)
    assert full.cancel(second), "out of the line"
    assert (full.waiting, len(full.blocked), list(full.admitted)) == (2, 2, [])
    assert full.cancel(first), "out of the queue"
    assert (full.waiting, len(full.blocked), list(full.admitted)) == (2, 0, [third, fourth])
    assert not full.cancel(second), "it has left already"


def test_a_full_queue_holds_nothing_back() -> None:
    held = scheduler(max_queue_size=3, flush="window", timeout_ms=1e9)
    submitted(held, 1, 1)
    assert held.next_deadline() == 1e6
    assert departure(held, call(), 0.0) == AT_ONCE
    assert ran(held).reason == "full"
    submitted(held, 2)
    assert held.next_deadline() == 1e6
    assert departure(held, call(2), 0.0) == AT_ONCE, (
        "there is room for one, but the next in line are two"
    )
    assert [ran(held).size, held.waiting, len(held.blocked)] == [2, 2, 0]
    assert held.next_deadline() == 1e6


# ---------------------------------------------------------------- waiting too long


def test_a_call_expires_exactly_when_its_time_is_over() -> None:
    impatient = scheduler(queue_timeout_ms=250)
    (one,) = submitted(impatient, 3, now=10.0)
    assert impatient.next_expiry() == 10.25
    assert impatient.expire(math.nextafter(10.25, 0.0)) == []
    assert impatient.expire(10.25) == [one]
    assert (impatient.waiting, impatient.next_expiry(), impatient.next_deadline()) == (
        0,
        NEVER,
        NEVER,
    )


def test_blocked_time_counts_and_an_expired_call_makes_room() -> None:
    impatient = scheduler(max_queue_size=1, queue_timeout_ms=1000)
    first, in_line = submitted(impatient, 1, 1)
    (last,) = submitted(impatient, 1, now=0.5)
    assert impatient.expire(1.0) == [first, in_line]
    assert (list(impatient), len(impatient.blocked), list(impatient.admitted)[-1]) == (
        [last],
        0,
        last,
    )


def test_a_call_that_has_begun_expires_no_more() -> None:
    busy = scheduler(queue_timeout_ms=1000, batch_size=2)
    submitted(busy, 3, 1)
    ran(busy)
    assert busy.next_expiry() == 1.0, "one call has not begun"
    ran(busy)
    assert busy.next_expiry() == NEVER


def test_the_time_left_is_that_of_the_batches_one_by_one() -> None:
    busy = scheduler(batch_size=2)
    submitted(busy, 7)
    assert busy.time_left(2) == 0.0, "no batch has ended"
    busy.finished(taken(busy), 3.0)
    assert busy.time_left(2) == 9.0
