"""Tests of `flush="auto"` in the critical rows of benchmarks/policy.py, with the bounds of the
benchmark.
"""

from __future__ import annotations

import pytest

from batched._core.policy import BatchPolicy, Flush
from batched._core.scheduler import Scheduler
from policy import (
    AT_ONCE,
    CLOSED,
    COMPUTE_BOUND,
    EVEN,
    LONG,
    MERGING_PAYS,
    OPEN,
    QUESTIONS,
    SHORT,
    SLOWLY,
    THINKING,
    THINKING_LONG,
    Question,
    Row,
    callers,
    calls_of,
)
from traffic import BURST
from virtual_time import Model, batches

pytestmark = pytest.mark.once

TWO_CONVOYS = [
    callers(LONG, 2, AT_ONCE),
    callers(LONG, 16, SLOWLY),
    callers(LONG, 64, AT_ONCE),
    callers(LONG, 64, THINKING),
    callers(LONG, 8, SLOWLY),
    callers(EVEN, 8, AT_ONCE),
    callers(SHORT, 2, SLOWLY),
    callers(SHORT, 16, AT_ONCE),
]
"""Callers that eager splits into two groups, which take turns. Waiting pays."""
NOTHING_TO_GAIN = [
    callers(SHORT, 1, THINKING_LONG),
    callers(SHORT, 4, THINKING_LONG),
    callers(COMPUTE_BOUND, 2, SLOWLY),
    callers(COMPUTE_BOUND, 16, AT_ONCE),
    callers(LONG, 200, SLOWLY),
]
"""A lone caller, callers who stay away for long, a function that gains nothing from merging, and
more callers than two batches hold.
"""


def check(row: Row, question: Question, calls: int) -> None:
    """Check the bounds of a question in one row, in a run of so many calls."""
    found = row.compare(question.others, calls)
    for name, bound in question.bounds.items():
        assert found[name] >= bound if name == "throughput" else found[name] <= bound, name


@pytest.mark.parametrize("row", TWO_CONVOYS, ids=str)
def test_callers_who_could_share_a_batch_do(row: Row) -> None:
    check(row, CLOSED, 600)


@pytest.mark.parametrize("row", NOTHING_TO_GAIN, ids=str)
def test_no_batch_is_held_where_nothing_can_be_gained(row: Row) -> None:
    check(row, CLOSED, 600)


@pytest.mark.parametrize("question", QUESTIONS[3:], ids=lambda question: question.title)
def test_hard_traffic_is_served_about_as_fast_as_by_the_best_other_rule(
    question: Question,
) -> None:
    for row in question.rows[::25]:
        check(row, question, 3000 if row.kinds[-1].calls_at_random else 1000)


@pytest.mark.parametrize(
    "row",
    [
        calls_of(EVEN, 0.05),
        calls_of(SHORT, 0.05),
        calls_of(SHORT, 0.5),
        calls_of(COMPUTE_BOUND, 0.2),
        calls_of(COMPUTE_BOUND, 0.05, BURST),
        calls_of(LONG, 0.95, BURST),
    ],
    ids=str,
)
def test_calls_at_random_are_answered_about_as_soon_as_under_eager(row: Row) -> None:
    check(row, OPEN, 3000)


@pytest.mark.parametrize("row", MERGING_PAYS.rows, ids=str)
def test_a_burst_is_answered_sooner_than_if_its_first_call_left_alone(row: Row) -> None:
    check(row, MERGING_PAYS, 2500)


@pytest.mark.parametrize(
    ("rule", "moments", "expected"),
    [
        # one leaves alone, two wait for its batch, and the last comes when their batch ends
        ("eager", [0.0, 1.0, 2.0, 11.5], [5.5, 10.5, 9.5, 5.5]),
        # two leave together, and the wait of the third is over when their batch ends
        ("window", [0.0, 1.0, 3.0], [8.0, 7.0, 10.5]),
    ],
)
def test_latencies_of_the_simulation_are_as_worked_out(
    rule: Flush, moments: list[float], expected: list[float]
) -> None:
    policy = BatchPolicy(batch_size=64, flush=rule, timeout_ms=2.0)
    calls = [(1e-3 * moment, number) for number, moment in enumerate(moments)]
    found = {  # all in milliseconds
        request.items[0]: 1e3 * (batch.ended - request.arrived)
        for batch in batches(Scheduler(policy), Model(5.0, 0.5, jitter=0.0), calls, 1)
        for request, _, _ in batch.slices
    }
    assert [found[number] for number in range(len(moments))] == pytest.approx(expected)
