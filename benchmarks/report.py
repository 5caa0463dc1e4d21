"""What every benchmark here prints: the machine, the figures beside their bounds, and the verdict."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass


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
    def kept(self) -> bool:
        return (self.bound is None or self.median <= self.bound) and (self.at_least is None or self.median >= self.at_least)

    @property
    def verdict(self) -> str:
        """The bounds, and whether they are kept; empty where there are none."""
        bounds = [
            f"{word} {bound:g} {self.unit}" for word, bound in (("at least", self.at_least), ("at most", self.bound)) if bound is not None
        ]
        return f"{' and '.join(bounds)}: {'kept' if self.kept else 'MISSED'}" if bounds else ""


def repeated(measure: Callable[[], float], runs: int) -> list[float]:
    """What `measure` returns, `runs` times, after one run that does not count."""
    measure()
    return [measure() for _ in range(runs)]


def options(description: str) -> argparse.Namespace:
    """The command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    return parser.parse_args()


def conclude(figures: list[Figure], arguments: argparse.Namespace, packages: tuple[str, ...] = ()) -> None:
    """Prints the machine and the figures, and exits as `--check` asks."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("batched", *packages))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}; command: {' '.join(sys.argv)}")
    width = max(len(figure.name) for figure in figures)
    for figure in figures:
        spread = f"({min(figure.runs):.3g} to {max(figure.runs):.3g})" if len(figure.runs) > 1 else ""
        print(f"  {figure.name:<{width}}  {figure.median:8.3g} {figure.unit:<8} {spread:<20} {figure.verdict}".rstrip())
    if arguments.check and not all(figure.kept for figure in figures):
        sys.exit(1)
