"""Cost of a batch by its size n: s = a + b * n seconds, a line through the latest batches.

s   time of a batch (s); here its mean
n   size of a batch (items, or cells); here its mean
a   part of s that does not depend on n (s)
b   part of s that each unit of n adds (s)
"""

from __future__ import annotations

import math
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

    __slots__ = ("_b", "_batches", "_error", "_information", "_n", "_s", "_spread")

    def __init__(self) -> None:
        self._batches = 0  # so far, but at most LAST
        self._n = self._s = self._b = 0.0
        self._information = 0.0  # accumulated squares of what sizes differed by
        self._spread = self._error = 0.0  # mean squares of times about the mean, about the line

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

    def estimate(self) -> tuple[float, float, float]:
        """s, a and b; all 0 before the first batch."""
        a = min(max(self._s - self._b * self._n, 0.0), self._s)
        return self._s, a, (self._s - a) / self._n if self._n else 0.0

    @property
    def fixed_size(self) -> float:
        """Size that takes as long as a; infinite while sizes do not explain the times well."""
        s, a, b = self.estimate()
        if self._batches < ENOUGH or self._error * EXPLAINED > self._spread or not b:
            return math.inf
        return max(a, s * LEAST_FIXED) / b
