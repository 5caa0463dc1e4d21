"""Tests of the linger rules: arithmetic, and closed loops of callers."""

from __future__ import annotations

import heapq
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from batched._core.linger import NEVER, RECENT, WAIT_WEIGHT, Eager, Hindsight, Window, flush_rule
from batched._core.policy import BatchPolicy
from batched._core.scheduler import Batch, Request, Scheduler
from virtual_time import Model, batches

FIXED = Model(5.0, 0.0, jitter=0.0)


def test_each_setting_selects_its_rule() -> None:
    assert isinstance(flush_rule(BatchPolicy()), Hindsight)
    assert isinstance(flush_rule(BatchPolicy(timeout_ms=1e9)), Hindsight)
    assert type(flush_rule(BatchPolicy(timeout_ms=0))) is Eager, "nobody is to be held"
    eager = flush_rule(BatchPolicy(flush="eager", timeout_ms=1000))
    assert type(eager) is Eager
    assert not eager.holds
    window = flush_rule(BatchPolicy(flush="window", timeout_ms=250))
    assert isinstance(window, Window)
    assert (window.since(10.0, 11.0), window.linger) == (10.0, 0.25)
    assert flush_rule(BatchPolicy(flush="window")).linger == 0.005


# ---------------------------------------------------------------- the gain in hindsight


def test_the_gains_follow_the_formula() -> None:
    """Two items are ready. Two more come 0.5 and 2 ms later. A wait of 0.52 ms would have caught
    one of them.
    """
    rule = Hindsight(timeout=1.0, batch_size=8)
    rule.finished(1, 0.010, 1, 0)  # s = a = 10 ms: no other size is known
    rule.note_outstanding(4)  # four items are expected
    rule.decide(0, 2, 2, 1.0)
    rule.arrived(0, 1, 1.0005)
    rule.arrived(1, 1, 1.0010)  # in another group
    rule.arrived(0, 1, 1.0020)
    rule.decide(0, 2, 2, 1.02)
    rule.evaluate()
    gains = dict(zip(rule._waits, rule._gains, strict=True))
    for wait, gain in gains.items():
        if wait < 0.0005:
            expected = -2 * wait * WAIT_WEIGHT
        elif wait < 0.0020:
            saved = 0.010 * 1 / 2
            expected = (
                1 * (saved * (1 - wait / 0.010) - max(0.0, wait - saved)) - 2 * wait * WAIT_WEIGHT
            )
        elif wait <= 0.010:  # not longer than the batch takes
            expected = 2 * 0.010 * (1 - 0.0020 / 0.010) - 2 * 0.0020 * WAIT_WEIGHT  # all are there
        else:
            expected = 0.0  # the batch would be over
        assert gain == pytest.approx(0.1 * expected)
    assert rule.reason == "settled"
    assert rule.since(0.0, 5.0) == rule.since(5.0, 0.0) == 5.0
    assert rule.linger == min(wait for wait in rule._waits if wait >= 0.0020)


@pytest.mark.parametrize(
    ("timeout", "seconds", "longest"),
    [
        (None, 0.003, 0.003),
        (None, 0.008, 0.005),
        (None, 0.100, 0.050),
        (0.6, 0.100, 0.100),
        (0.012, 0.100, 0.012),
        (2.0, 3.0, 2.0),
    ],
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


# ---------------------------------------------------------------- callers who come back


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


def test_the_last_caller_soon_stops_waiting_for_callers_who_have_gone() -> None:
    scheduler = Scheduler(BatchPolicy())
    closed_loop(scheduler, 24, 30, model=FIXED)
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
    assert max(waits) <= 0.005
    assert waits[RECENT + 1 :] == [0.0] * (len(waits) - RECENT - 1)


# ---------------------------------------------------------------- several groups


def test_a_held_group_does_not_starve_behind_a_full_group() -> None:
    """Callers of one group have taught the rule that waiting pays. Then they outnumber a batch, and
    a call of another group arrives.
    """
    scheduler = Scheduler(BatchPolicy(batch_size=8))
    closed_loop(scheduler, 12, 60, model=FIXED, gap=1e-4)
    now = 1e3
    while (batch := scheduler.take(now)) is not None:
        scheduler.finished(batch, now)
    for _ in range(40):
        scheduler.submit(Request([0], 1, "g"), now)
    late = Request([0], 1, "other")
    scheduler.submit(late, now)
    batch = scheduler.take(now)
    for _ in range(12):
        assert batch is not None
        now += 0.005
        scheduler.finished(batch, now)
        back, batch = batch.size, scheduler.take(now)  # before those callers come back
        for _ in range(back):
            scheduler.submit(Request([0], 1, "g"), now + 1e-4)
    assert late.dispatched


# ---------------------------------------------------------------- any history


steps = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "take", "finish", "wait"]),
        st.integers(1, 12),
        st.sampled_from("ab"),
        st.sampled_from([0.0, 1e-5, 3e-4, 2e-3, 0.02]),
    ),
    max_size=80,
)


@pytest.mark.once
@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    steps,
    st.sampled_from([0.01, 1.0, 5.0, 1000.0, None]),
    st.integers(1, 2),
    st.sampled_from([1, 4, 16]),
)
def test_no_call_is_held_for_longer_than_the_timeout(
    history: list[tuple[Literal["submit", "take", "finish", "wait"], int, str, float]],
    timeout_ms: float | None,
    workers: int,
    batch_size: int,
) -> None:
    """Each deadline counts from the arrival or from the moment a worker is free, whichever is
    later. The same history leads to the same decisions.
    """

    def run() -> list[float]:
        policy = BatchPolicy(
            batch_size=batch_size, timeout_ms=timeout_ms, max_concurrent_batches=workers
        )
        longest = 600.0 if timeout_ms is None else timeout_ms
        scheduler, now, free = Scheduler(policy), 0.0, 0.0
        running: list[Batch] = []
        waiting: list[Request] = []
        deadlines = []
        for step, size, group, seconds in history:
            now += seconds
            if step == "submit":
                waiting.append(Request([0] * size, size, group, waker=None))
                scheduler.submit(waiting[-1], now)
            elif step == "finish" and running:
                if len(running) == workers:
                    free = now
                scheduler.finished(running.pop(0), now)
            elif step == "take" and (batch := scheduler.take(now)) is not None:
                running.append(batch)
            waiting = [request for request in waiting if request.dispatched < request.size]
            deadline = scheduler.next_deadline()
            deadlines.append(deadline)
            if len(running) == workers or not waiting:
                assert deadline == NEVER
            else:
                assert (
                    deadline
                    <= min(max(request.arrived, free) for request in waiting) + longest / 1e3
                )
            assert (
                sum(request.size - request.dispatched for request in waiting) == scheduler.waiting
            )
            assert sum(batch.size for batch in running) == scheduler.in_flight
        return deadlines

    assert run() == run()


def test_an_idle_worker_sleeps_until_returning_callers_would_be_held_no_longer() -> None:
    scheduler = Scheduler(BatchPolicy())
    assert scheduler.next_deadline(0.0) == NEVER, "nothing is held"
    closed_loop(scheduler, 24, 30, model=FIXED)
    since, linger = scheduler._free_since, scheduler._rule.linger
    assert linger > 0.0
    assert scheduler.next_deadline(since) == since + linger
    assert scheduler.next_deadline(since + linger) == NEVER, "it is past"
