"""Tests of `flush="auto"` in the critical rows of benchmarks/policy.py, with the bounds of the
benchmark.
"""

from __future__ import annotations

import pytest

from batched._core.policy import BatchPolicy
from policy import (
    CROWD_ROWS,
    LATE_AND_SLOW,
    LEAST_OF_CROWDS,
    LEAST_SHARE,
    MODELS,
    MOST_MEAN,
    MOST_OF_BURSTS,
    MOST_P99,
    RELATIVE_ROWS,
    RULES,
    WAYS,
    ClosedRow,
    CrowdRow,
    OpenRow,
    Relative,
    ratios,
    shares,
)
from virtual_time import Model, Way, batches, closed_loop, latencies

pytestmark = pytest.mark.once

LONG, EVEN, SHORT, COMPUTE_BOUND = MODELS
"""Times of a batch of n: 5 + 0.05 n, 2 + 0.2 n, 1 + 0.02 n and 0.2 + n milliseconds."""
AT_ONCE, SLOWLY, THINKING, THINKING_LONG = WAYS
"""Ways of coming back."""
BOTH = {name: RULES[name] for name in ("auto", "eager")}


@pytest.mark.parametrize(
    "row",
    [
        # eager splits these callers into two groups, which take turns: waiting pays
        *(ClosedRow(LONG, 2, AT_ONCE), ClosedRow(LONG, 16, SLOWLY), ClosedRow(LONG, 64, AT_ONCE)),
        *(ClosedRow(LONG, 64, THINKING), ClosedRow(LONG, 8, SLOWLY), ClosedRow(EVEN, 8, AT_ONCE)),
        *(ClosedRow(SHORT, 2, SLOWLY), ClosedRow(SHORT, 16, AT_ONCE)),
        # nothing can be gained: a lone caller, callers who stay away for long, a function that
        # gains nothing from merging, and more callers than two batches hold
        *(ClosedRow(SHORT, 1, THINKING_LONG), ClosedRow(SHORT, 4, THINKING_LONG)),
        *(ClosedRow(COMPUTE_BOUND, 2, SLOWLY), ClosedRow(COMPUTE_BOUND, 16, AT_ONCE)),
        ClosedRow(LONG, 200, SLOWLY),
    ],
    ids=str,
)
def test_callers_share_a_batch_if_that_pays_and_none_is_held_if_it_does_not(row: ClosedRow) -> None:
    calls = max(2000, 100 * min(row.callers, 64))
    assert shares(row.throughput(calls=calls))["auto"] >= LEAST_SHARE


@pytest.mark.parametrize("row", CROWD_ROWS[::25], ids=str)
def test_crowds_are_served_about_as_fast_as_by_the_best_other_rule(row: CrowdRow) -> None:
    least, _ = LEAST_OF_CROWDS[row.workers]
    assert shares(row.throughput())["auto"] >= least


@pytest.mark.parametrize(
    "row",
    [
        OpenRow(EVEN, "at random", 0.05),
        OpenRow(SHORT, "at random", 0.05),
        OpenRow(SHORT, "at random", 0.5),
        OpenRow(COMPUTE_BOUND, "at random", 0.2),
        OpenRow(COMPUTE_BOUND, "in bursts", 0.05),
        OpenRow(LONG, "in bursts", 0.95),
    ],
    ids=str,
)
def test_calls_at_random_are_answered_about_as_soon_as_under_eager(row: OpenRow) -> None:
    mean, p99 = ratios(row.latency(BOTH, 10_000))["auto"]
    assert mean <= MOST_MEAN
    assert p99 <= MOST_P99


@pytest.mark.parametrize(
    "row",
    [OpenRow(model, "in bursts", load) for model in (LONG, EVEN, SHORT) for load in (0.05, 0.2)],
    ids=str,
)
def test_a_burst_is_answered_sooner_than_if_its_first_call_left_alone(row: OpenRow) -> None:
    assert row.merging_pays
    mean, _ = ratios(row.latency(BOTH, 5_000))["auto"]
    assert mean <= MOST_OF_BURSTS


@pytest.mark.parametrize(
    "row", [row for row in RELATIVE_ROWS if row.family == LATE_AND_SLOW][::12], ids=str
)
def test_callers_who_come_back_late_share_the_batches_of_slow_functions(row: Relative) -> None:
    assert row.ratios(2000).throughput >= 1.5


# ---------------------------------------------------------------- the simulation, by hand (ms)

EAGER = BatchPolicy(batch_size=64, flush="eager", timeout_ms=0.0)


def window(timeout_ms: float) -> BatchPolicy:
    return BatchPolicy(batch_size=64, flush="window", timeout_ms=timeout_ms)


@pytest.mark.parametrize("rule", [EAGER, window(0.5), window(5.0)])
def test_a_lone_caller_pays_for_its_wait_its_batch_and_for_coming_back(rule: BatchPolicy) -> None:
    found = closed_loop(rule, Model(5.0, 0.05, jitter=0.0), 1, Way(0.1, spread=0.0), 1, 100)
    assert found == pytest.approx(1 / ((rule.timeout_ms or 0.0) + 5.05 + 0.1))


@pytest.mark.parametrize(
    ("rule", "moments", "expected"),
    [
        # one leaves alone, two wait for its batch, and the last comes when their batch ends
        (EAGER, [0.0, 1.0, 2.0, 11.5], [5.5, 10.5, 9.5, 5.5]),
        # two leave together, and the wait of the third is over when their batch ends
        (window(2.0), [0.0, 1.0, 3.0], [8.0, 7.0, 10.5]),
    ],
)
def test_latencies_are_as_worked_out(
    rule: BatchPolicy, moments: list[float], expected: list[float]
) -> None:
    found = latencies(rule, Model(5.0, 0.5, jitter=0.0), [1e-3 * each for each in moments], 1)
    assert found == pytest.approx(expected)


def test_a_call_that_comes_at_the_deadline_is_in_the_batch() -> None:
    calls = [(0.0, 0), (1.0, 1), (1.5, 2)]
    ran = list(batches(window(1000.0), Model(5.0, 0.05, jitter=0.0), calls, 1))
    assert [[request.items[0] for request, _, _ in batch.slices] for batch in ran] == [[0, 1], [2]]
