"""How close to full batches do callers come that call again as soon as they are answered?

Run: python benchmarks/closed_loop.py [--check] [--quick] [--save]

The function sleeps, 5 ms and 0.1 ms for each item (a coroutine function: to the next full
millisecond), `batch_size` is 32, and the rest is left at its defaults. Throughput is a share of
what batches of all callers (or of 32), one right after another, come to in the same process, right
before and after.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from contest import ROUNDS, Found, Question, contest
from peers import BARE_LOCKS, OURS, PEERS, Peer, compared, without
from pictures import Panel
from report import Figure, conclude, options

CALLERS = (1, 2, 8, 24, 64)
OF_PEERS = (1, 8, 24)
"""How many callers peers get in a quick run, to keep it short."""
BATCH_SIZE = 32
LONG, SHORT = (5.0, 0.1), (1.0, 0.02)
"""Functions: milliseconds of a batch, and of each item."""
WARM_UP = 20
"""Calls of each caller that do not count: rules that learn have learned then."""

BOUNDS = {
    ("threads", 1): 0.97,
    ("threads", 2): 0.95,
    ("threads", 8): 0.95,
    ("threads", 24): 0.92,
} | {
    ("coroutines", callers): bound
    for callers, bound in {1: 0.97, 2: 0.95, 8: 0.95, 24: 0.95}.items()
}
"""Least shares of ours."""
SHORT_CALLERS, SHORT_BOUND = 24, 0.78
"""Threads that call the short function, and the least share then: threads need much of a
millisecond to come back.
"""


def title(kind: str, callers: int, function: tuple[float, float] = LONG) -> str:
    """Of a question."""
    return f"{callers} {kind}, {function[0]:g} ms"


def questions(
    peer: Peer, settings: dict[str, Any], arguments: argparse.Namespace
) -> list[Question]:
    """All that one row is asked."""
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
            "settings": settings | ({"callers": callers} if peer is BARE_LOCKS else {}),
        }
        for kind, callers, function in asked
    ]


def figures(found: Found) -> list[Figure]:
    """Shares, ours with bounds, then calls per second."""
    ordered = sorted(
        found.runs,
        key=lambda key: (
            key[2] != "share",
            "coroutines" in key[0],
            " 1 ms" in key[0],
            int(key[0].split()[0]),
        ),
    )
    bounds = {title(*key): bound for key, bound in BOUNDS.items()} | {
        title("threads", SHORT_CALLERS, SHORT): SHORT_BOUND
    }
    return [
        Figure(
            f"{asked}: {row}",
            found.runs[asked, row, name],
            "of best" if name == "share" else "calls/s",
            at_least=bounds.get(asked) if (row, name) == (OURS.name, "share") else None,
        )
        for asked, row, name in ordered
    ]


def panels(found: Found) -> list[Panel]:
    """Share by number of callers, for threads and for coroutines."""
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


def main() -> None:
    arguments = options(__doc__ or "")
    rounds = 3 if arguments.quick else 5
    found = contest(
        lambda peer, settings: questions(peer, settings, arguments),
        rounds,
        ours=(OURS, BARE_LOCKS),
        peers=compared(quick=arguments.quick),
        rounds_of_peers=1 if arguments.quick else rounds,
    )
    counted = f"{rounds} (those of peers: 1)" if arguments.quick else rounds
    conclude(
        figures(found),
        arguments,
        versions=found.versions,
        missing=without(quick=arguments.quick, threads=True) | found.missing,
        notes=[
            ROUNDS.format(counted),
            *(f"{peer.name}: {peer.driven}." for peer in (OURS, BARE_LOCKS, *PEERS)),
        ],
        panels=panels(found),
    )


if __name__ == "__main__":
    main()
