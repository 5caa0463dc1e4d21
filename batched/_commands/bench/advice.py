"""Advice on settings from measured times and rates: pure functions of numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..display import count, format_ratio, ms
from ..load import Calls

NEAR_BEST = 1.1
"""Ratio up to which another time, or rate, is as good as the best. Smaller batches are preferred,
because their callers wait less, and fewer settings.
"""
STEADY = 1.25
"""Ratio of the highest to the lowest speed-up of all rounds above which their median says little.
"""
AT_ONCE = "max_concurrent_batches"
LINEAR = 0.2
"""Largest relative deviation of a line from a measured time that makes it a description."""


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
        if self.off > LINEAR:
            return (
                "The measured times are not linear in the size of the batch: the nearest line "
                f"differs from one of them by {self.off:.0%}."
            )
        return (
            f"A batch of n takes about {ms(self.fixed)} ms + {ms(self.per_item)} ms * n, within "
            f"{max(self.off, 0.01):.0%} of every measured time."
        )


@dataclass
class Way:
    """One way to call the function: callers with one call at a time, and settings."""

    callers: int
    settings: Mapping[str, Any] | None = None
    """Settings of the decorator. None: callers call the function itself, unbatched."""
    rounds: list[Calls] = field(default_factory=list)
    """Calls of each round; all ways take turns in a round."""
    error: str = ""
    """Error of the function if it does not bear to run several times at once."""

    def __str__(self) -> str:
        return "unbatched" if self.settings is None else f"with {', '.join(sources(self.settings))}"

    @property
    def at_once(self) -> bool:
        """True if the function may run several times at once."""
        at_once = self.callers if self.settings is None else self.settings[AT_ONCE]
        return bool(at_once > 1)

    @property
    def median(self) -> Calls:
        """Round with the median rate."""
        return sorted(self.rounds, key=lambda calls: calls.rate)[len(self.rounds) // 2]

    def ratios(self, other: Way) -> list[float]:
        """Return the rate of each round, divided by that of `other`, in ascending order."""
        return sorted(a.rate / b.rate for a, b in zip(self.rounds, other.rounds, strict=True))


def sources(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as keyword arguments, in Python."""
    return [f"{name}={getattr(value, '__name__', value)}" for name, value in settings.items()]


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


def choose_size(times: Sequence[BatchTime]) -> tuple[int, str]:
    """Return the smallest size above 1 that is nearly the best, and a sentence on larger ones.

    Sizes ascend from 1.
    """
    _, *sizes = times
    best = min(time.per_item for time in sizes)
    size = next(time.size for time in sizes if time.per_item <= NEAR_BEST * best)
    if size == sizes[-1].size:
        return size, f"Batches larger than {size} may gain more: try --max-batch-size {4 * size}."
    return size, f"Batches larger than {size} gain less than {NEAR_BEST - 1:.0%} more."


def choose_way(ways: Sequence[Way]) -> Way:
    """Return the first way that no later way surpasses by `NEAR_BEST`, and in every round."""
    chosen, *others = ways
    for way in others:
        least, *_ = ratios = way.ratios(chosen)
        if least > 1 and statistics.median(ratios) >= NEAR_BEST:
            chosen = way
    return chosen


def summarize(ways: Sequence[Way], chosen: Way) -> str:
    """Return sentences that compare the chosen way with the first one, which is unbatched.

    A way that was faster, but not in every round, is named, too.
    """
    unbatched, *batched = ways
    fastest = max(batched, key=lambda way: way.median.rate)
    doubt = statistics.median(fastest.ratios(chosen)) > NEAR_BEST
    if chosen is unbatched:
        verdict = "Batching may not be worth it" if doubt else "Batching is not worth it"
        return f"{verdict}: {compare(fastest, unbatched)}"
    gain = compare(chosen, unbatched)
    return f"{gain}\nOther settings may be faster: {compare(fastest, chosen)}" if doubt else gain


def compare(way: Way, other: Way) -> str:
    """Return a sentence with the ratio of two rates, or with its range if the rounds differ."""
    low, *_, high = ratios = way.ratios(other)
    spread, rounds = f"{format_ratio(low)} to {format_ratio(high)}", f"in {len(ratios)} rounds"
    figure, noise = format_ratio(statistics.median(ratios)), f" ({spread} {rounds})"
    if high > STEADY * low:
        figure, noise = spread, f" {rounds}: this machine is unstable"
    return f"{count(way.callers, 'caller')} made {figure} as many items {way} as {other}{noise}."
