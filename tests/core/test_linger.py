"""Tests of the linger rules, by arithmetic and in closed loops of callers."""

from __future__ import annotations

import heapq
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from batched._core.linger import NEVER, RECENT, Hindsight
from batched._core.policy import BatchPolicy
from batched._core.scheduler import Batch, Request, Scheduler
from virtual_time import Model, batches

FIXED = Model(5.0, 0.0, jitter=0.0)


@pytest.mark.parametrize(
    ("timeout", "seconds", "longest"),
    [(None, 0.008, 0.005), (None, 0.100, 0.050), (0.6, 0.100, 0.100), (0.012, 0.100, 0.012)],
)
def test_no_wait_is_longer_than_the_timeout_or_half_of_a_batch_or_the_batch(
    timeout: float | None, seconds: float, longest: float
) -> None:
    """The other seven callers come back within each of the waits in turn."""
    rule = Hindsight(timeout, batch_size=8)
    rule.finished(1, seconds, 8, 0)
    chosen, now = [], 1.0
    for wait in rule._waits:
        for _ in range(40):
            rule.finished(1, seconds, 8, 0)
            rule.decide("g", 1, 1, now)
            rule.arrived("g", 7, now + 0.99 * wait)
            now += seconds + wait
            rule.evaluate()
        chosen.append(rule.linger)
    assert max(chosen) == max(wait for wait in rule._waits if wait <= longest)


@pytest.mark.parametrize("from_event_loop", [True, False])
def test_calls_before_a_worker_looks_are_no_reason_to_wait(from_event_loop: bool) -> None:
    """Bursts have four and three calls in turns, 15 us apart. A worker looks after the last call of
    each burst.
    """
    scheduler = Scheduler(BatchPolicy(), tick=0.001 if from_event_loop else 0.0)
    held = []
    for burst in range(4 * RECENT):
        now = burst * 0.1
        for _ in range(4 - burst % 2):
            now += 15e-6
            scheduler.submit(Request([0], 1, "g", waker=None), now, from_event_loop=from_event_loop)
        batch = scheduler.take(now)
        held.append(batch is None)
        batch = batch or scheduler.take(now + 0.005)
        assert batch is not None
        assert batch.size == 4 - burst % 2
        scheduler.finished(batch, now + 0.010)
    assert any(held) != from_event_loop


def closed_loop(
    scheduler: Scheduler, callers: int, count: int, *, model: Model, gap: float = 1e-5
) -> list[Batch]:
    """Return the batches of `callers`. All callers of a batch call again, one after another, when
    it ends.
    """
    done: list[Batch] = []
    calls = [(gap * caller, caller) for caller in range(callers)]
    for batch in batches(scheduler, model, calls, 1):
        done.append(batch)
        if len(done) == count:
            break
        for place, (request, _, _) in enumerate(batch.slices, 1):
            heapq.heappush(calls, (batch.ended + gap * place, request.items[0]))
    return done


def test_a_lone_caller_never_waits() -> None:
    alone = closed_loop(Scheduler(BatchPolicy()), 1, 100, model=FIXED, gap=0.001)
    assert all(batch.started == batch.slices[0][0].arrived for batch in alone)


@pytest.mark.parametrize("callers", [2, 3, 8, 24, 32])
def test_callers_who_come_back_are_merged_within_ten_batches(callers: int) -> None:
    """Under eager the callers stay in two convoys, which take turns."""
    model = Model(5.0, 0.1, jitter=0.0)
    auto = closed_loop(Scheduler(BatchPolicy()), callers, 40, model=model)
    assert [batch.size for batch in auto[10:]] == [callers] * 30
    eager = closed_loop(Scheduler(BatchPolicy(flush="eager")), callers, 40, model=model)
    assert max(batch.size for batch in eager[10:]) < callers


@pytest.mark.parametrize("callers", [24, 40])
def test_the_last_caller_soon_stops_waiting_for_callers_who_have_gone(callers: int) -> None:
    scheduler = Scheduler(BatchPolicy())
    closed_loop(scheduler, callers, 30, model=FIXED)
    while (batch := scheduler.take(1e6)) is not None:
        scheduler.finished(batch, 1e6)
    waits = []
    for number in range(3 * RECENT):
        now = 1e6 + number
        scheduler.submit(Request([0], 1, "g", waker=None), now)
        taken = scheduler.take(now)
        left = now if taken else scheduler.next_deadline()
        waits.append(left - now)
        taken = taken or scheduler.take(left)
        assert taken is not None
        scheduler.finished(taken, left + 0.005)
    assert max(waits) <= 0.005 + 1e-6
    assert waits[RECENT + 1 :] == [0.0] * (len(waits) - RECENT - 1)


steps = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "take", "finish", "wait"]),
        st.integers(1, 12),
        st.sampled_from("ab"),
        st.sampled_from([0.0, 1e-5, 3e-4, 2e-3, 0.02]),
    ),
    max_size=80,
)
policies = st.builds(
    BatchPolicy,
    timeout_ms=st.sampled_from([0.0, 0.01, 5.0, 1000.0, None]),
    max_concurrent_batches=st.integers(1, 2),
    batch_size=st.sampled_from([1, 4, 16]),
)


@pytest.mark.once
@settings(max_examples=150, derandomize=True, deadline=None)
@given(steps, policies)
def test_no_call_is_held_for_longer_than_the_timeout(
    history: list[tuple[Literal["submit", "take", "finish", "wait"], int, str, float]],
    policy: BatchPolicy,
) -> None:
    """Each deadline counts from the arrival or from the moment a worker is free, whichever is
    later.
    """
    longest = 0.6 if policy.timeout_ms is None else policy.timeout_ms / 1e3
    scheduler, now, free = Scheduler(policy), 0.0, 0.0
    running: list[Batch] = []
    waiting: list[Request] = []
    for step, size, group, seconds in history:
        now += seconds
        if step == "submit":
            waiting.append(Request([0] * size, size, group, waker=None))
            scheduler.submit(waiting[-1], now)
        elif step == "finish" and running:
            if len(running) == policy.max_concurrent_batches:
                free = now
            scheduler.finished(running.pop(0), now)
        elif step == "take" and (batch := scheduler.take(now)) is not None:
            running.append(batch)
        waiting = [request for request in waiting if request.dispatched < request.size]
        deadline = scheduler.next_deadline()
        if len(running) == policy.max_concurrent_batches or not waiting:
            assert deadline == NEVER
        else:
            since = min(max(request.arrived, free) for request in waiting)
            assert deadline <= since + longest


def test_an_idle_worker_sleeps_until_returning_callers_would_be_held_no_longer() -> None:
    scheduler = Scheduler(BatchPolicy())
    assert scheduler.next_deadline(0.0) == NEVER, "nothing is held"
    closed_loop(scheduler, 24, 30, model=FIXED)
    since, linger = scheduler._free_since, scheduler._rule.linger
    assert linger > 0.0
    assert scheduler.next_deadline(since) == since + linger
    assert scheduler.next_deadline(since + linger) == NEVER, "it is past"
