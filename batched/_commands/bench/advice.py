"""Advice on `batch_size` from measured times: pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NEAR_BEST = 1.1
"""Ratio to the best time of an item up to which a smaller batch is as good: its callers wait for
less.
"""

ROUGH = 0.25
"""Relative deviation beyond which a fit is said to be rough."""


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

    def at(self, size: float) -> float:
        """Seconds for a batch of that size."""
        return self.fixed + self.per_item * size

    def __str__(self) -> str:
        formula = f"A batch of n takes about {ms(self.fixed)} ms + {ms(self.per_item)} ms * n"
        return (
            f"{formula}{', but only roughly: it is' if self.off > ROUGH else ','} within "
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
    """Line through the times of at least two sizes, neither part below zero, that deviates least:
    in squares, relative to each time.
    """
    sizes, seconds = (
        np.array(values, float)
        for values in zip(*[(time.size, time.seconds) for time in times], strict=True)
    )
    per_item, fixed = (float(part) for part in np.polyfit(sizes, seconds, 1, w=1 / seconds))
    if fixed < 0:
        ratios = sizes / seconds
        fixed, per_item = 0.0, float(ratios.sum() / (ratios**2).sum())
    elif per_item < 0:
        ratios = 1 / seconds
        fixed, per_item = float(ratios.sum() / (ratios**2).sum()), 0.0
    return Fit(fixed, per_item, float(np.abs((fixed + per_item * sizes) / seconds - 1).max()))


def advise(times: Sequence[BatchTime]) -> Advice:
    """Smallest measured size at which an item takes about as little as at the best one; sizes
    ascend from 1.
    """
    alone, largest = times[0], times[-1]
    best = min(times, key=lambda time: time.per_item)
    chosen = next(time for time in times if time.per_item <= NEAR_BEST * best.per_item)
    if chosen is alone:
        least = (
            f"at best {ms(best.per_item)} ms in a batch, of {best.size}"
            if best is not alone
            else "no less in any batch"
        )
        return Advice(
            1,
            f"Batching gains nothing here: an item takes {ms(alone.seconds)} ms alone and {least}.",
        )
    in_batch, by_itself = ms(chosen.per_item), ms(alone.seconds)
    reason = f"In a batch of {chosen.size} an item takes {in_batch} ms, alone {by_itself} ms"
    if largest.per_item > NEAR_BEST * best.per_item:
        again = f"{ms(largest.per_item)} ms in one of {largest.size}"
        more = f"in larger batches it takes longer again, {again}"
    elif chosen is largest:
        more = f"larger batches may be better still: try --max-batch-size {4 * largest.size}"
    else:
        more = f"larger batches gain less than {NEAR_BEST - 1:.0%} more"
    return Advice(chosen.size, f"{reason}; {more}.")


def ms(seconds: float) -> str:
    """Milliseconds in three digits, down to a nanosecond."""
    value = float(f"{seconds * 1e3:.3g}")
    decimals = 2 - math.floor(math.log10(value)) if value else 0
    return f"{value:,.{min(max(decimals, 0), 6)}f}"


def format_ratio(ratio: float) -> str:
    """Multiple such as 3.2x, in at least two digits."""
    return f"{ratio:.1f}x" if ratio >= 0.95 else f"{ratio:.2g}x"
