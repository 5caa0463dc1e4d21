"""Does `flush="auto"` keep up with the rule that suits each kind of traffic best? The real
scheduler, in virtual time.

Run: python benchmarks/policy.py [--check] [--save] [--json FILE]

Closed loops are judged by their throughput beside the best of `"eager"` and `"window"` with six
timeouts, picked for each row afterwards; open ones by the mean and the 99th percentile of latency
beside eager's. Several workers, more callers than fit a batch, callers of two kinds and `prefetch`
are judged beside the rule that they must not fall behind. Nothing here depends on the machine, and
`--json` keeps every row, so that two versions of the code can be compared.
"""

from __future__ import annotations

import json
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from batched._core.policy import BatchPolicy
from report import Figure, Result, conclude, parser
from virtual_time import BURST, Arrivals, Crowd, Model, Way, closed_loop, crowds, open_loop

BATCH_SIZE = 64
TIMEOUT = 5.0
"""The ceiling of `"auto"` (ms)."""
WINDOWS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
"""Timeouts of the windows (ms)."""
SEED = 1
"""Of all rows and rules, so that all rules see the same callers and the same luck."""

MODELS = (Model(5.0, 0.05), Model(2.0, 0.2), Model(1.0, 0.02), Model(0.2, 1.0))
CALLERS = (1, 2, 4, 8, 16, 32, 64, 100, 200)
WAYS = (Way(0.015), Way(0.1), Way(0.015, think=0.3), Way(0.015, think=3.0))
ARRIVALS: tuple[Arrivals, ...] = ("at random", "in bursts")
LOADS = (0.05, 0.2, 0.5, 0.8, 0.95)
"""Parts of the capacity."""

LEAST_SHARE = 0.95
"""Of the best other rule, in throughput: every row."""
GOOD_SHARE = 0.97
"""The same: all rows but `MOST_BELOW`."""
MOST_BELOW = 4
MOST_MEAN = 1.03
"""Mean latency beside eager's: every row."""
MOST_P99 = 1.15
"""99th percentile of latency beside eager's: every row."""
MOST_OF_BURSTS = 0.95
"""Mean latency beside eager's, where merging a burst pays: see `OpenRow.merging_pays`."""

Rules = dict[str, BatchPolicy]
RULES: Rules = {
    flush: BatchPolicy(batch_size=BATCH_SIZE, timeout_ms=TIMEOUT, flush=flush)
    for flush in ("auto", "eager")
} | {
    f"{window:g}": BatchPolicy(batch_size=BATCH_SIZE, timeout_ms=window, flush="window")
    for window in WINDOWS
}
"""What is compared; windows are named by their timeouts."""
BESIDE_EAGER = {name: RULES[name] for name in ("auto", "eager")}
"""All that open loops need: windows are far behind there."""


@dataclass(frozen=True)
class ClosedRow:
    """A fixed number of callers, each of which calls again after its answer."""

    model: Model
    callers: int
    way: Way

    def __str__(self) -> str:
        think = f" think {self.way.think:g}" if self.way.think else ""
        return f"{_formula(self.model)} {self.callers:>3} callers, gap {self.way.gap:g}{think}"

    def throughput(self, rules: Rules = RULES, calls: int | None = None) -> dict[str, float]:
        """Calls per millisecond under each rule: by default over the second half of some 200
        batches, and of 2000 calls at least.
        """
        calls = calls or max(2000, 200 * min(self.callers, BATCH_SIZE))
        return {
            name: closed_loop(rule, self.model, self.callers, self.way, SEED, calls)
            for name, rule in rules.items()
        }


@dataclass(frozen=True)
class OpenRow:
    """Calls that come whether others have been answered or not."""

    model: Model
    arrivals: Arrivals
    load: float

    def __str__(self) -> str:
        return f"{_formula(self.model)} {self.load:>4.0%} {self.arrivals}"

    @property
    def merging_pays(self) -> bool:
        """Whether to wait for a burst that comes now and then must clearly lower its mean latency.

        It must where the fixed part of a batch is at least what all items of a burst take, and the
        load is low.
        """
        return (
            self.arrivals == "in bursts"
            and self.load <= 0.2
            and self.model.fixed >= BURST * self.model.per_item
        )

    def latency(
        self, rules: Rules = BESIDE_EAGER, calls: int = 20_000
    ) -> dict[str, tuple[float, float]]:
        """Mean and 99th percentile in milliseconds under each rule, of all but the first tenth of
        the calls.
        """
        found = {}
        for name, rule in rules.items():
            counted = open_loop(rule, self.model, self.arrivals, self.load, SEED, calls)[
                calls // 10 :
            ]
            found[name] = statistics.fmean(counted), sorted(counted)[int(0.99 * len(counted))]
        return found


class Ratios(NamedTuple):
    """One policy beside another, as multiples of what the other gives."""

    throughput: float
    mean: float
    """Of the latencies of the last kind of callers."""
    p99: float
    """Of the same."""


@dataclass(frozen=True)
class Beside:
    """One policy beside another that it must not fall behind, for the same callers."""

    family: str
    """Question that the row is about; see `BOUNDS`."""
    model: Model
    kinds: tuple[Crowd, ...]
    judged: BatchPolicy
    other: BatchPolicy

    def __str__(self) -> str:
        flat = f" from {self.model.flat}" if self.model.flat else ""
        collation = f" collated in {self.model.collation:g}" if self.model.collation else ""
        who = " and ".join(map(_crowd, self.kinds))
        workers = self.judged.max_concurrent_batches
        return (
            f"{_formula(self.model)}{flat}{collation} {who}"
            f"{f', {workers} workers' if workers > 1 else ''}"
        )

    def ratios(self, calls: int | None = None) -> Ratios:
        """The judged policy beside the other one, after that many calls."""
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
        mine, others = (sorted(run.latencies[-1]) for run in (judged, other))
        return Ratios(
            judged.throughput / other.throughput,
            statistics.fmean(mine) / statistics.fmean(others),
            mine[int(0.99 * len(mine))] / others[int(0.99 * len(others))],
        )


@dataclass(frozen=True)
class Bound:
    """Bound that one of the ratios keeps in all rows of a family."""

    family: str
    measure: Literal["throughput", "mean", "p99"]
    at_least: float | None = None
    at_most: float | None = None

    def value(self, ratios: Ratios) -> float:
        """The one that is bound."""
        value: float = getattr(ratios, self.measure)
        return value


def _crowd(crowd: Crowd) -> str:
    if not crowd.callers:
        return f"{crowd.calls_at_random:.2g} a ms at random"
    think = f" think {crowd.way.think:g}" if crowd.way.think else ""
    return f"{crowd.callers} callers, gap {crowd.way.gap:g}{think}"


def shares(throughput: dict[str, float]) -> dict[str, float]:
    """Each throughput as a part of the best but auto's."""
    best = max(found for name, found in throughput.items() if name != "auto")
    return {name: found / best for name, found in throughput.items()}


def ratios(latency: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Each latency as a multiple of eager's."""
    mean, p99 = latency["eager"]
    return {name: (found[0] / mean, found[1] / p99) for name, found in latency.items()}


def _formula(model: Model) -> str:
    return f"{f'{model.fixed:g} + {model.per_item:g} n':<10}"


def show(
    closed: dict[ClosedRow, dict[str, float]], opened: dict[OpenRow, dict[str, tuple[float, float]]]
) -> None:
    """Prints a line for each row."""
    width = max(len(str(row)) for row in (*closed, *opened))
    windows = "".join(f"{f'win {window:g}':>9}" for window in WINDOWS)
    print(
        "Closed loop: throughput, as a share of the best rule but auto (times in ms)\n"
        f"{'a batch of n takes, callers, way':<{width}}{'auto':>9}{'eager':>9}{windows}"
    )
    for row, throughput in closed.items():
        print(f"{row!s:<{width}}" + "".join(f"{one:9.3f}" for one in shares(throughput).values()))
    print(
        "\nOpen loop: mean and 99th percentile of latency, auto as a multiple of eager (ms)\n"
        f"{'a batch of n takes, load, arrivals':<{width}}"
        f"{'mean':>9}{'eager':>9}{'p99':>9}{'eager':>9}"
    )
    for other, latency in opened.items():
        [mean, p99], [eager_mean, eager_p99] = ratios(latency)["auto"], latency["eager"]
        print(f"{other!s:<{width}}{mean:9.3f}{eager_mean:9.2f}{p99:9.3f}{eager_p99:9.2f}")
    print()


def show_beside(beside: dict[Beside, Ratios]) -> None:
    """Prints a line for each row."""
    width = max(len(str(row)) for row in beside)
    for family in dict.fromkeys(row.family for row in beside):
        print(f"{family:<{width}}{'calls':>9}{'mean':>9}{'p99':>9}")
        for row, found in beside.items():
            if row.family == family:
                print(f"{row!s:<{width}}" + "".join(f"{one:9.3f}" for one in found))
        print()


def figures_beside(beside: dict[Beside, Ratios]) -> list[Figure]:
    """The worst row of each family."""
    worst = []
    for bound in BOUNDS:
        found = [bound.value(each) for row, each in beside.items() if row.family == bound.family]
        measure = bound.measure if bound.measure == "throughput" else f"{bound.measure} latency"
        worst.append(
            Figure(
                f"{bound.family}, {measure}, worst of {len(found)} rows",
                [max(found) if bound.at_least is None else min(found)],
                "of none" if bound.family.startswith(AHEAD) else "of eager",
                at_least=bound.at_least,
                at_most=bound.at_most,
            )
        )
    return worst


def figures(
    closed: dict[ClosedRow, dict[str, float]], opened: dict[OpenRow, dict[str, tuple[float, float]]]
) -> list[Figure]:
    """The worst rows of `"auto"`."""
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
"""Time on a GPU, which is not full with few items."""
LONG, EVEN, SHORT, _ = MODELS
AUTO, EAGER = RULES["auto"], RULES["eager"]


def _at_random(model: Model, load: float, workers: int = 1) -> tuple[Crowd, ...]:
    return (Crowd(0, WAYS[0], load * workers * model.capacity(BATCH_SIZE)),)


WORKERS = "several workers"
WORKERS_AT_RANDOM = "several workers, calls at random"
CROWDED = "more callers than fit a batch"
SLOW_BESIDE_FAST = "slow callers beside 4 fast ones"
RARE_BESIDE_LOOP = "rare calls beside a loop of 64"
AHEAD = "prefetch beside none"
AHEAD_AT_RANDOM = "prefetch beside none, calls at random"
AHEAD_FULL = "prefetch beside none, full batches collated in {:g} ms"
BOUNDS = [
    Bound(WORKERS, "throughput", at_least=0.90),
    Bound(WORKERS_AT_RANDOM, "mean", at_most=1.04),
    Bound(CROWDED, "throughput", at_least=0.98),
    Bound(CROWDED, "p99", at_most=1.10),
    Bound(SLOW_BESIDE_FAST, "mean", at_most=1.25),
    Bound(RARE_BESIDE_LOOP, "mean", at_most=1.25),
    Bound(AHEAD, "throughput", at_least=0.98),
    Bound(AHEAD_AT_RANDOM, "mean", at_most=1.02),
    Bound(AHEAD_FULL.format(0.2), "throughput", at_least=1.05),
    Bound(AHEAD_FULL.format(1.0), "throughput", at_least=1.30),
]
BESIDE_ROWS = [
    *(
        Beside(family, model, kinds, *(replace(r, max_concurrent_batches=w) for r in (AUTO, EAGER)))
        for w in (2, 4, 8)
        for model in (LONG, EVEN, SHORT)
        for family, kinds in (
            *((WORKERS, (Crowd(n, way),)) for n in (16, 32, 64, 128) for way in WAYS[:2]),
            *((WORKERS_AT_RANDOM, _at_random(model, load, w)) for load in (0.3, 0.45, 0.6)),
        )
    ),
    *(
        Beside(CROWDED, model, (Crowd(n, way),), AUTO, EAGER)
        for model in (FLAT_THEN_LINEAR, EVEN)
        for n in (65, 72, 80, 90, 100)
        for way in WAYS[:3]
    ),
    *(
        Beside(family, model, kinds, AUTO, EAGER)
        for model in (LONG, EVEN, SHORT)
        for family, kinds in (
            *(
                (SLOW_BESIDE_FAST, (Crowd(4, WAYS[0]), Crowd(30, Way(0.015, think=think))))
                for think in (10.0, 30.0, 100.0)
            ),
            *(
                (RARE_BESIDE_LOOP, (Crowd(64, WAYS[0]), Crowd(0, WAYS[0], rate)))
                for rate in (0.01, 0.1)
            ),
        )
    ),
    *(
        Beside(family, replace(model, collation=collation), kinds, replace(AUTO, prefetch=1), AUTO)
        for collation in (0.2, 1.0)
        for model in (LONG, EVEN, SHORT)
        for family, kinds in (
            *((AHEAD, (Crowd(n, way),)) for n in (1, 2, 8, 32, 64, 128) for way in WAYS[:2]),
            *((AHEAD_AT_RANDOM, _at_random(model, load)) for load in (0.2, 0.5, 0.7)),
        )
    ),
    *(
        Beside(
            AHEAD_FULL.format(collation),
            replace(SHORT, collation=collation),
            (Crowd(200, WAYS[0]),),
            replace(AUTO, prefetch=1),
            AUTO,
        )
        for collation in (0.2, 1.0)
    ),
]

OPEN_ROWS = [
    OpenRow(model, arrivals, load) for model in MODELS for arrivals in ARRIVALS for load in LOADS
]


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--json", type=Path, metavar="FILE", help="where to keep every row")
    arguments = made.parse_args()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        closed = dict(zip(CLOSED_ROWS, pool.map(ClosedRow.throughput, CLOSED_ROWS), strict=True))
        opened = dict(zip(OPEN_ROWS, pool.map(OpenRow.latency, OPEN_ROWS), strict=True))
        beside = dict(zip(BESIDE_ROWS, pool.map(Beside.ratios, BESIDE_ROWS), strict=True))
    show(closed, opened)
    show_beside(beside)
    if arguments.json:
        rows = {
            "throughput": {str(row): found for row, found in closed.items()},
            "latency": {str(row): found for row, found in opened.items()},
            "beside": {f"{row.family}: {row}": found for row, found in beside.items()},
        }
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    found = [*figures(closed, opened), *figures_beside(beside)]
    conclude(lambda: Result(found), arguments, noisy=False)


if __name__ == "__main__":
    main()
