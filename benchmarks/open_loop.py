"""How long do calls take that come at random, or in bursts of ten, independently of earlier
answers?

Run: python benchmarks/open_loop.py [--check] [--quick] [--save]

Coroutines call. The function sleeps for 5 ms and 0.1 ms for each item, to the next full
millisecond, and `batch_size` is 32. Load is a share of the rate of full batches, one right after
another, in the same process. All rows have the same arrivals. Latency is from the planned arrival
to the answer.
"""

from __future__ import annotations

import argparse
from functools import cache
from random import Random
from typing import Any

from contest import ROUNDS, Found, Question, contest
from peers import OURS, QUEUE, Peer, compared, without
from report import Figure, Result, conclude, options
from traffic import BURST, arrivals

LOADS = (0.05, 0.2, 0.5, 0.8)
QUICK_LOADS = (0.2, 0.8)
ARRIVALS = {"at random": 1, "in bursts": BURST}
"""Calls in a burst, by the name of the arrivals."""
FIXED_MS, PER_ITEM_MS, BATCH_SIZE = 5.0, 0.1, 32
SECONDS, QUICK_SECONDS = 1.5, 0.6
"""Time in which calls arrive (s)."""
WARM_UP = 0.1
"""Share of the calls that do not count."""
SEED = 1
OURS_TWICE = Peer(
    OURS.name,
    OURS.module,
    OURS.driven,
    variants={"auto": {"flush": "auto"}, "eager": {"flush": "eager"}},
)
AUTO, EAGER = OURS_TWICE.labels()
MOST_OF_EAGER = 1.15
"""Highest ratio of the mean latency to that of eager flushing: the cost of waiting."""
JUDGED = 0.5
"""Highest load with a bound: nearer to capacity equal runs differ by up to a quarter."""
CAPACITY = BATCH_SIZE / (FIXED_MS + PER_ITEM_MS * BATCH_SIZE)
"""Nominal rate (calls/ms), for the choice of loads. Each process scales arrivals
to its measured rate.
"""


def title(come: str, load: float) -> str:
    """Return the title of a question."""
    return f"{load:.0%} {come}"


@cache
def moments(come: str, load: float, seconds: float) -> list[float]:
    """Return arrivals, in units of the time of an item in full batches."""
    calls = max(int(load * CAPACITY * 1e3 * seconds), 50)
    dice = Random(f"{come}, {load}, {SEED}")
    found = arrivals(load * CAPACITY, calls, dice, ARRIVALS[come])
    return [moment * 1e3 * CAPACITY for moment in found]


def questions(settings: dict[str, Any], arguments: argparse.Namespace) -> list[Question]:
    """Return all questions of one row."""
    loads, seconds = (QUICK_LOADS, QUICK_SECONDS) if arguments.quick else (LOADS, SECONDS)
    asked = []
    for come in ARRIVALS:
        for load in loads:
            moments_ = moments(come, load, seconds)
            asked.append(
                {
                    "question": "open loop",
                    "title": title(come, load),
                    "arrivals": moments_,
                    "warm_up": int(WARM_UP * len(moments_)),
                    "fixed_ms": FIXED_MS,
                    "per_item_ms": PER_ITEM_MS,
                    "batch_size": BATCH_SIZE,
                    "settings": settings,
                }
            )
    return asked


def figures(found: Found) -> list[Figure]:
    """Return mean and p99: ours relative to eager flushing, and peers relative to ours."""
    judged = {title(come, load) for come in ARRIVALS for load in LOADS if load <= JUDGED}
    made = []
    for (asked, row, name), runs in found.runs.items():
        other = EAGER if row == AUTO else AUTO
        bounded = row == AUTO and name == "mean" and asked in judged
        made.append(
            Figure(
                f"{asked}, {name}: {row}",
                runs,
                "ms",
                Figure(other, found.runs[asked, other, name], "ms"),
                at_most=MOST_OF_EAGER if bounded else None,
            )
        )
    return sorted(made, key=lambda figure: figure.name.partition(":")[0])


def measured(arguments: argparse.Namespace) -> Result:
    rounds = (3 if arguments.check else 1) if arguments.quick else 5
    found = contest(
        lambda _, settings: questions(settings, arguments),
        rounds,
        ours=(OURS_TWICE, QUEUE),
        peers=compared(arguments),
    )
    return Result(
        figures(found),
        versions=found.versions,
        missing=without(arguments) | found.missing,
        notes=[
            ROUNDS.format(rounds),
            *(f"{peer.name}: {peer.driven}." for peer in (OURS, QUEUE, *compared(arguments))),
        ],
    )


def main() -> None:
    arguments = options(__doc__ or "")
    conclude(lambda: measured(arguments), arguments)


if __name__ == "__main__":
    main()
