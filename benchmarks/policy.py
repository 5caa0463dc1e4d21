"""Does `flush="auto"` keep up with the best rule for each kind of traffic? The real scheduler, in
virtual time.

Run: python benchmarks/policy.py [--check] [--save]

Each row is one kind of traffic: callers who call again after their answers, calls that do not wait
for answers, or both. Auto is compared with the best of other rules, which is chosen for each row
afterwards. The table has the worst row of each question. Nothing depends on the machine.
"""

from __future__ import annotations

import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batched._core.policy import BatchPolicy
from report import Figure, Result, conclude, options
from traffic import BURST

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from virtual_time import Crowd, Model, Way, crowds

BATCH_SIZE = 64
SEED = 1
"""Seed of all rows and rules, so that all rules see the same callers and the same luck."""

AUTO = BatchPolicy(batch_size=BATCH_SIZE)
EAGER = {"eager": replace(AUTO, flush="eager")}
BEST = EAGER | {
    f"window of {window:g} ms": replace(AUTO, flush="window", timeout_ms=window)
    for window in (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)
}
PATIENT = {"timeout_ms=600": replace(AUTO, timeout_ms=600.0)}

LONG, EVEN, SHORT, COMPUTE_BOUND = (
    *(Model(5.0, 0.05), Model(2.0, 0.2), Model(1.0, 0.02), Model(0.2, 1.0)),
)
MODELS = (LONG, EVEN, SHORT, COMPUTE_BOUND)
FULL_AT_32 = Model(4.0, 0.125, flat=32)
"""Time on a GPU that is full with 32 items."""
FLAT_THEN_LINEAR = Model(5.0, 0.4, flat=48)
"""Time on a GPU that is not full with few items. 64 items take longer than two batches of 32."""
AT_ONCE, SLOWLY, THINKING, THINKING_LONG = WAYS = (
    *(Way(0.015), Way(0.1), Way(0.015, think=0.3), Way(0.015, think=3.0)),
)
LATE_WAYS = [Way(0.015, away=away) for away in ((5.0, 8.0), (8.0, 14.0), (5.0, 20.0), (20.0, 50.0))]


@dataclass(frozen=True)
class Row:
    """One kind of traffic."""

    model: Model
    kinds: tuple[Crowd, ...]
    workers: int = 1
    batch_size: int = BATCH_SIZE

    def __str__(self) -> str:
        callers = ", ".join(f"{each.callers} callers {each.way}" for each in self.kinds)
        return f"{self.model}, {callers}, {self.workers} workers"

    def figures(self, policy: BatchPolicy, calls: int) -> dict[str, float]:
        """Return throughput and latencies of the second half of the calls."""
        policy = replace(policy, batch_size=self.batch_size, max_concurrent_batches=self.workers)
        run = crowds(policy, self.model, self.kinds, SEED, calls)
        everyone = sorted(latency for kind in run.latencies for latency in kind)
        return {
            "throughput": run.throughput,
            "mean": statistics.fmean(everyone),
            "p99": everyone[int(0.99 * len(everyone))],
            "mean of the last": statistics.fmean(run.latencies[-1]),
        }

    def compare(self, others: dict[str, BatchPolicy], calls: int = 0) -> dict[str, float]:
        """Return each figure of auto as a multiple of the best of other rules."""
        callers = sum(kind.callers for kind in self.kinds)
        at_random = any(kind.calls_at_random for kind in self.kinds)
        calls = calls or (20_000 if at_random else max(2000, 100 * min(callers, 64) * self.workers))
        ours = self.figures(AUTO, calls)
        found = [self.figures(other, calls) for other in others.values()]
        most = {name: max(each[name] for each in found) for name in ours}
        least = {name: min(each[name] for each in found) for name in ours}
        return {
            name: value / (most if name == "throughput" else least)[name]
            for name, value in ours.items()
        }


def calls_of(model: Model, load: float, burst: int = 1, workers: int = 1) -> Row:
    """Return a row of calls that do not wait for answers, at a share of the capacity."""
    rate = load * workers * model.capacity(BATCH_SIZE)
    return Row(model, (Crowd(0, AT_ONCE, rate, burst),), workers)


def callers(model: Model, number: int, way: Way = AT_ONCE, workers: int = 1, size: int = 64) -> Row:
    """Return a row of callers who call again after their answers."""
    return Row(model, (Crowd(number, way),), workers, size)


@dataclass(frozen=True)
class Question:
    """Rows with the same bounds."""

    title: str
    rows: list[Row]
    others: dict[str, BatchPolicy]
    bounds: dict[str, float]
    """Least throughput, and most of each latency, as a multiple of the best other rule's."""


THREE = (LONG, EVEN, SHORT)
LOADS = (0.05, 0.2, 0.5, 0.8, 0.95)
CLOSED = Question(
    "callers",
    [
        callers(m, n, way)
        for m in MODELS
        for n in (1, 2, 4, 8, 16, 32, 64, 100, 200)
        for way in WAYS
    ],
    BEST,
    {"throughput": 0.95},
)
OPEN = Question(
    "calls at random and in bursts",
    [calls_of(model, load, burst) for model in MODELS for burst in (1, BURST) for load in LOADS]
    + [calls_of(FULL_AT_32, load, 40, w) for w in (1, 2) for load in LOADS],
    EAGER,
    {"mean": 1.03, "p99": 1.15},
)
MERGING_PAYS = Question(
    "bursts, where merging pays",
    [calls_of(model, load, BURST) for model in THREE for load in LOADS[:2]],
    EAGER,
    {"mean": 0.95},
)
MIXED = Question(
    "more callers than a batch holds, and callers of two kinds",
    [callers(m, n, way) for m in MODELS for n in (65, 72, 80, 96) for way in WAYS[:3]]
    + [callers(LONG, n, way, size=32) for n in (33, 36, 48, 64) for way in WAYS[:2]]
    + [
        Row(model, (Crowd(a, AT_ONCE), Crowd(b, way)))
        for model in MODELS
        for a, b in ((32, 32), (40, 40), (64, 8))
        for way in (SLOWLY, Way(0.015, think=5.0))
    ],
    BEST,
    {"throughput": 0.90},
)
TWO, FOUR = (
    Question(
        f"{workers} workers",
        [
            callers(model, n, way, workers)
            for model in (*THREE, FULL_AT_32)
            for n in (32, 96, 128, 68 * workers)
            for way in (*WAYS[:2], Way(0.015, think=2.0))
        ],
        BEST,
        {"throughput": least},
    )
    for workers, least in ((2, 0.74), (4, 0.85))
)
WORKERS_AT_RANDOM = Question(
    "calls at random, 2 to 8 workers",
    [calls_of(m, load, workers=w) for m in THREE for load in (0.3, 0.45, 0.6) for w in (2, 4, 8)],
    EAGER,
    {"mean": 1.04},
)
CROWDED = Question(
    "more callers than a batch holds",
    [
        callers(model, n, way)
        for model in (FLAT_THEN_LINEAR, EVEN)
        for n in (65, 72, 80, 90, 100)
        for way in WAYS[:3]
    ],
    EAGER,
    {"throughput": 0.98, "mean": 1.02, "p99": 1.50},
)
SLOW_WITH_FAST = Question(
    "30 slow callers with 4 fast ones",
    [
        Row(model, (Crowd(4, AT_ONCE), Crowd(30, Way(0.015, think=think))))
        for model in THREE
        for think in (10.0, 30.0, 100.0)
    ],
    EAGER,
    {"mean of the last": 1.25},
)
RARE_WITH_LOOP = Question(
    "rare calls with 64 callers",
    [
        Row(model, (Crowd(64, AT_ONCE), Crowd(0, AT_ONCE, rate)))
        for model in THREE
        for rate in (0.01, 0.1)
    ],
    EAGER,
    {"mean": 1.02, "p99": 1.50},
)
LATE, LATER = (
    Question(
        title,
        [
            callers(Model(fixed, 0.05), n, way)
            for fixed in (20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
            for n in (2, 8, 24, 64)
            for way in LATE_WAYS
            if (2 * max(way.away) > fixed) is later
        ],
        PATIENT,
        {"throughput": least},
    )
    for title, later, least in (
        ("callers back late", False, 0.95),
        ("callers back after half of a batch, which is the longest hold", True, 0.80),
    )
)
LATE_AND_SLOW = Question(
    "callers back late, functions from 200 ms on",
    [row for row in LATE.rows if row.model.fixed >= 200.0],
    EAGER,
    {"throughput": 1.5},
)
QUESTIONS = (
    *(CLOSED, OPEN, MERGING_PAYS, MIXED, TWO, FOUR, WORKERS_AT_RANDOM),
    *(CROWDED, SLOW_WITH_FAST, RARE_WITH_LOOP, LATE, LATER, LATE_AND_SLOW),
)


def figures() -> list[Figure]:
    """Return the worst row for each bound."""
    made = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for question in QUESTIONS:
            others = [question.others] * len(question.rows)
            found = list(pool.map(Row.compare, question.rows, others))
            for name, bound in question.bounds.items():
                title = f"{question.title}: {name}, worst of {len(found)} rows"
                unit = (
                    f"of {next(iter(question.others))}" if len(question.others) == 1 else "of best"
                )
                worst = (min if name == "throughput" else max)(each[name] for each in found)
                limit: dict[str, Any] = {"at_least" if name == "throughput" else "at_most": bound}
                made.append(Figure(title, [worst], unit, **limit))
    return made


def main() -> None:
    conclude(
        lambda: Result(
            figures(),
            notes=["2 workers are bounded at 0.74 of a rule chosen afterwards for each row."],
        ),
        options(__doc__ or ""),
        noisy=False,
    )


if __name__ == "__main__":
    main()
