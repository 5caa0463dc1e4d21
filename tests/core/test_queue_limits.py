"""Admission to a full queue, and expiry, by arithmetic: each `now` is a literal (s)."""

from __future__ import annotations

import math

import pytest

from batched._core.linger import AT_ONCE, NEVER
from batched._core.scheduler import Request, Scheduler
from scheduling import call, departure, ran, requests_of, scheduler


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


def test_a_call_is_queued_once_if_a_signal_interrupts_its_admission() -> None:
    class Broken(dict[Request, None]):
        def __setitem__(self, request: Request, _: None) -> None:
            raise KeyboardInterrupt

    full = scheduler(max_queue_size=1)
    _, late = submitted(full, 1, 1)
    full.admitted = Broken()
    with pytest.raises(KeyboardInterrupt):
        full.take(0.0)
    full.admitted = {}
    full._admit()
    assert (full.waiting, len(full.blocked), list(full.admitted), list(full)) == (
        1,
        0,
        [late],
        [late],
    )


def test_the_time_of_a_call_sent_ahead_counts_from_its_turn() -> None:
    full = scheduler(queue_timeout_ms=1000, batch_size=1, max_queue_size=2)
    ahead, next_one, blocked = submitted(full, 1, 1, 1)
    for request in (ahead, next_one, blocked):
        full.count_wait(request, None)
    assert (full.next_expiry(), full.expire(100.0)) == (NEVER, [])
    other = call(1)
    full.submit(other, 100.0)
    full.count_wait(ahead, 100.5)
    full.count_wait(blocked, 100.5)
    assert full.next_expiry() == 101.0
    assert full.expire(101.0) == [other]
    assert full.expire(101.5) == [ahead, blocked]
    assert requests_of(ran(full, 200.0)) == [next_one]


def test_a_call_that_has_begun_expires_no_more() -> None:
    busy = scheduler(queue_timeout_ms=1000, batch_size=2)
    begun, ended = submitted(busy, 3, 1)
    ran(busy)
    busy.count_wait(begun, 1.0)
    ran(busy)
    busy.count_wait(ended, 1.0)
    assert busy.next_expiry() == NEVER


def test_a_repaired_queue_keeps_waiting_blocked_and_expiring_requests() -> None:
    full = scheduler(max_queue_size=2, queue_timeout_ms=1000)
    requests = submitted(full, 1, 1, 1, 1)
    for request in requests:
        request.waker = object()
    gone, waits, admitted, blocked = requests
    gone.waker = None  # an interrupted cancellation has gone so far
    waits.error = ValueError("about to be cancelled")
    full.waiting = 99
    full.repair()
    assert (list(full), list(full.admitted)) == ([waits, admitted, blocked], [admitted])
    assert (full.waiting, list(full.blocked)) == (2, [blocked])
    assert waits.error is None
    assert full.expire(1.0) == [waits, admitted, blocked]
    assert (full.waiting, full.next_expiry()) == (0, NEVER)
