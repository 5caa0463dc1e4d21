"""Tests of the simulation that judges the linger rules, against cases worked out by hand (ms)."""

from __future__ import annotations

import itertools
import statistics
from random import Random
from typing import Any

import pytest

from batched._core.policy import BatchPolicy, Flush
from virtual_time import (
    BURST,
    TRUNCATED,
    Arrivals,
    Model,
    Way,
    batches,
    closed_loop,
    deviations,
    in_bursts,
    latencies,
    open_loop,
)

pytestmark = pytest.mark.once

EXACT = Model(5.0, 0.05, jitter=0.0)
ONE_BY_ONE = Way(0.1, spread=0.0)
SECONDS = 1e-3


def rule(flush: Flush, timeout_ms: float = 5.0, **settings: Any) -> BatchPolicy:
    return BatchPolicy(batch_size=64, timeout_ms=timeout_ms, flush=flush, **settings)


# ---------------------------------------------------------------- a closed loop


def test_a_lone_eager_caller_pays_for_its_batch_and_for_coming_back() -> None:
    assert closed_loop(rule("eager"), EXACT, 1, ONE_BY_ONE, 1, 100) == pytest.approx(
        1 / (5.05 + 0.1)
    )


@pytest.mark.parametrize("timeout", [0.5, 1.0, 5.0])
def test_a_window_adds_its_time_to_a_lone_caller(timeout: float) -> None:
    assert closed_loop(rule("window", timeout), EXACT, 1, ONE_BY_ONE, 1, 100) == pytest.approx(
        1 / (timeout + 5.05 + 0.1)
    )


def test_two_eager_callers_take_turns() -> None:
    """Each caller comes back while the batch of the other one runs."""
    assert closed_loop(rule("eager"), EXACT, 2, ONE_BY_ONE, 1, 100) == pytest.approx(1 / 5.05)


def test_two_callers_share_every_batch_under_a_window_longer_than_their_gap() -> None:
    """The window begins when the first caller is back, after one gap."""
    assert closed_loop(rule("window", 1.0), EXACT, 2, ONE_BY_ONE, 1, 100) == pytest.approx(
        2 / (5.1 + 0.1 + 1.0)
    )


def test_as_many_callers_as_fill_a_batch_wait_for_nothing_but_the_last_of_them() -> None:
    way = Way(0.015, spread=0.0)
    assert closed_loop(rule("window"), EXACT, 64, way, 1, 64 * 20) == pytest.approx(
        64 / (8.2 + 64 * 0.015)
    )


@pytest.mark.parametrize("flush", ["eager", "window"])
def test_more_callers_than_two_batches_hold_keep_the_worker_busy(flush: Flush) -> None:
    assert closed_loop(rule(flush), EXACT, 200, ONE_BY_ONE, 1, 64 * 100) == pytest.approx(64 / 8.2)


def test_think_times_count_between_a_batch_and_the_next_call() -> None:
    way = Way(0.1, think=3.0, spread=0.0)
    assert closed_loop(rule("eager"), EXACT, 1, way, 1, 40_000) == pytest.approx(
        1 / (5.05 + 0.1 + 3.0), rel=0.01
    )


# ---------------------------------------------------------------- an open loop


def test_eager_latencies_are_as_worked_out() -> None:
    """The first call leaves alone, and the next two wait for its batch. The fourth call comes as
    their batch ends, and finds the worker free.
    """
    moments = [0.0, 1.0 * SECONDS, 2.0 * SECONDS, 11.5 * SECONDS]
    found = latencies(rule("eager"), Model(5.0, 0.5, jitter=0.0), moments, 1)
    assert found == pytest.approx([5.5, 10.5, 9.5, 5.5])


def test_latencies_under_a_window_are_as_worked_out() -> None:
    """The first two calls leave together after 2 ms. The wait of the third call is over when their
    batch ends.
    """
    found = latencies(
        rule("window", 2.0), Model(5.0, 0.5, jitter=0.0), [0.0, 1.0 * SECONDS, 3.0 * SECONDS], 1
    )
    assert found == pytest.approx([8.0, 7.0, 10.5])


def test_a_call_that_comes_at_the_deadline_is_in_the_batch() -> None:
    ran = list(batches(rule("window", 1000.0), EXACT, [(0.0, 0), (1.0, 1), (1.5, 2)], 1))
    assert [[request.items[0] for request, _, _ in batch.slices] for batch in ran] == [[0, 1], [2]]


def test_a_crowd_leaves_in_full_batches_one_right_after_another() -> None:
    found = latencies(rule("window"), EXACT, [0.0] * 192, 1)
    assert found == pytest.approx([8.2] * 64 + [16.4] * 64 + [24.6] * 64)


@pytest.mark.parametrize("arrivals", ["at random", "in bursts"])
def test_a_worker_keeps_up_below_its_capacity_and_not_above(arrivals: Arrivals) -> None:
    below, above = (
        open_loop(rule("eager"), EXACT, arrivals, load, 1, 20_000) for load in (0.8, 1.2)
    )
    assert max(below) < 100
    # Arrivals exceed the capacity by a fifth. A sixth of the 20,000 calls waits at the end, and 64
    # of them take 8.2 ms.
    assert above[-1] == pytest.approx(20_000 / 6 / 64 * 8.2, rel=0.15)


@pytest.mark.parametrize("burst", [BURST, 40])
def test_bursts_have_their_size(burst: int) -> None:
    moments = in_bursts(1e-3, 1000, Random(1), burst)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert sum(gap > 0.1 * SECONDS for gap in gaps) == pytest.approx(1000 / burst, abs=1)


# ---------------------------------------------------------------- chance


def test_equal_seeds_give_equal_figures_and_different_seeds_different_figures() -> None:
    closed = [
        closed_loop(rule("eager"), Model(1.0, 0.02), 8, Way(0.015, think=0.3), seed, 500)
        for seed in (1, 1, 2)
    ]
    opened = [
        open_loop(rule("eager"), Model(1.0, 0.02), "in bursts", 0.5, seed, 500)
        for seed in (1, 1, 2)
    ]
    assert closed[0] == closed[1] != closed[2]
    assert opened[0] == opened[1] != opened[2]


def test_batches_are_off_by_a_truncated_normal_part_of_their_time() -> None:
    some = list(itertools.islice(deviations(1), 20_000))
    assert statistics.fmean(some) == pytest.approx(0.0, abs=1e-9)
    assert statistics.stdev(some) == pytest.approx(1.0, abs=0.02)
    assert max(map(abs, some)) == TRUNCATED
    assert Model(4.0, 0.1).duration(10, 2.0) == pytest.approx(5.5)
