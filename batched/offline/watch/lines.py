"""Lines of a run on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from shutil import get_terminal_size
from typing import Final

from ..report import ENDS, Pace, Snapshot, State

PERIOD: Final = 10.0
"""Time between two lines of a log (s)."""


class Lines:
    """View of a run as lines on stderr.

    A log gets one every 10 s, for the first dead letter, and at the end. A terminal or a notebook
    has a last line that is written again and again.
    """

    def __init__(self, output: str, *, rewrites: bool) -> None:
        self._output = output
        self._rewrites = rewrites
        self._due = PERIOD  # seconds since the run began
        self._has_failed = False

    def __call__(self, state: State, snapshot: Snapshot, paces: Sequence[Pace]) -> None:
        """Write a line, if it is time for one."""
        is_first = bool(snapshot.examples) and not self._has_failed
        stays = is_first or state in ENDS
        if not (stays or self._rewrites or snapshot.seconds >= self._due):
            return
        self._has_failed |= is_first
        self._due = snapshot.seconds + PERIOD
        parts = [f"{pace.step.name} {describe(pace, snapshot)}" for pace in paces]
        if is_first:
            letter = next(iter(snapshot.examples.values()))
            parts.append(
                f"the first failure, in {letter['phase']}: {letter['error'].splitlines()[0]}"
            )
        text, end = f"{self._output} {state}: {'; '.join(parts)}", "\n"
        if self._rewrites:
            end = end * stays
            width = get_terminal_size().columns - 1
            text = "\r\x1b[K" + (text if stays else text[:width])  # to the left, and clear
        print(text, end=end, file=sys.stderr, flush=True)


def describe(pace: Pace, snapshot: Snapshot) -> str:
    """Return the counts, rate and time left of one step."""
    of = ""
    if snapshot.total is not None:
        of = f"/{'about ' * snapshot.total_is_estimate}{snapshot.total:,}"
    parts = [f"{pace.done:,}{of} rows"]
    if pace.rate is not None:
        parts.append(f"{pace.rate:,.1f} rows/s")
    if pace.step.failed:
        parts.append(f"{pace.step.failed:,} failed")
    if pace.left:
        parts.append(f"{timedelta(seconds=round(pace.left))} left")
    return "  ".join(parts)
