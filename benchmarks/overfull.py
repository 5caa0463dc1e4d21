"""Does `flush="auto"` keep up with the best other setting where one batch cannot hold all callers?

Run: python benchmarks/overfull.py [--check] [--quick] [--save]

In real time: the function sleeps for 5 ms and 0.05 ms for each item, `batch_size` is 32, and 33 to
64 callers call again as soon as they are answered. Callers are threads, or coroutines that await
`acall`. All settings take turns in each round. The throughput of `"auto"` is compared with the best
median of `"eager"` and three windows.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

import batched
from report import Figure, Result, conclude, options
from traffic import Sleep, by_coroutines, by_threads, rate

CALLERS = (33, 34, 36, 40, 48, 56, 64)
OF_QUICK_RUN = (34, 40, 56)
BATCH_SIZE = 32
FUNCTION = Sleep(5.0, 0.05)
WARM_UP, CALLS = 20, 60
"""Calls of each caller: before the measurement, and in it."""
WINDOWS = (1.0, 2.0, 10.0)
"""Timeouts of the windows (ms)."""
LEAST_SHARE = 0.90
"""Throughput of `"auto"`, as a share of the best other setting."""

AUTO = "auto"
SETTINGS: dict[str, dict[str, Any]] = {
    AUTO: {},
    "eager": {"flush": "eager"},
    **{f"window {timeout:g}": {"flush": "window", "timeout_ms": timeout} for timeout in WINDOWS},
}


def throughput(kind: str, callers: int, settings: dict[str, Any]) -> float:
    """Return calls per second of callers of that kind under these settings."""
    items = range(callers * (WARM_UP + CALLS + 1))
    with batched.dynamically(batch_size=BATCH_SIZE, **settings)(FUNCTION.blocking) as fn:
        if kind == "threads":
            answers = by_threads(fn, callers, items)
        else:
            answers = asyncio.run(by_coroutines(fn.acall, callers, items))
    return rate(answers, callers, WARM_UP)


def figure(kind: str, callers: int, rounds: int) -> Figure:
    """Measure all settings in turns, and compare `"auto"` with the best other setting."""
    runs: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for _ in range(rounds):
        for name, settings in SETTINGS.items():
            runs[name].append(throughput(kind, callers, settings))
    auto = runs.pop(AUTO)
    best = max(runs, key=lambda name: statistics.median(runs[name]))
    return Figure(
        f"{callers} {kind}",
        auto,
        "calls/s",
        Figure(best, runs[best], "calls/s"),
        at_least=LEAST_SHARE,
    )


def measured(arguments: argparse.Namespace) -> Result:
    """Measure every number of callers of both kinds."""
    rounds = 3 if arguments.quick else 5
    return Result(
        [
            figure(kind, callers, rounds)
            for kind in ("threads", "coroutines")
            for callers in (OF_QUICK_RUN if arguments.quick else CALLERS)
        ],
        notes=[f"Medians of {rounds} rounds; the best setting is chosen afterwards."],
    )


def main() -> None:
    arguments = options(__doc__ or "")
    conclude(lambda: measured(arguments), arguments)


if __name__ == "__main__":
    main()
