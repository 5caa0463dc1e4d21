"""Tests of `flush="auto"` in the critical rows of benchmarks/policy.py, with the bounds of the
benchmark.
"""

from __future__ import annotations

import pytest

import policy
from traffic import BURST

pytestmark = pytest.mark.once

CALLERS = [
    # eager splits these into two groups, which take turns, so that waiting pays
    policy.callers(policy.LONG, 2, policy.AT_ONCE),
    policy.callers(policy.LONG, 16, policy.SLOWLY),
    policy.callers(policy.LONG, 64, policy.AT_ONCE),
    policy.callers(policy.LONG, 64, policy.THINKING),
    policy.callers(policy.EVEN, 8, policy.AT_ONCE),
    policy.callers(policy.SHORT, 2, policy.SLOWLY),
    # a lone caller, callers who stay away for long, a function that gains nothing from merging,
    # and more callers than two batches hold
    policy.callers(policy.SHORT, 1, policy.THINKING_LONG),
    policy.callers(policy.SHORT, 4, policy.THINKING_LONG),
    policy.callers(policy.COMPUTE_BOUND, 16, policy.AT_ONCE),
    policy.callers(policy.LONG, 200, policy.SLOWLY),
]
AT_RANDOM = [
    policy.calls_of(policy.EVEN, 0.05),
    policy.calls_of(policy.SHORT, 0.05),
    policy.calls_of(policy.SHORT, 0.5),
    policy.calls_of(policy.COMPUTE_BOUND, 0.2),
    policy.calls_of(policy.COMPUTE_BOUND, 0.05, BURST),
    policy.calls_of(policy.LONG, 0.95, BURST),
]
CRITICAL = [  # each with the number of its calls
    *((policy.CLOSED, row, 600) for row in CALLERS),
    *((policy.OPEN, row, 3000) for row in AT_RANDOM),
    *((policy.MERGING_PAYS, row, 2500) for row in policy.MERGING_PAYS.rows),
    *(
        (question, row, 3000 if row.kinds[-1].calls_at_random else 1000)
        for question in policy.QUESTIONS[3:]
        for row in question.rows[::25]
    ),
]


@pytest.mark.parametrize(
    ("question", "row", "calls"),
    CRITICAL,
    ids=lambda value: value.title if isinstance(value, policy.Question) else str(value),
)
def test_traffic_is_served_about_as_well_as_by_the_best_other_rule(
    question: policy.Question, row: policy.Row, calls: int
) -> None:
    found = row.compare(question.others, calls)
    for name, bound in question.bounds.items():
        assert found[name] >= bound if name == "throughput" else found[name] <= bound, name
