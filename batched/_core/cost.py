"""Time of a batch by its size: in items for the flush rule, in cells for padding."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Final

LAST: Final = 50
"""Batches that count in the means."""
ENOUGH: Final = 4
"""Batches of an octave before `fixed_size` trusts their mean."""
LEAST_FIXED: Final = 0.05
"""Least share of a batch's time that is taken to be independent of its size."""


class TimeBySize:
    """Time of a batch by its size: means over octaves of sizes, and lines from one octave to the
    next.

    Functions on GPUs take a constant time up to some size, and more from there on. No single line
    describes that.
    """

    __slots__ = ("_batches", "_octaves", "mean")

    def __init__(self) -> None:
        self._batches = 0  # at most LAST
        self.mean = 0.0  # time of a batch of any size (s)
        # by octave (bits of a size): batches, at most LAST, their mean size and mean time (s)
        self._octaves: dict[int, tuple[int, float, float]] = {}

    def add(self, n: int, s: float) -> None:
        """Add a batch of n items that took s seconds."""
        self._batches = min(self._batches + 1, LAST)
        self.mean += (s - self.mean) / self._batches
        octave = n.bit_length()
        batches, size, time = self._octaves.get(octave, (0, 0.0, 0.0))
        batches = min(batches + 1, LAST)
        size, time = size + (n - size) / batches, time + (s - time) / batches
        self._octaves[octave] = batches, size, time

    @property
    def fixed_size(self) -> float:
        """Size that adds as much time as a batch takes whatever its size; infinite if unknown.

        The line goes through the means of the smallest and of the largest octave.
        """
        known = [point for batches, *point in self._octaves.values() if batches >= ENOUGH]
        if len(known) < 2:
            return math.inf
        (low, time), (high, longer) = min(known), max(known)
        if longer <= time:
            return math.inf
        slope = (longer - time) / (high - low)
        return max(time - slope * low, LEAST_FIXED * self.mean) / slope

    def curve(self) -> Curve:
        """Return the times known so far."""
        return Curve([(size, time) for _, (_, size, time) in sorted(self._octaves.items())])


class Curve:
    """Times of batches by their sizes, as lines through points."""

    __slots__ = ("_points",)

    def __init__(self, points: list[tuple[float, float]]) -> None:
        self._points = points  # size, and time of a batch (s), the smallest size first

    def __bool__(self) -> bool:
        return bool(self._points)

    def time(self, n: float) -> float:
        """Return the time of a batch of n items (s). Beyond the points the last line continues if
        it rises, and never falls below 0.
        """
        points = self._points
        if len(points) == 1:
            return points[0][1]
        place = min(max(bisect_left(points, (n,)), 1), len(points) - 1)
        (low, time), (high, longer) = points[place - 1], points[place]
        slope = (longer - time) / (high - low)
        if n < low or n > high:
            slope = max(slope, 0.0)
            if n > high:
                low, time = high, longer
        return max(time + slope * (n - low), 0.0)
