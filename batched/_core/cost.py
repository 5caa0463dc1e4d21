"""Cost of a batch by its size n. The flush rule uses `TimeBySize`, in items. `Cost` is a line
through the latest batches, in cells: s = a + b * n seconds.

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
"""Upper limit of the accumulated squared spread of sizes, in squares of the mean size. It lets a
function that changes be learned again.
"""
ENOUGH: Final = 8
"""Batches before the line is trusted."""
EXPLAINED: Final = 2
"""The line is trusted if the squared spread of times about their mean is at least this multiple of
the squared spread about the line.
"""
LEAST_FIXED: Final = 0.05
"""Least share of a batch's time that is taken to be independent of its size."""


class Cost:
    """Recursive least squares over sizes and times of batches. The latest batches count most."""

    __slots__ = ("_b", "_batches", "_error", "_fixed_size", "_information", "_n", "_s", "_spread")

    def __init__(self) -> None:
        self._batches = 0  # at most LAST
        self._n = self._s = self._b = 0.0
        self._information = 0.0  # accumulated squared differences of sizes
        self._spread = 0.0  # mean squared distance of times from their mean
        self._error = 0.0  # mean squared distance of times from the line
        self._fixed_size = math.inf

    def add(self, n: int, s: float) -> None:
        """Add a batch.

        Batches of one size carry no information about b, and erase none.
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
        """Return s, a and b; all are 0 before the first batch."""
        a = min(max(self._s - self._b * self._n, 0.0), self._s)
        return self._s, a, (self._s - a) / self._n if self._n else 0.0


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
