"""What a batch takes, by its size."""

from __future__ import annotations

import math
from typing import Final

LAST: Final = 50
"""Batches that count in what is known of their cost."""
KNOWN: Final = 10
"""Times the square of the mean size: what is remembered of how sizes differed, from which the slope
is known.
"""


ENOUGH: Final = 8
"""Batches from which on their cost may be trusted."""
EXPLAINED: Final = 2
"""Times the mean square error, for sizes to explain the spread of times."""
LEAST_FIXED: Final = 0.05
"""The part of a batch's time that does not depend on its size is taken to be at least this much."""


class Cost:
    """What a batch takes, by its size: a straight line through those so far, the latest counting
    most.
    """

    __slots__ = ("_batches", "_known", "_missed", "_new", "_size", "_slope", "_spread", "_time")

    def __init__(self) -> None:
        self._batches = 0  # so far, but at most LAST
        self._size = self._time = 0.0  # means of sizes and times (s)
        self._slope = 0.0  # time per item (s)
        self._known = 0.0  # how well: the sum of squares of what sizes differed by
        # mean squares of what times differed by, and of what the line was wrong by (s2)
        self._spread = self._missed = 0.0
        self._new: list[tuple[int, float]] = []  # not counted yet

    def add(self, size: int, seconds: float) -> None:
        self._new.append((size, seconds))
        if len(self._new) == LAST:
            self._digest()

    def _digest(self) -> None:
        """Recursive least squares: batches of one size say nothing about the slope, and so make
        nothing forgotten either.
        """
        for size, seconds in self._new:
            self._batches = min(self._batches + 1, LAST)
            if self._batches > 1:
                more, longer = size - self._size, seconds - self._time
                if more:
                    self._known = min(self._known, KNOWN * self._size * self._size) + more * more
                    self._slope += more * (longer - self._slope * more) / self._known
                self._spread += (longer * longer - self._spread) / self._batches
                self._missed += ((longer - self._slope * more) ** 2 - self._missed) / self._batches
                self._size += more / self._batches
                self._time += longer / self._batches
            else:
                self._size, self._time = float(size), seconds
        self._new.clear()

    def estimate(self) -> tuple[float, float, float]:
        """The mean time of a batch, the part of it that does not depend on its size, and what an
        item adds (s).
        """
        self._digest()
        fixed = min(max(self._time - self._slope * self._size, 0.0), self._time)
        return self._time, fixed, (self._time - fixed) / self._size if self._size else 0.0

    @property
    def fixed_size(self) -> float:
        """The size that takes as long as the fixed part of a batch; infinite as long as sizes do
        not explain the time well.
        """
        seconds, fixed, each = self.estimate()
        if self._batches < ENOUGH or self._missed * EXPLAINED > self._spread or not each:
            return math.inf
        return max(fixed, seconds * LEAST_FIXED) / each
