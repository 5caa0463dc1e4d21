"""How long do calls take that come at random, or in bursts of ten, whether others have been
answered or not?

Run: python benchmarks/open_loop.py [--check] [--quick] [--save]

Coroutines call; the function sleeps 5 ms and 0.1 ms for each item, to the next full millisecond,
and `batch_size` is 32. Load is a part of what full batches, one right after another, come to in the
same process. All see the same arrivals. Latency is from the planned arrival to the answer.
"""

from __future__ import annotations

import argparse
import statistics
from functools import cache
from random import Random
from typing import Any

from contest import ROUNDS, Found, Question, contest
from peers import OURS, PEERS, Peer, compared, without
from pictures import Panel
from report import Figure, conclude, options
from virtual_time import Arrivals, at_random, in_bursts

LOADS = (0.05, 0.2, 0.5, 0.8)
QUICK_LOADS = (0.2, 0.8)
ARRIVALS: tuple[Arrivals, ...] = ("at random", "in bursts")
FIXED_MS, PER_ITEM_MS, BATCH_SIZE = 5.0, 0.1, 32
SECONDS, QUICK_SECONDS = 1.5, 0.6
"""For which calls come."""
WARM_UP = 0.1
"""Part of the calls that do not count."""
SEED = 1
OURS_TWICE = Peer(
    OURS.name,
    OURS.module,
    OURS.driven,
    variants={"auto": {"flush": "auto"}, "eager": {"flush": "eager"}},
)
LEAST_OF_EAGER = 0.95
"""Mean latency of eager flushing, as a part of ours: what waiting for others may cost."""
JUDGED = 0.5
"""The highest load at which that is judged: nearer to capacity two runs of one setting are up to a
quarter apart.
"""
CAPACITY = BATCH_SIZE / (FIXED_MS + PER_ITEM_MS * BATCH_SIZE)
"""Nominal, in calls per millisecond: what the loads and lengths of runs are chosen by. Each process
scales arrivals to what it measures.
"""


def title(arrivals: Arrivals, load: float) -> str:
    """Of a question."""
    return f"{load:.0%} {arrivals}"


@cache
def moments(arrivals: Arrivals, load: float, seconds: float) -> list[float]:
    """Arrivals, where a second is what an item takes in full batches."""
    calls = max(int(load * CAPACITY * 1e3 * seconds), 50)
    come = at_random if arrivals == "at random" else in_bursts
    return [
        moment * 1e3 * CAPACITY
        for moment in come(load * CAPACITY, calls, Random(f"{arrivals}, {load}, {SEED}"))
    ]


def questions(settings: dict[str, Any], arguments: argparse.Namespace) -> list[Question]:
    """All that one row is asked."""
    loads, seconds = (QUICK_LOADS, QUICK_SECONDS) if arguments.quick else (LOADS, SECONDS)
    asked = []
    for arrivals in ARRIVALS:
        for load in loads:
            come = moments(arrivals, load, seconds)
            asked.append(
                {
                    "question": "open loop",
                    "title": title(arrivals, load),
                    "arrivals": come,
                    "warm_up": int(WARM_UP * len(come)),
                    "fixed_ms": FIXED_MS,
                    "per_item_ms": PER_ITEM_MS,
                    "batch_size": BATCH_SIZE,
                    "settings": settings,
                }
            )
    return asked


def figures(found: Found) -> list[Figure]:
    """Mean and 99th percentile as multiples of our own, then in milliseconds."""
    reference, eager = f"{OURS.name}, auto", f"{OURS.name}, eager"
    judged = {title(arrivals, load) for arrivals in ARRIVALS for load in LOADS if load <= JUDGED}
    made = []
    for asked, row, name in found.runs:
        own = found.runs.get((asked, reference, name))
        if own and row != reference:
            base = statistics.median(own)
            bound = LEAST_OF_EAGER if row == eager and name == "mean" and asked in judged else None
            made.append(
                Figure(
                    f"{asked}, {name}: {row}",
                    [run / base for run in found.runs[asked, row, name]],
                    "of ours",
                    at_least=bound,
                )
            )
    made.sort(key=lambda figure: figure.name.partition(":")[0])
    rows = sorted(found.runs, key=lambda key: (key[0], key[2]))
    return made + [
        Figure(f"{asked}, {name}: {row}", found.runs[asked, row, name], "ms")
        for asked, row, name in rows
    ]


def panels(found: Found, loads: tuple[float, ...]) -> list[Panel]:
    """Latency by load, for both kinds of arrivals."""
    rows = dict.fromkeys(row for _, row, _ in found.runs)
    nothing = [float("nan")]
    return [
        Panel(
            f"{arrivals}: {name} latency in ms (less is better)",
            {
                row: [
                    statistics.median(found.runs.get((title(arrivals, load), row, name), nothing))
                    for load in loads
                ]
                for row in rows
            },
            [f"{load:.0%}" for load in loads],
            "load",
            logarithmic=True,
        )
        for arrivals in ARRIVALS
        for name in ("mean", "p99")
    ]


def main() -> None:
    arguments = options(__doc__ or "")
    rounds = 1 if arguments.quick else 5
    found = contest(
        lambda _, settings: questions(settings, arguments),
        rounds,
        ours=(OURS_TWICE,),
        peers=compared(quick=arguments.quick),
    )
    conclude(
        figures(found),
        arguments,
        versions=found.versions,
        missing=without(quick=arguments.quick) | found.missing,
        notes=[ROUNDS.format(rounds), *(f"{peer.name}: {peer.driven}." for peer in (OURS, *PEERS))],
        panels=panels(found, QUICK_LOADS if arguments.quick else LOADS),
    )


if __name__ == "__main__":
    main()
