"""Limits of requests, in virtual time."""

from __future__ import annotations

import random
from math import inf
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batched._chat.limits import (
    DECREASE,
    FIRST_PAUSE,
    MOST_FAILURES,
    MOST_PAUSE,
    OTHERS,
    WINDOW,
    Budget,
    Limits,
    Outcome,
    Permit,
)

pytestmark = pytest.mark.once


def limits_of(most: int = 10, requests: int | None = None, tokens: int | None = None) -> Limits:
    limits = Limits(random=lambda: 0.0)
    limits.allow(most, requests, tokens)
    return limits


def send_one(limits: Limits, now: float, outcome: Outcome, asked: float | None = None) -> None:
    """Send a request that ends at once."""
    assert limits.ready_at(now, 0) <= now
    limits.end(limits.begin(now, 0), now, outcome, asked=asked)


def send(limits: Limits, count: int, now: float = 0.0) -> list[Permit]:
    return [limits.begin(now, 0) for _ in range(count)]


def open_breaker(limits: Limits, now: float) -> float:
    """Open the breaker, and return the moment of the first probe."""
    for _ in range(MOST_FAILURES):
        send_one(limits, now, "failure")
    assert limits.open_until is not None
    return limits.open_until


@pytest.mark.parametrize("outcome", ["refusal", "time limit"])
def test_the_limit_is_lowered_once_for_all_running_requests(outcome: Outcome) -> None:
    limits = limits_of(10)
    for permit in send(limits, 4):
        limits.end(permit, 1.0, outcome, asked=1.0)
    assert limits.limit == int(10 * DECREASE)
    limits.end(limits.begin(3.0, 0), 3.0, outcome, asked=1.0)
    assert limits.limit == int(int(10 * DECREASE) * DECREASE)


def test_the_limit_is_not_raised_soon_after_a_pause_that_the_service_named() -> None:
    limits = limits_of(10)
    for permit in send(limits, 10):
        limits.end(permit, 0.0, "refusal", asked=1.0)
    lowered = limits.limit
    for now, expected in ((2.0, lowered), (9.0, lowered), (11.0, lowered + 1)):
        for _ in range(30):
            send_one(limits, now, "answer")
        assert limits.limit >= expected
        assert (limits.limit > lowered) is (expected > lowered)


def test_a_refusal_holds_all_requests_until_the_latest_moment_that_was_named() -> None:
    limits = limits_of()
    first, second = send(limits, 2)
    limits.end(first, 0.0, "refusal", asked=20.0)
    limits.end(second, 1.0, "refusal", asked=5.0)
    assert limits.ready_at(2.0, 0) == 20.0
    assert limits.ready_at(20.0, 0) == 20.0


def test_pauses_double_with_each_refusal_that_names_no_moment_until_an_answer() -> None:
    limits, now = limits_of(), 0.0
    pauses = []
    for _ in range(8):
        send_one(limits, now, "refusal")
        pauses.append(limits.held_until - now)
        now = limits.held_until + 0.1
    half = FIRST_PAUSE / 2  # the random share is a half
    assert pauses[:5] == pytest.approx([half, 2 * half, 4 * half, 8 * half, 16 * half])
    assert pauses[-1] == pytest.approx(MOST_PAUSE / 2)
    send_one(limits, now, "answer")
    now += 20.0
    send_one(limits, now, "refusal", asked=0.0)  # a pause of no length names no moment
    assert limits.held_until - now == pytest.approx(half)


def test_after_an_answer_the_first_pause_is_no_longer_than_the_learned_spacing() -> None:
    limits = limits_of()
    for number in range(3):
        send_one(limits, 0.05 * number, "answer")
    send_one(limits, 0.15, "refusal")
    spacing = limits.ready_at(0.15, 0) - 0.15
    assert 0.0 < spacing < FIRST_PAUSE / 2


def test_refusals_of_running_requests_do_not_extend_a_pause() -> None:
    limits = limits_of()
    for permit in send(limits, 10):
        limits.end(permit, 0.1, "refusal")
    assert limits.held_until == pytest.approx(0.1 + FIRST_PAUSE / 2)


def test_an_open_breaker_lets_one_probe_at_a_time_pass_until_any_request_is_answered() -> None:
    limits = limits_of()
    old, older = send(limits, 2)
    due = open_breaker(limits, 0.0)
    assert due > 0.0
    assert limits.ready_at(0.0, 0) == due
    probe = limits.begin(due, 0)
    assert limits.ready_at(due + 1, 0) == inf
    limits.end(old, due, "failure")
    assert limits.ready_at(due + 1, 0) == inf
    limits.end(older, due + 1, "answer")
    assert limits.ready_at(due + 1, 0) <= due + 1
    limits.end(probe, due + 2, "failure")
    assert limits.open_until is None


def test_failures_among_answers_do_not_open_the_breaker() -> None:
    limits = limits_of()
    for number in range(10 * MOST_FAILURES):
        send_one(limits, 0.0, "answer" if number % MOST_FAILURES == 0 else "failure")
    assert limits.open_until is None


@pytest.mark.parametrize("outcome", ["answer", "rejection", "refusal"])
def test_any_answer_closes_the_breaker(outcome: Outcome) -> None:
    limits = limits_of()
    due = open_breaker(limits, 0.0)
    send_one(limits, due, outcome, asked=None)
    assert limits.open_until is None
    # the next outage begins with a short pause
    later = due + 100
    assert open_breaker(limits, later) - later == pytest.approx(FIRST_PAUSE / 2)


def test_only_failed_probes_double_the_pause() -> None:
    limits = limits_of(40)
    send_one(limits, 0.0, "answer")
    running = send(limits, 20)
    due = open_breaker(limits, 0.0)
    for permit in running:
        limits.end(permit, 0.0, "failure")
    assert limits.open_until == due
    limits.end(limits.begin(due, 0), due, "failure")
    assert limits.open_until == pytest.approx(due + FIRST_PAUSE)


def test_the_pause_does_not_double_before_a_service_has_answered() -> None:
    limits = limits_of(40)
    now = open_breaker(limits, 0.0)
    for _ in range(5):
        limits.end(limits.begin(now, 0), now, "failure")
        assert limits.open_until is not None
        assert limits.open_until - now <= FIRST_PAUSE
        now = limits.open_until


@pytest.mark.parametrize(
    ("answers", "refusals", "expected"),
    [(OTHERS - 1, 0, False), (OTHERS, 0, True), (OTHERS - 1, 1, True), (OTHERS, 2, False)],
)
def test_a_refusal_means_one_request_if_many_later_ones_were_answered(
    answers: int, refusals: int, expected: bool
) -> None:
    limits = limits_of(50)
    for _ in range(50):  # before the last attempt
        limits.end(limits.begin(0.0, 0), 0.0, "answer")
    outcomes: list[Outcome] = [*["answer"] * answers, *["refusal"] * refusals]  # type: ignore[list-item]
    for outcome in outcomes:
        limits.end(limits.begin(2.0, 0), 2.0, outcome, asked=0.001)
    assert limits.is_own(1.0) is expected
    assert not limits.is_own(inf)


def test_a_probe_that_was_not_sent_leaves_the_breaker_as_it_was() -> None:
    limits = limits_of()
    due = open_breaker(limits, 0.0)
    limits.end(limits.begin(due, 0), due, "nothing")
    assert limits.open_until == due
    assert limits.ready_at(due, 0) == due


def test_the_silence_of_a_service_begins_with_its_first_fault_and_ends_with_an_answer() -> None:
    limits = limits_of()
    (older,) = send(limits, 1)
    assert limits.silent_since is None
    send_one(limits, 1.0, "failure")
    send_one(limits, 2.0, "refusal", asked=100.0)
    assert limits.silent_since == 1.0
    limits.end(older, 3.0, "answer")
    assert limits.silent_since == 3.0, "an answer within a pause begins it anew"
    send_one(limits, 200.0, "rejection")
    assert limits.silent_since is None


@settings(max_examples=40, deadline=None)
@given(
    most=st.integers(5, 60),
    calls=st.lists(
        st.tuples(st.floats(0, 20), st.integers(1, 5) | st.just(70)), min_size=1, max_size=150
    ),
)
def test_no_minute_has_more_than_its_budget(most: int, calls: list[tuple[float, int]]) -> None:
    budget, now = Budget(most), 0.0
    spent: list[tuple[float, int]] = []
    for wait, amount in calls:
        arrived = now = now + wait
        while (when := budget.ready_at(now, amount)) > now:
            now = when
        budget.spend(now, amount)
        needed = amount + sum(each for moment, each in spent if moment + WINDOW >= now)
        assert now == arrived or needed > most, "it has waited for too long"
        spent.append((now, amount))
    for start, _ in spent:
        minute = [amount for moment, amount in spent if start <= moment < start + 60]
        assert sum(minute) <= most or len(minute) == 1, "a larger amount is spent alone"


def test_the_tokens_of_an_answer_replace_the_estimate() -> None:
    limits = limits_of(10, tokens=100)
    permit = limits.begin(0.0, 60)
    assert limits.ready_at(1.0, 60) == WINDOW
    limits.end(permit, 2.0, "answer", tokens=20)
    assert limits.ready_at(2.0, 60) == 2.0
    over = limits.begin(2.0, 60)
    limits.end(over, 3.0, "answer", tokens=90)
    assert limits.ready_at(3.0, 60) == 2.0 + WINDOW
    slow = limits.begin(200.0, 60)
    assert limits.ready_at(300.0, 60) == 300.0  # the budget has forgotten the request
    limits.end(slow, 301.0, "answer", tokens=90)
    limits.begin(301.0, 10)
    assert limits.ready_at(302.0, 90) == 302.0


def test_requests_are_spaced_evenly_over_the_minute() -> None:
    limits = limits_of(10, requests=61)
    step = WINDOW / 61
    send_one(limits, 0.0, "answer")
    assert limits.ready_at(0.0, 0) == step
    send_one(limits, step, "failure")
    assert limits.ready_at(step, 0) == 2 * step
    assert limits.ready_at(100.0, 0) == 100.0  # no time is saved up for a burst
    send_one(limits, 100.0, "answer")
    assert limits.ready_at(100.0, 0) == 100.0 + step


def test_new_bounds_apply_to_the_next_request() -> None:
    limits = limits_of(10, tokens=100)
    limits.begin(0.0, 60)
    limits.allow(1, None, 200)
    assert limits.ready_at(1.0, 60) == inf
    limits.allow(5, None, 200)
    assert limits.ready_at(1.0, 60) == 1.0
    limits.allow(5)
    assert limits.ready_at(1.0, 6000) == 1.0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_request_may_be_sent_in_the_end(data: st.DataObject) -> None:
    most = data.draw(st.integers(1, 8))
    limits, now = Limits(random=random.Random(0).random), 0.0
    limits.allow(most, 50, 500)
    permits: list[Permit] = []
    outcomes = get_args(Outcome)
    for _ in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.floats(0, 5))
        if limits.ready_at(now, 10) <= now:
            assert now >= limits.held_until
            permits.append(limits.begin(now, 10))
        ending = data.draw(st.integers(0, 2 * len(permits)))
        if ending < len(permits):
            permit = permits.pop(ending)
            asked = data.draw(st.sampled_from([None, 0.0, 3.0]))
            tokens = data.draw(st.sampled_from([None, 0, 400]))
            outcome = data.draw(st.sampled_from(outcomes))
            limits.end(permit, now, outcome, asked=asked, tokens=tokens)
        assert limits.in_flight == len(permits) <= most
        assert 1 <= limits.limit <= most
    for permit in permits:
        limits.end(permit, now, "failure")
    for _ in range(50):  # a minute of one budget may end after a minute of the other
        when = limits.ready_at(now, 10)
        assert when < inf
        if when <= now:
            return
        now = when
    raise AssertionError("no request may be sent")
