"""Does `flush="auto"` keep up with the best rule for each kind of traffic? The real scheduler, in
virtual time.

Run: python benchmarks/policy.py [--check] [--save] [--json FILE] [--every N]

Closed loops are judged by their throughput, compared with the best of `"eager"` and several
windows. The best rule is chosen for each row afterwards. Open loops are judged by the mean and the
99th percentile of latency, compared with `"eager"`. A third table compares pairs of policies.
Nothing here depends on the machine. `--json` saves every row, so that two versions of the code can
be compared. `--every 5` runs each fifth closed loop only, in half the time.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from batched._core.policy import BatchPolicy
from report import Figure, Result, conclude, parser
from virtual_time import BURST, Arrivals, Crowd, Model, Way, crowds, open_loop

BATCH_SIZE = 64
WINDOWS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
"""Timeouts of the windows (ms)."""
MORE_WINDOWS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)
"""Timeouts of the windows that crowds are compared with (ms)."""
SEED = 1
"""Seed of all rows and rules, so that all rules see the same callers and the same luck."""

MODELS = (Model(5.0, 0.05), Model(2.0, 0.2), Model(1.0, 0.02), Model(0.2, 1.0))
CALLERS = (1, 2, 4, 8, 16, 32, 64, 100, 200)
WAYS = (Way(0.015), Way(0.1), Way(0.015, think=0.3), Way(0.015, think=3.0))
LATE_WAYS = tuple(
    Way(0.015, away=away) for away in ((5.0, 8.0), (8.0, 14.0), (5.0, 20.0), (20.0, 50.0))
)
ARRIVALS: tuple[Arrivals, ...] = ("at random", "in bursts")
LOADS = (0.05, 0.2, 0.5, 0.8, 0.95)
"""Shares of the capacity."""

LEAST_SHARE = 0.95
"""Throughput of every closed row, as a share of the best other rule."""
GOOD_SHARE = 0.97
"""The same share, for all closed rows but `MOST_BELOW`."""
MOST_BELOW = 4
MOST_MEAN = 1.03
"""Mean latency of every open row, as a multiple of eager's."""
MOST_P99 = 1.15
"""99th percentile of latency of every open row, as a multiple of eager's."""
MOST_OF_BURSTS = 0.95
"""Mean latency as a multiple of eager's, where merging a burst pays: see `OpenRow.merging_pays`."""
LEAST_OF_CROWDS = {1: (0.90, 0.99), 2: (0.75, 0.94), 4: (0.85, 0.97)}
"""Throughput of crowds by the number of workers, as a share of the best other rule: every row, and
the geometric mean.
"""

Rules = dict[str, BatchPolicy]


def compared(windows: tuple[float, ...], batch_size: int = BATCH_SIZE, workers: int = 1) -> Rules:
    """Return `"auto"`, `"eager"`, and windows named by their timeouts."""
    policy = BatchPolicy(batch_size=batch_size, max_concurrent_batches=workers)
    return {flush: replace(policy, flush=flush) for flush in ("auto", "eager")} | {
        f"{window:g}": replace(policy, flush="window", timeout_ms=window) for window in windows
    }


RULES = compared(WINDOWS)
EAGER_AND_AUTO = {name: RULES[name] for name in ("auto", "eager")}
"""Rules of open loops. Windows are far behind there."""


@dataclass(frozen=True)
class ClosedRow:
    """A fixed number of callers. Each calls again after its answer."""

    model: Model
    callers: int
    way: Way

    def __str__(self) -> str:
        think = f" think {self.way.think:g}" if self.way.think else ""
        return f"{_formula(self.model)} {self.callers:>3} callers, gap {self.way.gap:g}{think}"

    def throughput(self, rules: Rules = RULES, calls: int | None = None) -> dict[str, float]:
        """Return calls per millisecond under each rule, over the second half of the calls.

        There are about 200 batches by default, and at least 2000 calls.
        """
        calls = calls or max(2000, 200 * min(self.callers, BATCH_SIZE))
        return _throughput(rules, self.model, (Crowd(self.callers, self.way),), calls)


@dataclass(frozen=True)
class CrowdRow:
    """Crowds of callers who are hard to serve: see `CROWD_ROWS`."""

    model: Model
    kinds: tuple[Crowd, ...]
    batch_size: int = BATCH_SIZE
    workers: int = 1

    def __str__(self) -> str:
        size = f", batch_size {self.batch_size}" if self.batch_size != BATCH_SIZE else ""
        return f"{_who(self.model, self.kinds, self.workers)}{size}"

    def throughput(self, calls: int = 5000) -> dict[str, float]:
        """Return calls per millisecond under each rule, over the second half of the calls."""
        rules = compared(MORE_WINDOWS, self.batch_size, self.workers)
        return _throughput(rules, self.model, self.kinds, calls)


@dataclass(frozen=True)
class OpenRow:
    """Calls that do not wait for earlier answers."""

    model: Model
    arrivals: Arrivals
    load: float
    burst: int = BURST
    workers: int = 1

    def __str__(self) -> str:
        return (
            f"{_formula(self.model)} {self.load:>4.0%} {self.arrivals}"
            f"{f' of {self.burst}' if self.burst != BURST else ''}{_workers(self.workers)}"
        )

    @property
    def merging_pays(self) -> bool:
        """Whether merging a burst must lower its mean latency clearly.

        It must if the load is low and the fixed part of a batch takes at least as long as all items
        of a burst.
        """
        per_item = 0.0 if self.burst <= self.model.flat else self.model.per_item
        return (
            self.arrivals == "in bursts"
            and self.load <= 0.2
            and self.model.fixed >= self.burst * per_item
        )

    def latency(
        self, rules: Rules = EAGER_AND_AUTO, calls: int = 20_000
    ) -> dict[str, tuple[float, float]]:
        """Return mean and 99th percentile (ms) under each rule, without the first tenth of the
        calls.
        """
        found = {}
        for name, rule in rules.items():
            policy = replace(rule, max_concurrent_batches=self.workers)
            counted = open_loop(
                policy, self.model, self.arrivals, self.load, SEED, calls, self.burst
            )[calls // 10 :]
            found[name] = statistics.fmean(counted), sorted(counted)[int(0.99 * len(counted))]
        return found


class Ratios(NamedTuple):
    """Figures of one policy as multiples of another policy's."""

    throughput: float
    mean: float
    """Mean latency of the last kind of callers."""
    p99: float
    """99th percentile of the same latencies."""
    mean_of_all: float
    """Mean latency of all callers."""
    p99_of_all: float
    """99th percentile of the same latencies."""


@dataclass(frozen=True)
class Relative:
    """One policy compared with another that it must not fall behind, for the same callers."""

    family: str
    """Question that the row is about; see `BOUNDS`."""
    model: Model
    kinds: tuple[Crowd, ...]
    judged: BatchPolicy
    other: BatchPolicy

    def __str__(self) -> str:
        return _who(self.model, self.kinds, self.judged.max_concurrent_batches)

    def ratios(self, calls: int | None = None) -> Ratios:
        """Run both policies for that many calls, and compare them."""
        callers = sum(kind.callers for kind in self.kinds)
        workers = self.judged.max_concurrent_batches
        at_random = any(kind.calls_at_random for kind in self.kinds)
        calls = calls or (
            (50_000 if callers else 20_000)
            if at_random
            else max(4000, 60 * min(callers, BATCH_SIZE) * workers)
        )
        judged, other = (
            crowds(policy, self.model, self.kinds, SEED, calls)
            for policy in (self.judged, self.other)
        )
        last = [_latencies(run.latencies[-1:]) for run in (judged, other)]
        everyone = [_latencies(run.latencies) for run in (judged, other)]
        return Ratios(
            judged.throughput / other.throughput,
            *(mine / others for mine, others in zip(*last, strict=True)),
            *(mine / others for mine, others in zip(*everyone, strict=True)),
        )


@dataclass(frozen=True)
class Bound:
    """Bound of one ratio in all rows of a family."""

    family: str
    measure: Literal["throughput", "mean", "p99", "mean_of_all", "p99_of_all"]
    at_least: float | None = None
    at_most: float | None = None

    def value(self, ratios: Ratios) -> float:
        """Return the ratio that is bounded."""
        value: float = getattr(ratios, self.measure)
        return value


def _throughput(
    rules: Rules, model: Model, kinds: tuple[Crowd, ...], calls: int
) -> dict[str, float]:
    return {
        name: crowds(rule, model, kinds, SEED, calls).throughput for name, rule in rules.items()
    }


def _latencies(of_kinds: tuple[list[float], ...]) -> tuple[float, float]:
    """Return mean and 99th percentile of the latencies of some kinds of callers."""
    found = sorted(itertools.chain.from_iterable(of_kinds))
    return statistics.fmean(found), found[int(0.99 * len(found))]


def _who(model: Model, kinds: tuple[Crowd, ...], workers: int) -> str:
    flat = f" from {model.flat}" if model.flat else ""
    crowds_ = " and ".join(map(_crowd, kinds))
    return f"{_formula(model)}{flat} {crowds_}{_workers(workers)}"


def _workers(workers: int) -> str:
    return f", {workers} workers" if workers > 1 else ""


def _crowd(crowd: Crowd) -> str:
    if not crowd.callers:
        return f"{crowd.calls_at_random:.2g} a ms at random"
    think = f" think {crowd.way.think:g}" if crowd.way.think else ""
    away = " away for {:g} to {:g}".format(*crowd.way.away) if crowd.way.away[1] else ""
    return f"{crowd.callers} callers, gap {crowd.way.gap:g}{think}{away}"


def shares(throughput: dict[str, float]) -> dict[str, float]:
    """Return each throughput as a share of the best one without auto's."""
    best = max(found for name, found in throughput.items() if name != "auto")
    return {name: found / best for name, found in throughput.items()}


def ratios(latency: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return each latency as a multiple of eager's."""
    mean, p99 = latency["eager"]
    return {name: (found[0] / mean, found[1] / p99) for name, found in latency.items()}


def _formula(model: Model) -> str:
    return f"{f'{model.fixed:g} + {model.per_item:g} n':<10}"


def show_closed(closed: Mapping[Any, dict[str, float]], windows: tuple[float, ...]) -> None:
    """Print a line for each closed row."""
    width = max(len(str(row)) for row in closed)
    named = "".join(f"{f'win {window:g}':>9}" for window in windows)
    print(
        "Closed loop: throughput, as a share of the best rule but auto (times in ms)\n"
        f"{'a batch of n takes, callers, way':<{width}}{'auto':>9}{'eager':>9}{named}"
    )
    for row, throughput in closed.items():
        print(f"{row!s:<{width}}" + "".join(f"{one:9.3f}" for one in shares(throughput).values()))
    print()


def show_open(opened: dict[OpenRow, dict[str, tuple[float, float]]]) -> None:
    """Print a line for each open row."""
    width = max(len(str(row)) for row in opened)
    print(
        "Open loop: mean and 99th percentile of latency, auto as a multiple of eager (ms)\n"
        f"{'a batch of n takes, load, arrivals':<{width}}"
        f"{'mean':>9}{'eager':>9}{'p99':>9}{'eager':>9}"
    )
    for row, latency in opened.items():
        [mean, p99], [eager_mean, eager_p99] = ratios(latency)["auto"], latency["eager"]
        print(f"{row!s:<{width}}{mean:9.3f}{eager_mean:9.2f}{p99:9.3f}{eager_p99:9.2f}")
    print()


def show_relative(relative: dict[Relative, Ratios]) -> None:
    """Print a line for each pair of policies."""
    width = max(len(str(row)) for row in relative)
    for family in dict.fromkeys(row.family for row in relative):
        print(f"{family:<{width}}{'calls':>9}{'mean':>9}{'p99':>9}{'mean all':>9}{'p99 all':>9}")
        for row, found in relative.items():
            if row.family == family:
                print(f"{row!s:<{width}}" + "".join(f"{one:9.3f}" for one in found))
        print()


def figures_relative(relative: dict[Relative, Ratios]) -> list[Figure]:
    """Return the worst row of each family."""
    worst = []
    for bound in BOUNDS:
        found = [bound.value(each) for row, each in relative.items() if row.family == bound.family]
        measure = bound.measure.replace("_of_all", " of all callers")
        worst.append(
            Figure(
                f"{bound.family}, {measure}, worst of {len(found)} rows",
                [max(found) if bound.at_least is None else min(found)],
                "of timeout_ms=600" if bound.family in (LATE, LATER) else "of eager",
                at_least=bound.at_least,
                at_most=bound.at_most,
            )
        )
    return worst


def figures_of_crowds(crowded: dict[CrowdRow, dict[str, float]]) -> list[Figure]:
    """Return the worst row and the geometric mean, by the number of workers."""
    made = []
    for workers, (least, mean) in LEAST_OF_CROWDS.items():
        found = [
            shares(throughput)["auto"]
            for row, throughput in crowded.items()
            if row.workers == workers
        ]
        title = f"crowds{_workers(workers)}"
        made += [
            Figure(f"{title}, worst of {len(found)} rows", [min(found)], "of best", at_least=least),
            Figure(
                f"{title}, geometric mean of {len(found)} rows",
                [statistics.geometric_mean(found)],
                "of best",
                at_least=mean,
            ),
        ]
    return made


def figures(
    closed: dict[ClosedRow, dict[str, float]], opened: dict[OpenRow, dict[str, tuple[float, float]]]
) -> list[Figure]:
    """Return the worst rows of `"auto"`."""
    share = [shares(throughput)["auto"] for throughput in closed.values()]
    ratio = {row: ratios(latency)["auto"] for row, latency in opened.items()}
    bursts = [mean for row, (mean, _) in ratio.items() if row.merging_pays]
    return [
        Figure(
            f"closed loop, worst of {len(share)} rows",
            [min(share)],
            "of best",
            at_least=LEAST_SHARE,
        ),
        Figure(
            f"closed loop, rows of {len(share)} below {GOOD_SHARE:g}",
            [float(sum(one < GOOD_SHARE for one in share))],
            "rows",
            at_most=MOST_BELOW,
        ),
        *(
            Figure(f"{name}, worst of {len(found)} rows", [max(found)], "of eager", at_most=bound)
            for name, found, bound in (
                ("open loop, mean latency", [mean for mean, _ in ratio.values()], MOST_MEAN),
                ("open loop, p99 latency", [p99 for _, p99 in ratio.values()], MOST_P99),
                ("bursts that pay to merge, mean latency", bursts, MOST_OF_BURSTS),
            )
        ),
    ]


CLOSED_ROWS = [
    ClosedRow(model, callers, way) for model in MODELS for callers in CALLERS for way in WAYS
]
FLAT_THEN_LINEAR = Model(5.0, 0.4, flat=48)
"""Time on a GPU that is not full with few items. 64 items take longer than two batches of 32."""
FULL_AT_32 = Model(4.0, 0.125, flat=32)
"""Time on a GPU that is full with 32 items."""
LONG, EVEN, SHORT, _ = MODELS
AUTO, EAGER = RULES["auto"], RULES["eager"]


def _at_random(model: Model, load: float, workers: int = 1) -> tuple[Crowd, ...]:
    return (Crowd(0, WAYS[0], load * workers * model.capacity(BATCH_SIZE)),)


CROWD_ROWS = [
    # more callers than one batch holds
    *(
        CrowdRow(model, (Crowd(n, way),))
        for model in MODELS
        for n in (65, 72, 80, 96)
        for way in WAYS[:3]
    ),
    *(
        CrowdRow(LONG, (Crowd(n, way),), batch_size=32)
        for n in (33, 34, 36, 40, 48, 56, 64)
        for way in WAYS[:2]
    ),
    # threads and coroutines; callers who think, and callers who do not
    *(
        CrowdRow(model, (Crowd(a, WAYS[0]), Crowd(b, way)))
        for model in MODELS
        for a, b in ((32, 32), (40, 40), (64, 8))
        for way in (WAYS[1], Way(0.015, think=5.0))
    ),
    *(
        CrowdRow(model, (Crowd(n, way),), workers=w)
        for w in (2, 4)
        for model in (LONG, EVEN, SHORT, FULL_AT_32)
        for n in (32, 96, 128, 136 if w == 2 else 272)
        for way in (*WAYS[:2], Way(0.015, think=2.0))
    ),
]

WORKERS = "several workers"
WORKERS_AT_RANDOM = "several workers, calls at random"
CROWDED = "more callers than fit a batch"
SLOW_WITH_FAST = "slow callers with 4 fast ones"
RARE_WITH_LOOP = "rare calls with a loop of 64"
LATE = "callers back late vs timeout_ms=600"
LATER = "callers back after half of a batch, which is the longest hold, vs timeout_ms=600"
LATE_AND_SLOW = "callers back late, functions from 200 ms on"
BOUNDS = [
    Bound(WORKERS, "throughput", at_least=0.90),
    Bound(WORKERS_AT_RANDOM, "mean", at_most=1.04),
    Bound(CROWDED, "throughput", at_least=0.98),
    Bound(CROWDED, "mean_of_all", at_most=1.02),
    Bound(CROWDED, "p99_of_all", at_most=1.50),
    Bound(SLOW_WITH_FAST, "mean", at_most=1.25),
    Bound(RARE_WITH_LOOP, "mean_of_all", at_most=1.02),
    Bound(RARE_WITH_LOOP, "p99_of_all", at_most=1.50),
    Bound(LATE, "throughput", at_least=0.95),
    Bound(LATER, "throughput", at_least=0.80),
    Bound(LATE_AND_SLOW, "throughput", at_least=1.5),
]
RELATIVE_ROWS = [
    *(
        Relative(
            family, model, kinds, *(replace(r, max_concurrent_batches=w) for r in (AUTO, EAGER))
        )
        for w in (2, 4, 8)
        for model in (LONG, EVEN, SHORT)
        for family, kinds in (
            *((WORKERS, (Crowd(n, way),)) for n in (16, 32, 64, 128) for way in WAYS[:2]),
            *((WORKERS_AT_RANDOM, _at_random(model, load, w)) for load in (0.3, 0.45, 0.6)),
        )
    ),
    *(
        Relative(CROWDED, model, (Crowd(n, way),), AUTO, EAGER)
        for model in (FLAT_THEN_LINEAR, EVEN)
        for n in (65, 72, 80, 90, 100)
        for way in WAYS[:3]
    ),
    *(
        Relative(family, model, kinds, AUTO, EAGER)
        for model in (LONG, EVEN, SHORT)
        for family, kinds in (
            *(
                (SLOW_WITH_FAST, (Crowd(4, WAYS[0]), Crowd(30, Way(0.015, think=think))))
                for think in (10.0, 30.0, 100.0)
            ),
            *(
                (RARE_WITH_LOOP, (Crowd(64, WAYS[0]), Crowd(0, WAYS[0], rate)))
                for rate in (0.01, 0.1)
            ),
        )
    ),
    *(
        Relative(
            LATE if 2 * max(way.away) <= fixed else LATER,
            Model(fixed, 0.05),
            (Crowd(n, way),),
            AUTO,
            replace(AUTO, timeout_ms=600.0),
        )
        for fixed in (20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
        for n in (2, 8, 24, 64)
        for way in LATE_WAYS
    ),
    *(
        Relative(LATE_AND_SLOW, Model(fixed, 0.05), (Crowd(n, way),), AUTO, EAGER)
        for fixed in (200.0, 500.0, 1000.0)
        for n in (2, 8, 24, 64)
        for way in LATE_WAYS
    ),
]

OPEN_ROWS = [
    *(
        OpenRow(model, arrivals, load)
        for model in MODELS
        for arrivals in ARRIVALS
        for load in LOADS
    ),
    *(OpenRow(FULL_AT_32, "in bursts", load, 40, w) for w in (1, 2) for load in LOADS),
]


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--json", type=Path, metavar="FILE", help="file for every row")
    made.add_argument("--every", type=int, default=1, metavar="N", help="run one closed loop of N")
    arguments = made.parse_args()
    closed_rows, crowd_rows = CLOSED_ROWS[:: arguments.every], CROWD_ROWS[:: arguments.every]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        closed = dict(zip(closed_rows, pool.map(ClosedRow.throughput, closed_rows), strict=True))
        crowded = dict(zip(crowd_rows, pool.map(CrowdRow.throughput, crowd_rows), strict=True))
        opened = dict(zip(OPEN_ROWS, pool.map(OpenRow.latency, OPEN_ROWS), strict=True))
        relative = dict(zip(RELATIVE_ROWS, pool.map(Relative.ratios, RELATIVE_ROWS), strict=True))
    show_closed(closed, WINDOWS)
    show_closed(crowded, MORE_WINDOWS)
    show_open(opened)
    show_relative(relative)
    if arguments.json:
        rows = {
            "throughput": {str(row): found for row, found in closed.items()},
            "crowds": {str(row): found for row, found in crowded.items()},
            "latency": {str(row): found for row, found in opened.items()},
            "relative": {f"{row.family}: {row}": found for row, found in relative.items()},
        }
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    found = [*figures(closed, opened), *figures_of_crowds(crowded), *figures_relative(relative)]
    conclude(lambda: Result(found), arguments, noisy=False)


if __name__ == "__main__":
    main()
