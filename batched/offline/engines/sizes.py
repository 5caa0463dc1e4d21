"""Batch sizes that a run finds by itself."""

from __future__ import annotations

import math
from typing import Final

from ..._core.cost import TimeBySize
from ..step import Auto

ENOUGH: Final = 3
"""Full batches of one size that are measured to know the cost of a row."""
WORTHWHILE: Final = 0.95
"""Ratio of a row's cost after doubling the batch to the cost before; above it, growth stops."""


class AutoSize:
    """Batch size that doubles for as long as the cost of a row falls."""

    def __init__(self, limits: Auto) -> None:
        self.size = self._least = limits.least  # items of a full batch
        self._most = limits.most
        self._times = TimeBySize()
        self._full = 0  # full batches of this size so far; -1: the size is final
        self._before = math.inf  # cost of a row in batches of half the size (s)

    def next(self, size: int, seconds: float) -> int:
        """Return the size of a full batch, after a batch of `size` took `seconds`."""
        if size != self.size or self._full < 0:
            return self.size
        self._times.add(size, seconds)
        self._full += 1
        if self._full < ENOUGH:
            return self.size
        cost = self._times.time(size) / size
        if cost > WORTHWHILE * self._before or size == self._most:
            self._full = -1  # the size is final
            if cost > self._before:
                self.size = max(size // 2, self._least)
        else:
            self._before, self._full = cost, 0
            self.size = min(2 * size, self._most)
        return self.size
