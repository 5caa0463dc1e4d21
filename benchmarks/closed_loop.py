"""How close to full batches do callers come that call again as soon as they are answered?

Run: python benchmarks/closed_loop.py [--check] [--quick] [--save]

The function sleeps for 5 ms and 0.1 ms for each item (a coroutine function: to the next full
millisecond). `batch_size` is 32, and all other settings have their defaults. The baseline of
throughput is batches of all callers (or of 32), one right after another, in the same process, right
before and after. Our bounds are a share of the throughput of bare hand-off in the same process and
round.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from contest import ROUNDS, Found, Question, contest
from peers import BARE, OURS, QUEUE, Peer, compared, without
from pictures import Panel
from report import Figure, Result, conclude, options

CALLERS = (1, 2, 8, 24, 64)
OF_PEERS = (1, 8, 24)
"""Numbers of callers for peers in a quick run, to keep it short."""
BATCH_SIZE = 32
LONG, SHORT = (5.0, 0.1), (1.0, 0.02)
"""Functions: milliseconds of a batch, and of each item."""
WARM_UP = 20
"""Calls of each caller that do not count, so that rules can learn."""

SHORT_CALLERS = 24
"""Threads that call the short function."""
LEAST_SHARE, LEAST_OF_SHORT = 0.85, 0.6
"""Least share of bare hand-off, for callers that fit into one batch: for the long function and for
the short function.
"""


def title(kind: str, callers: int, function: tuple[float, float] = LONG) -> str:
    """Return the title of a question."""
    return f"{callers} {kind}, {function[0]:g} ms"


def questions(
    peer: Peer, settings: dict[str, Any], arguments: argparse.Namespace
) -> list[Question]:
    """Return all questions of one row."""
    kinds = [
        kind for kind, able in (("threads", peer.threads), ("coroutines", peer.coroutines)) if able
    ]
    numbers = OF_PEERS if arguments.quick and peer.requirement else CALLERS
    asked = [(kind, callers, LONG) for kind in kinds for callers in numbers]
    if peer.threads:
        asked.append(("threads", SHORT_CALLERS, SHORT))
    return [
        {
            "question": f"closed loop, {kind}",
            "title": title(kind, callers, function),
            "callers": callers,
            "calls": 20 if arguments.quick else 100,
            "warm_up": WARM_UP,
            "fixed_ms": function[0],
            "per_item_ms": function[1],
            "batch_size": BATCH_SIZE,
            "settings": settings | ({"callers": callers} if peer is BARE else {}),
        }
        for kind, callers, function in asked
    ]


def figures(found: Found) -> list[Figure]:
    """Return our figures relative to bare hand-off, with bounds, then all figures relative to full
    batches.
    """
    asked = list(dict.fromkeys(asked for asked, _, _ in found.runs))
    made = []
    for one in asked:
        bare = Figure(BARE.name, found.runs[one, BARE.name, "rate"], "calls/s")
        judged = int(one.split()[0]) <= BATCH_SIZE
        least = LEAST_OF_SHORT if one.endswith(" 1 ms") else LEAST_SHARE
        made.append(
            Figure(
                f"{one}: {OURS.name} vs {BARE.name}",
                found.runs[one, OURS.name, "rate"],
                "calls/s",
                bare,
                at_least=least if judged else None,
            )
        )
    for one in asked:
        for row in dict.fromkeys(row for other, row, _ in found.runs if other == one):
            rates, shares = found.runs[one, row, "rate"], found.runs[one, row, "share"]
            full = [rate / share for rate, share in zip(rates, shares, strict=True)]
            made.append(
                Figure(f"{one}: {row}", rates, "calls/s", Figure("full batches", full, "calls/s"))
            )
    return made


def panels(found: Found) -> list[Panel]:
    """Return the shares by number of callers, for threads and for coroutines."""
    made = []
    for kind in ("threads", "coroutines"):
        rows = dict.fromkeys(row for asked, row, _ in found.runs if f" {kind}," in asked)
        series = {
            row: [
                statistics.median(
                    found.runs.get((title(kind, callers), row, "share"), [float("nan")])
                )
                for callers in CALLERS
            ]
            for row in rows
        }
        made.append(
            Panel(
                f"{kind}: share of full batches (more is better)",
                series,
                [str(callers) for callers in CALLERS],
                "callers",
            )
        )
    return made


def measured(arguments: argparse.Namespace) -> Result:
    rounds = 3 if arguments.quick else 5
    of_peers = 1 if arguments.quick else rounds
    found = contest(
        lambda peer, settings: questions(peer, settings, arguments),
        rounds,
        ours=(OURS, BARE, QUEUE),
        peers=compared(arguments),
        rounds_of_peers=of_peers,
    )
    return Result(
        figures(found),
        versions=found.versions,
        missing=without(arguments, threads=True) | found.missing,
        notes=[
            ROUNDS.format(rounds if of_peers == rounds else f"{rounds} (those of peers: 1)"),
            *(f"{peer.name}: {peer.driven}." for peer in (OURS, BARE, QUEUE, *compared(arguments))),
        ],
        panels=panels(found),
    )


def main() -> None:
    arguments = options(__doc__ or "")
    conclude(lambda: measured(arguments), arguments)


if __name__ == "__main__":
    main()
