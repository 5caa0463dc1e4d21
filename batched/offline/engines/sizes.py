"""Batch sizes that a run finds by itself."""

from __future__ import annotations

import math
from typing import Final

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
        self._times: list[float] = []  # of full batches of this size (s)
        self._before = math.inf  # cost of a row in batches of half the size (s)
        self._final = False

    def note(self, size: int, seconds: float) -> None:
        """Note that a batch of `size` took `seconds`."""
        if size == self.size and not self._final:
            self._times.append(seconds)
            if len(self._times) == ENOUGH:
                cost, self._times = min(self._times) / size, []
                self._final = cost > WORTHWHILE * self._before or size == self._most
                if not self._final:
                    self.size = min(2 * size, self._most)
                elif cost > self._before:
                    self.size = max(size // 2, self._least)
                self._before = cost
