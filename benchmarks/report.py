"""Figures, as every benchmark prints them: the machine, each figure, its baseline and its bound.

`--save` writes the table to `results/NAME.md`, and the picture, if there is one, to
`results/NAME.png`. Bounds are multiples of a baseline of the same run, so that they hold on any
machine. A figure that misses its bound is measured once more before `--check` reports it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pictures import Panel

RESULTS = Path(__file__).parent / "results"
HEADER = ("", "median", "unit", "lowest to highest", "baseline", "ratio", "bound")


@dataclass(frozen=True)
class Figure:
    """One measured figure, with a run for each round. Its bounds limit its ratio to a baseline or,
    without a baseline, its own median.
    """

    name: str
    runs: list[float]
    unit: str
    baseline: Figure | None = None
    """Baseline (floor or reference), measured in the same rounds and the same unit."""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def spread(self) -> str:
        """Lowest and highest run; empty for a single run."""
        return f"{shown(min(self.runs))} to {shown(max(self.runs))}" if len(self.runs) > 1 else ""

    @property
    def ratio(self) -> float | None:
        """Median of the ratios within each round. Where rounds are missing, the runs are divided by
        the median of the baseline.
        """
        if self.baseline is None:
            return None
        others = self.baseline.runs
        if len(others) != len(self.runs):
            others = [self.baseline.median] * len(self.runs)
        return statistics.median(run / other for run, other in zip(self.runs, others, strict=True))

    @property
    def kept(self) -> bool:
        judged = self.median if self.ratio is None else self.ratio
        return (self.at_most is None or judged <= self.at_most) and (
            self.at_least is None or judged >= self.at_least
        )

    @property
    def bounds(self) -> str:
        return " and ".join(
            f"{word} {bound:g}"
            for word, bound in (("at least", self.at_least), ("at most", self.at_most))
            if bound is not None
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """Texts of the cells, in the order of `HEADER`."""
        baseline = f"{self.baseline.name}: {shown(self.baseline.median)}" if self.baseline else ""
        ratio = "" if self.ratio is None else shown(self.ratio)
        return (
            *(self.name, shown(self.median), self.unit, self.spread),
            *(baseline, ratio, self.bounds),
        )


@dataclass
class Result:
    """Everything that a benchmark measured."""

    figures: list[Figure]
    packages: Sequence[str] = ()
    """Packages of this environment whose versions matter, without `batched` itself."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of packages that are not in this environment, by name."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Reasons why figures are missing, by row."""
    notes: Sequence[str] = ()
    """Sentences for the readers of the table."""
    panels: Sequence[Panel] = ()
    """Picture for users; most benchmarks have none."""

    @property
    def machine(self) -> str:
        versions = {
            name: importlib.metadata.version(name)
            for name in ("batched-dynamically", *self.packages)
        }
        packages = ", ".join(
            f"{name} {version}" for name, version in (versions | dict(self.versions)).items()
        )
        return (
            f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
            f"{packages}"
        )

    @property
    def missed(self) -> set[str]:
        """Names of the figures that miss their bounds."""
        return {figure.name for figure in self.figures if not figure.kept}


def parser(description: str) -> argparse.ArgumentParser:
    """Return the command line that all benchmarks share; some benchmarks add arguments to it."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    purpose = made.add_mutually_exclusive_group()
    purpose.add_argument(
        "--check", action="store_true", help="no peers; exit with 1 if a bound is missed"
    )
    purpose.add_argument(
        "--save", action="store_true", help="keep the table (and picture) in benchmarks/results"
    )
    made.add_argument("--quick", action="store_true", help="fewer runs")
    return made


def options(description: str) -> argparse.Namespace:
    """Return the arguments that all benchmarks take."""
    return parser(description).parse_args()


def shown(value: float) -> str:
    """Format a number with three digits, or with all digits before the point if there are more."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def conclude(
    measure: Callable[[], Result], arguments: argparse.Namespace, *, noisy: bool = True
) -> None:
    """Measure, print, and save or judge as `arguments` ask. Only noisy measurements are
    repeated.
    """
    result = measure()
    show(result)
    if arguments.save:
        _save(result)
    if not arguments.check:
        return
    missed = result.missed
    if missed and noisy:
        print(f"missed, and so measured once more: {', '.join(sorted(missed))}", flush=True)
        again = measure()
        show(again)
        missed &= again.missed
    print(f"MISSED: {', '.join(sorted(missed))}" if missed else "all bounds are kept")
    if missed:
        sys.exit(1)


def show(result: Result) -> None:
    """Print the machine and a line for each figure."""
    print(f"{result.machine}; command: {_command()}")
    rows = [HEADER, *(figure.cells for figure in result.figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"  {'  '.join(cells)}".rstrip())
    for name, reason in result.missing.items():
        print(f"  {name}: not measured: {reason}")
    for note in result.notes:
        print(note)


def table(about: str, result: Result) -> str:
    """Return the whole result as Markdown."""
    rows = [HEADER, *(figure.cells for figure in result.figures)]
    rows += [
        (name, "not measured", "", reason, "", "", "") for name, reason in result.missing.items()
    ]
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    lines.insert(1, "|---|---:|---|---|---|---:|---|")
    head = [f"# {about}", "", f"{result.machine}.", "", f"Command: `{_command()}`", ""]
    notes = ["", *(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n".join([*head, *lines, *notes, ""])


def _command() -> str:
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def _save(result: Result) -> None:
    RESULTS.mkdir(exist_ok=True)
    name = Path(sys.argv[0]).stem
    about = " ".join((sys.modules["__main__"].__doc__ or name).split("\n\n")[0].split())
    (RESULTS / f"{name}.md").write_text(table(about, result), encoding="utf-8")
    print(f"kept in benchmarks/results/{name}.md")
    if result.panels:
        from pictures import draw  # not everyone who measures has matplotlib

        draw(about, f"{result.machine}\n{_command()}", result.panels, RESULTS / f"{name}.png")
