"""What every benchmark here prints: the machine, the figures beside their bounds, and the verdict.
With `--save` it is kept, too.

A saved result is a table, `results/NAME.md`, and a picture, `results/NAME.png`, of the benchmark
`NAME.py`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pictures import Panel

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Figure:
    """One measured figure: the median of several runs, and the bounds it is held to."""

    name: str
    runs: list[float]
    unit: str
    bound: float | None = None  # at most this much
    at_least: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def spread(self) -> str:
        """The lowest and the highest run; empty if there was one."""
        return f"{shown(min(self.runs))} to {shown(max(self.runs))}" if len(self.runs) > 1 else ""

    @property
    def kept(self) -> bool:
        return (self.bound is None or self.median <= self.bound) and (
            self.at_least is None or self.median >= self.at_least
        )

    @property
    def verdict(self) -> str:
        """The bounds, and whether they are kept; empty where there are none."""
        bounds = [
            " ".join(filter(None, (word, f"{bound:g}", self.unit)))
            for word, bound in (("at least", self.at_least), ("at most", self.bound))
            if bound is not None
        ]
        return f"{' and '.join(bounds)}: {'kept' if self.kept else 'MISSED'}" if bounds else ""


def repeated(measure: Callable[[], float], runs: int) -> list[float]:
    """What `measure` returns, `runs` times, after one run that does not count."""
    measure()
    return [measure() for _ in range(runs)]


def parser(description: str) -> argparse.ArgumentParser:
    """The command line that all benchmarks share, for those that add to it."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    made.add_argument("--quick", action="store_true", help="fewer runs")
    made.add_argument(
        "--save", action="store_true", help="keep the table and a picture in benchmarks/results"
    )
    return made


def options(description: str) -> argparse.Namespace:
    """The arguments, as all benchmarks take them."""
    return parser(description).parse_args()


def shown(value: float) -> str:
    """Three digits, or all digits before the point where there are more."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def conclude(
    figures: list[Figure],
    arguments: argparse.Namespace,
    packages: Sequence[str] = (),
    *,
    versions: Mapping[str, str] | None = None,
    missing: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    panels: Sequence[Panel] = (),
) -> None:
    """Prints the machine and the figures, keeps them if asked to, and exits as `--check` asks.

    Args:
        figures: what was measured.
        arguments: the command line.
        packages: those beside `batched` whose versions matter.
        versions: of packages that are not in this environment, by name.
        missing: what could not be measured, and why.
        notes: sentences for whoever reads the figures.
        panels: of the picture; by default bars, a panel for each unit.
    """
    missing = missing or {}
    found = {name: importlib.metadata.version(name) for name in ("batched", *packages)} | dict(
        versions or {}
    )
    machine = _machine(found)
    print(f"{machine}; command: {_command()}")
    width = max(len(name) for name in (*(figure.name for figure in figures), *missing))
    for figure in figures:
        spread = f"({figure.spread})" if figure.spread else ""
        print(
            f"  {figure.name:<{width}}  {shown(figure.median):>8} {figure.unit:<8} {spread:<20} "
            f"{figure.verdict}".rstrip()
        )
    for name, reason in missing.items():
        print(f"  {name:<{width}}  not measured: {reason}")
    for note in notes:
        print(note)
    if arguments.save:
        _save(table(_about(), machine, figures, missing, notes), figures, machine, panels)
    if arguments.check and not all(figure.kept for figure in figures):
        sys.exit(1)


def table(
    about: str,
    machine: str,
    figures: list[Figure],
    missing: Mapping[str, str],
    notes: Sequence[str],
) -> str:
    """All of it in Markdown."""
    rows = [("", "median", "unit", "lowest to highest", "bound")]
    rows += [
        (figure.name, shown(figure.median), figure.unit, figure.spread, figure.verdict)
        for figure in figures
    ]
    rows += [(name, "not measured", "", "", reason) for name, reason in missing.items()]
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    lines.insert(1, "|---|---:|---|---|---|")
    head = [f"# {about}", "", f"{machine}.", "", f"Command: `{_command()}`", ""]
    return "\n".join(
        [*head, *lines, *(["", *(f"- {note}" for note in notes)] if notes else []), ""]
    )


def _machine(versions: Mapping[str, str]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{machine}, Python {platform.python_version()}, {packages}"


def _command() -> str:
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def _about() -> str:
    """The first line of what the benchmark says about itself."""
    return (sys.modules["__main__"].__doc__ or Path(sys.argv[0]).stem).splitlines()[0]


def _save(text: str, figures: list[Figure], machine: str, panels: Sequence[Panel]) -> None:
    from pictures import draw, of_figures  # not everyone who measures has matplotlib

    RESULTS.mkdir(exist_ok=True)
    name = Path(sys.argv[0]).stem
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    draw(
        _about(), f"{machine}\n{_command()}", panels or of_figures(figures), RESULTS / f"{name}.png"
    )
    print(f"kept in benchmarks/results/{name}.md and {name}.png")
