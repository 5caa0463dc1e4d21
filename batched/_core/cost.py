"""Cost of a batch by its size n: `TimeBySize`, in items, for the flush rule; and in cells a line
through the latest batches, s = a + b * n seconds.

s   time of a batch (s); here its mean
n   size of a batch (items, or cells); here its mean
a   part of s that does not depend on n (s)
b   part of s that each unit of n adds (s)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Final

LAST: Final = 50
"""Batches that count in the means."""
MAX_INFORMATION: Final = 10
"""Cap on the accumulated squared spread of sizes, in squares of the mean size, so that a function
that becomes another one is learned anew.
"""
ENOUGH: Final = 8
"""Batches before the line may be trusted."""
EXPLAINED: Final = 2
"""The line is trusted once the squared spread of times about their mean is so many times that about
the line.
"""
LEAST_FIXED: Final = 0.05
"""Part of a batch's time that is taken not to depend on its size, at least."""


class Cost:
    """Recursive least squares over the sizes and times of batches, the latest counting most."""

    __slots__ = ("_b", "_batches", "_error", "_fixed_size", "_information", "_n", "_s", "_spread")

    def __init__(self) -> None:
        self._batches = 0  # so far, but at most LAST
        self._n = self._s = self._b = 0.0
        self._information = 0.0  # accumulated squares of what sizes differed by
        self._spread = self._error = 0.0  # mean squares of times about the mean, about the line
        self._fixed_size = math.inf

    def add(self, n: int, s: float) -> None:
        """Counts a batch.

        Batches of one size say nothing about b, and so make nothing forgotten of it either.
        """
        self._batches = min(self._batches + 1, LAST)
        if self._batches == 1:
            self._n, self._s = float(n), s
            return
        dn, ds = n - self._n, s - self._s
        if dn:
            known = min(self._information, MAX_INFORMATION * self._n**2)
            self._information = known + dn**2
            self._b += dn * (ds - self._b * dn) / self._information
        self._spread += (ds**2 - self._spread) / self._batches
        self._error += ((ds - self._b * dn) ** 2 - self._error) / self._batches
        self._n += dn / self._batches
        self._s += ds / self._batches
        if self._batches >= ENOUGH and self._error * EXPLAINED <= self._spread:
            s, a, b = self.estimate()
            self._fixed_size = max(a, s * LEAST_FIXED) / b if b else math.inf
        else:
            self._fixed_size = math.inf

    @property
    def fixed_size(self) -> float:
        """Size that takes as long as a; infinite while sizes do not explain the times well."""
        return self._fixed_size

    def estimate(self) -> tuple[float, float, float]:
        """s, a and b; all 0 before the first batch."""
        a = min(max(self._s - self._b * self._n, 0.0), self._s)
        return self._s, a, (self._s - a) / self._n if self._n else 0.0


class TimeBySize:
    """Time of a batch by its size: means over octaves of sizes, and lines from one to the next.

    Functions on GPUs take a constant time up to some size and grow from there on, which no one line
    describes.
    """

    __slots__ = ("_batches", "_octaves", "mean")

    def __init__(self) -> None:
        self._batches = 0  # so far, but at most LAST
        self.mean = 0.0  # time of a batch of any size (s)
        # by the bits of a size: batches so far, but at most LAST, their mean size and time (s)
        self._octaves: dict[int, tuple[int, float, float]] = {}

    def add(self, n: int, s: float) -> None:
        """Counts a batch of n items that took s seconds."""
        self._batches = min(self._batches + 1, LAST)
        self.mean += (s - self.mean) / self._batches
        octave = n.bit_length()
        batches, size, time = self._octaves.get(octave, (0, 0.0, 0.0))
        batches = min(batches + 1, LAST)
        size, time = size + (n - size) / batches, time + (s - time) / batches
        self._octaves[octave] = batches, size, time

    def curve(self) -> Curve:
        """What is known now."""
        return Curve([(size, time) for _, (_, size, time) in sorted(self._octaves.items())])


class Curve:
    """Times of batches by their sizes, as lines through points."""

    __slots__ = ("_points",)

    def __init__(self, points: list[tuple[float, float]]) -> None:
        self._points = points  # size, and time of a batch (s), the smallest size first

    def __bool__(self) -> bool:
        return bool(self._points)

    def time(self, n: float) -> float:
        """Time of a batch of n items (s). Beyond the points the last line goes on, if it rises, and
        never below 0.
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
