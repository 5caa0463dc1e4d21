"""Does `flush="auto"` keep up with the rule that suits each kind of traffic best? The real
scheduler, in virtual time.

Run: python benchmarks/policy.py [--check] [--quick] [--save]

Beside it run `"eager"` and `"window"` with six timeouts; the oracle is the best of these windows,
picked for each row afterwards. A closed loop is judged by its throughput, an open one by the mean
and the 99th percentile of its latency. Nothing here depends on the machine.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from batched._core.policy import BatchPolicy
from report import Figure, conclude, options
from virtual_time import BURST, Arrivals, Model, Way, closed_loop, open_loop

BATCH_SIZE = 64
TIMEOUT = 5.0
"""The ceiling of `"auto"` (ms)."""
WINDOWS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
"""Timeouts of the windows (ms)."""
SHOWN = (0.5, 1.0, 2.0, 5.0)
"""Those with a column of their own."""
SEED = 1
"""Of all rows and rules, so that all rules see the same callers and the same luck."""

MODELS = (Model(5.0, 0.05), Model(2.0, 0.2), Model(1.0, 0.02), Model(0.2, 1.0))
CALLERS = (1, 2, 4, 8, 16, 32, 64, 100, 200)
WAYS = (Way(0.015), Way(0.1), Way(0.015, think=0.3), Way(0.015, think=3.0))
ARRIVALS: tuple[Arrivals, ...] = ("at random", "in bursts")
LOADS = (0.05, 0.2, 0.5, 0.8, 0.95)
"""Parts of the capacity."""

LEAST_SHARE = 0.95
"""Of the better of eager and the oracle, in throughput: every row."""
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
        """Calls per millisecond under each rule: by default over some 150 full batches, or 3000
        smaller ones.
        """
        calls = calls or max(6000, 300 * min(self.callers, BATCH_SIZE))
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

    def latency(self, rules: Rules = RULES, calls: int = 20_000) -> dict[str, tuple[float, float]]:
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


def shares(throughput: dict[str, float]) -> dict[str, float]:
    """Each throughput as a part of the better of eager and the oracle."""
    best = max(found for name, found in throughput.items() if name != "auto")
    return {name: found / best for name, found in throughput.items()}


def ratios(latency: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Each latency as a multiple of eager's."""
    mean, p99 = latency["eager"]
    return {name: (found[0] / mean, found[1] / p99) for name, found in latency.items()}


def _formula(model: Model) -> str:
    return f"{f'{model.fixed:g} + {model.per_item:g} n':<10}"


def _throughput(row: ClosedRow) -> dict[str, float]:
    return row.throughput()


def _latency(row: OpenRow) -> dict[str, tuple[float, float]]:
    return row.latency()


def closed_table(found: dict[ClosedRow, dict[str, float]]) -> None:
    """Prints a line for each row."""
    width = max(len(str(row)) for row in found)
    print(
        "\nClosed loop: throughput, as a share of the better of eager and the oracle (times in ms)"
    )
    windows = "".join(f"{f'win {window:g}':>8}" for window in SHOWN)
    print(
        f"{'a batch of n takes, callers, way':<{width}}{'eager':>8}{windows}   "
        f"{'oracle':<13}{'auto':>6}{'best/ms':>9}"
    )
    for row, throughput in found.items():
        share = shares(throughput)
        best = max((f"{window:g}" for window in WINDOWS), key=lambda name: share[name])
        columns = "".join(
            f"{share[name]:8.2f}" for name in ("eager", *(f"{window:g}" for window in SHOWN))
        )
        top = max(throughput[name] for name in throughput if name != "auto")
        print(
            f"{row!s:<{width}}{columns}   "
            f"{f'{share[best]:.2f} (win {best})':<13}{share['auto']:6.2f}{top:9.3g}"
        )


def open_table(found: dict[OpenRow, dict[str, tuple[float, float]]]) -> None:
    """Prints a line for each row."""
    width = max(len(str(row)) for row in found)
    rules = (*(f"{window:g}" for window in SHOWN), "auto")
    header = "".join(f"{name if name == 'auto' else f'win {name}':>8}" for name in rules)
    print(
        "\nOpen loop: mean | 99th percentile of latency; eager in ms, the others as a multiple "
        "of eager's"
    )
    print(
        f"{'a batch of n takes, load, arrivals':<{width}}{'eager':>8}{header}  "
        f"|{'eager':>8}{header}"
    )
    for row, latency in found.items():
        ratio = ratios(latency)
        halves = [
            f"{latency['eager'][i]:8.2f}" + "".join(f"{ratio[name][i]:8.2f}" for name in rules)
            for i in (0, 1)
        ]
        print(f"{row!s:<{width}}{'  |'.join(halves)}")


def summary(
    closed: dict[ClosedRow, dict[str, float]], opened: dict[OpenRow, dict[str, tuple[float, float]]]
) -> None:
    """Prints how each rule fares over all rows, and where `"auto"` does worst."""
    share = {row: shares(throughput) for row, throughput in closed.items()}
    ratio = {row: ratios(latency) for row, latency in opened.items()}
    columns = (
        "worst share",
        f"rows of {len(share)} below {GOOD_SHARE:g}",
        f"below {LEAST_SHARE:g}",
        "worst mean latency",
        "worst p99",
    )
    print(f"\n{'All rows':<10}{''.join(f'  {column}' for column in columns)}")
    for name in RULES:
        found = [row[name] for row in share.values()]
        figures = (
            f"{min(found):.2f}",
            f"{sum(one < GOOD_SHARE for one in found)}",
            f"{sum(one < LEAST_SHARE for one in found)}",
            f"{max(row[name][0] for row in ratio.values()):.2f}",
            f"{max(row[name][1] for row in ratio.values()):.2f}",
        )
        label = name if name in ("auto", "eager") else f"win {name}"
        cells = [
            f"  {figure:>{len(column)}}" for figure, column in zip(figures, columns, strict=True)
        ]
        print(f"{label:<10}{''.join(cells)}")
    worst = {
        "throughput": sorted((row["auto"], str(name)) for name, row in share.items())[:5],
        "mean latency": sorted(
            ((row["auto"][0], str(name)) for name, row in ratio.items()), reverse=True
        )[:5],
        "p99": sorted(((row["auto"][1], str(name)) for name, row in ratio.items()), reverse=True)[
            :5
        ],
        "bursts": sorted(
            ((row["auto"][0], str(name)) for name, row in ratio.items() if name.merging_pays),
            reverse=True,
        )[:5],
    }
    for what, rows in worst.items():
        print(f"\nWorst rows of auto, {what}:")
        print("\n".join(f"  {figure:.3f}  {name}" for figure, name in rows))
    print()


def figures(
    closed: dict[ClosedRow, dict[str, float]], opened: dict[OpenRow, dict[str, tuple[float, float]]]
) -> list[Figure]:
    """What `"auto"` is held to."""
    share = [shares(throughput)["auto"] for throughput in closed.values()]
    ratio = {row: ratios(latency)["auto"] for row, latency in opened.items()}
    bursts = [mean for row, (mean, _) in ratio.items() if row.merging_pays]
    beside = "of eager"
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
            MOST_BELOW,
        ),
        Figure(
            f"open loop, mean latency, worst of {len(ratio)} rows",
            [max(mean for mean, _ in ratio.values())],
            beside,
            MOST_MEAN,
        ),
        Figure(
            f"open loop, p99 latency, worst of {len(ratio)} rows",
            [max(p99 for _, p99 in ratio.values())],
            beside,
            MOST_P99,
        ),
        Figure(
            f"bursts that pay to merge, mean latency, worst of {len(bursts)} rows",
            [max(bursts)],
            beside,
            MOST_OF_BURSTS,
        ),
    ]


def rows(quick: bool) -> tuple[list[ClosedRow], list[OpenRow]]:
    """The grid, or a part of it."""
    callers: Sequence[int] = (1, 2, 16, 64) if quick else CALLERS
    ways: Sequence[Way] = (WAYS[0], WAYS[3]) if quick else WAYS
    loads: Sequence[float] = (0.05, 0.8) if quick else LOADS
    closed = [
        ClosedRow(model, number, way) for model in MODELS for number in callers for way in ways
    ]
    return closed, [
        OpenRow(model, arrivals, load)
        for model in MODELS
        for arrivals in ARRIVALS
        for load in loads
    ]


def main() -> None:
    arguments = options(__doc__ or "")
    closed_rows, open_rows = rows(arguments.quick)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        closed = dict(zip(closed_rows, pool.map(_throughput, closed_rows), strict=True))
        opened = dict(zip(open_rows, pool.map(_latency, open_rows), strict=True))
    closed_table(closed)
    open_table(opened)
    summary(closed, opened)
    conclude(figures(closed, opened), arguments)


if __name__ == "__main__":
    main()
