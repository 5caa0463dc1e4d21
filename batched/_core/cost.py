"""Time of a batch by its size: in items for the flush rule, in cells for padding."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Final

LAST: Final = 50
"""Batches that count in the means."""
ENOUGH: Final = 4
"""Batches of an octave before its mean is trusted, and between updates of the fixed size."""
WARM_UP: Final = 5.0
"""The first batch is forgotten if it took longer than this multiple of the second: it may have
loaded and compiled.
"""
LEAST_FIXED: Final = 0.05
"""Least share of a batch's time that is assumed to be independent of its size."""


class TimeBySize:
    """Time of a batch by its size: means over octaves of sizes, and lines between octaves.

    On a GPU, a function takes a constant time up to some size, and more time beyond it. No single
    line describes this shape.
    """

    def __init__(self) -> None:
        self._batches = 0
        # size that takes as long as the fixed part of a batch; infinite if larger batches take no
        # longer; None: unknown
        self.fixed_size: float | None = None
        self.mean = 0.0  # time of a batch of any size (s)
        # by octave (bits of a size): batches, at most LAST, their mean size and mean time (s)
        self._octaves: dict[int, tuple[int, float, float]] = {}
        # mean size and mean time of each octave (s), the smallest first; None: outdated
        self._points: list[tuple[float, float]] | None = None

    def add(self, n: int, s: float) -> None:
        """Add a batch of n items that took s seconds."""
        if self._batches == 1 and self.mean > WARM_UP * s:
            self._batches = 0
            self._octaves.clear()
        self._batches += 1
        self.mean += (s - self.mean) / min(self._batches, LAST)
        octave = n.bit_length()
        batches, size, time = self._octaves.get(octave, (0, 0.0, 0.0))
        batches = min(batches + 1, LAST)
        size, time = size + (n - size) / batches, time + (s - time) / batches
        self._octaves[octave] = batches, size, time
        self._points = None
        if not self._batches % ENOUGH:
            self._find_fixed_size()

    def _find_fixed_size(self) -> None:
        """Compute the fixed size from the line through the smallest and the largest octave."""
        known = [octave[1:] for octave in self._octaves.values() if octave[0] >= ENOUGH]
        if len(known) < 2:
            return
        (low, time), (high, longer) = min(known), max(known)
        self.fixed_size = math.inf
        if longer > time:
            slope = (longer - time) / (high - low)
            self.fixed_size = max(time - slope * low, LEAST_FIXED * self.mean) / slope

    def time(self, n: float) -> float:
        """Return the time of a batch of n items (s); 0 before the first batch.

        Between the means of two octaves, the time lies on the line through both. Beyond all means,
        the nearest line continues if it rises. The time is never below 0.
        """
        if self._points is None:
            self._points = sorted([(size, time) for _, size, time in self._octaves.values()])
        points = self._points
        if len(points) < 2:
            return self.mean
        place = min(max(bisect_left(points, (n,)), 1), len(points) - 1)
        (low, time), (high, longer) = points[place - 1], points[place]
        slope = (longer - time) / (high - low)
        if n < low or n > high:
            slope = max(slope, 0.0)
            if n > high:
                low, time = high, longer
        return max(time + slope * (n - low), 0.0)
