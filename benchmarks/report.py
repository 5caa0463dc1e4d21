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
    """One measured figure: the median of several runs, and the bound it is held to."""

    name: str
    runs: list[float]
    unit: str
    bound: float | None = None  # at most this much

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def kept(self) -> bool:
        return self.bound is None or self.median <= self.bound


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
        bound = f"at most {figure.bound:g} {figure.unit}: {'kept' if figure.kept else 'MISSED'}" if figure.bound is not None else ""
        spread = f"({min(figure.runs):.3g} to {max(figure.runs):.3g})"
        print(f"  {figure.name:<{width}}  {figure.median:8.3g} {figure.unit:<8} {spread:<20} {bound}".rstrip())
    if arguments.check and not all(figure.kept for figure in figures):
        sys.exit(1)
