"""Advice on `batch_size` from measured times: pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..display import ms

NEAR_BEST = 1.1
"""Ratio to the best time of an item up to which a smaller batch is as good: its callers wait less.
"""


@dataclass(frozen=True)
class BatchTime:
    """Time of a batch of one size."""

    size: int
    """Items."""
    seconds: float
    """Median over several batches."""

    @property
    def per_item(self) -> float:
        """Seconds divided by items."""
        return self.seconds / self.size


@dataclass(frozen=True)
class Fit:
    """Line of the times: a batch of n items takes about `fixed + per_item * n` seconds."""

    fixed: float
    per_item: float
    off: float
    """Largest relative deviation from a measured time; 0.1 is 10 %."""

    def __str__(self) -> str:
        return (
            f"A batch of n takes about {ms(self.fixed)} ms + {ms(self.per_item)} ms * n, within "
            f"{max(self.off, 0.01):.0%} of every measured time."
        )


@dataclass(frozen=True)
class Advice:
    """Recommended `batch_size`, and why."""

    batch_size: int
    """1: batching gains nothing."""
    reason: str
    """One sentence."""


def fit(times: Sequence[BatchTime]) -> Fit:
    """Return the line through the times of at least two sizes, with neither part below zero.

    The line has the least sum of squared deviations, relative to each time.
    """
    seconds = np.array([time.seconds for time in times])
    relative = np.array([(1, time.size) for time in times]) / seconds[:, None]
    wanted = np.ones_like(seconds)
    parts = np.linalg.lstsq(relative, wanted, rcond=None)[0]
    if parts.min() < 0:  # the other part alone
        parts = np.linalg.lstsq(relative * (parts > 0), wanted, rcond=None)[0]
    off = np.abs(relative @ parts - wanted).max()
    return Fit(float(parts[0]), float(parts[1]), float(off))


def advise(times: Sequence[BatchTime]) -> Advice:
    """Return the smallest size at which an item takes little more time than at the best size.

    Sizes ascend from 1.
    """
    alone, largest = times[0], times[-1]
    best = min(times, key=lambda time: time.per_item)
    chosen = next(time for time in times if time.per_item <= NEAR_BEST * best.per_item)
    if chosen is alone:
        second = min(times[1:], key=lambda time: time.per_item)
        least = f"at best {ms(second.per_item)} ms in a batch, of {second.size}"
        return Advice(
            1,
            f"Batching gains nothing here: an item takes {ms(alone.seconds)} ms alone and {least}.",
        )
    reason = (
        f"In a batch of {chosen.size} an item takes {ms(chosen.per_item)} ms, alone "
        f"{ms(alone.seconds)} ms"
    )
    if largest.per_item > NEAR_BEST * best.per_item:
        again = f"{ms(largest.per_item)} ms in one of {largest.size}"
        more = f"in larger batches it takes longer again, {again}"
    elif chosen is largest:
        more = f"larger batches may be better still: try --max-batch-size {4 * largest.size}"
    else:
        more = f"larger batches gain less than {NEAR_BEST - 1:.0%} more"
    return Advice(chosen.size, f"{reason}; {more}.")
