"""Episodes of all kinds, mixed at random."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from soak.books import Report
from soak.circles import circles
from soak.disasters import interrupts, owners_go
from soak.episodes import ordinary, seeded
from soak.faults import (
    BATCH_KINDS,
    BLOCKING,
    CALLBACK,
    CIRCLE,
    FULL,
    HOOK,
    ITSELF,
    LATE,
    LENGTH,
    RETURNED,
)
from soak.loops import loops_end
from soak.processes import exits, forks

Episode = Callable[[random.Random, str, int], Report]

EPISODES: dict[Episode, int] = {
    ordinary: 60,
    loops_end: 14,
    owners_go: 5,
    interrupts: 5,
    forks: 6,
    exits: 7,
    circles: 5,
}
"""Weight of each kind of episode in the random choice."""

KINDS = [
    *BATCH_KINDS,
    RETURNED,
    LENGTH,
    CALLBACK,
    ITSELF,
    CIRCLE,
    BLOCKING,
    HOOK,
    FULL,
    LATE,
    "source of map raised",
    "timeout of a caller",
    "cancelled tasks",
    "shutdown",
    "shutdown and wait",
    "shutdown and cancel",
    "shutdown and wait and cancel",
    "opened again",
    "loop left with calls pending",
    "loop closed with calls pending",
    "loop stopped with calls pending",
    "trio loop left with calls pending",
    "owner collected",
    "interrupt",
    "fork",
    "interpreter exit",
]
"""Every kind of fault."""

CALLS = 1500
"""Calls of an ordinary episode, about."""

MOST_HANGS = 3
"""Episodes with hangs after which a soak ends, because the hanging threads stay."""


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the log and the warnings of injected faults."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*multi-threaded.*fork", category=DeprecationWarning
        )
        # coroutines of closed loops
        warnings.filterwarnings(
            "ignore", message="coroutine .* was never awaited", category=RuntimeWarning
        )
        try:
            yield
        finally:
            logging.disable(disabled)


def run_episodes(
    seed: int, indices: Iterator[int], *, calls: int = CALLS, write: Callable[[str], object] = print
) -> Report:
    """Run the episodes with these numbers. Return their report."""
    total, hangs = Report(), 0
    with quiet():
        for index in indices:
            rng = seeded(seed, index)
            (episode,) = rng.choices(list(EPISODES), list(EPISODES.values()))
            report = episode(rng, f"soak{index}", calls)
            if report.verdicts:
                write(
                    f"episode {index} ({episode.__name__}) of seed {seed}: {dict(report.verdicts)}"
                )
                for detail in report.details:
                    write(f"  {detail}")
            total.add(report)
            hangs += report.verdicts["hung"] > 0
            if hangs == MOST_HANGS:
                write("too many hangs to go on")
                break
    return total
