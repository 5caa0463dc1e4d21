"""Capacity: the number of items that fit one batch, by settings and by past memory errors."""

from __future__ import annotations

import math
from typing import Final

from .cost import TimeBySize

PATIENCE: Final = 512
"""Full batches before a raise. So at most one full batch in 512 fails because of a raise."""
STEP: Final = 8
"""Divisor of a raise: the ceiling is raised by 1 / STEP, at least by one item."""
LARGE: Final = 65_536
"""Cells from which padding is limited however cheap it is: it takes memory."""
MOST_PADDING: Final = 8
"""Most padding of a `LARGE` batch, as a multiple of the lengths of its items."""


class Capacity:
    """Size of a full batch, which depends on the longest item in it.

    A cell is one unit of length of one item, padding included: n items, the longest of length w,
    are n * w cells; an item without length is one cell. A batch holds at most `batch_size` items
    and `max_batch_tokens` cells. Memory errors set a ceiling in cells, below these limits:

    1. A failure sets the ceiling to half of the failed size or, if greater, to the largest size
       that is known to fit.
    2. Another process may free memory. Once `PATIENCE` batches have reached the ceiling, it is
       raised by an eighth. A raise that fails is undone by rule 1. So a function that never fits
       more runs out of memory once in `PATIENCE` full batches at most.
    3. A failure of a size that was known to fit means that memory has become scarcer. The known
       size is then forgotten.
    """

    def __init__(self, batch_size: int, max_batch_tokens: int | None = None) -> None:
        self.batch_size = batch_size  # items
        self.cost = TimeBySize()  # time of a batch by its cells
        self._budget = math.inf if max_batch_tokens is None else max_batch_tokens  # limit (cells)
        self._ceiling = math.inf  # most cells that memory allows
        self._reached = 0  # batches that reached the ceiling since it was set or raised
        self.known = 0  # largest size that is known to fit (cells)
        self.varies = (
            max_batch_tokens is not None
        )  # whether `max_items` can be less than `batch_size`

    def max_items(self, longest: int) -> int:
        """Return the most items, none longer than `longest`, that fit one batch: at least 1."""
        if not self.varies:
            return self.batch_size
        cells = min(self._budget, self._ceiling)
        return int(max(1, min(self.batch_size, cells / (longest or 1))))

    def may_pad(self, padding: float, cells: int) -> bool:
        """Return whether items with lengths of `cells` in sum may get so much padding (cells).

        The padding takes at most as long as the fixed part of a batch. While this time is unknown,
        at most half of the batch is padding.
        """
        limit = self.cost.fixed_size
        if limit is None:
            return padding <= cells
        return padding <= limit and (padding <= MOST_PADDING * cells or padding + cells <= LARGE)

    def fitted(self, items: int, longest: int) -> None:
        """Record a batch that ran: its items, and the length of the longest item."""
        width = longest or 1
        size = items * width
        self.known = max(self.known, size)
        if size + width > self._ceiling:
            self._reached += 1
            if self._reached >= PATIENCE:
                self._ceiling += max(width, self._ceiling // STEP)
                self._reached = 0

    def too_big(self, items: int, longest: int) -> None:
        """Record a batch that ran out of memory: its items, and the length of the longest item."""
        if items == 1:
            return  # no smaller batch can be tried
        width = longest or 1
        if items * width <= self.known:
            self.known = 0
        ceiling = max((items + 1) // 2 * width, self.known)
        if ceiling < self._ceiling:
            self._ceiling, self._reached = ceiling, 0
        self.varies = True


class Room:
    """Room that live rows leave in a capacity, for at most `most` further rows."""

    def __init__(self, whole: Capacity, live: int, longest: int, most: int) -> None:
        self._whole, self._live, self._longest = whole, live, longest
        self._most = live + most

    def admits(self, length: int) -> bool:
        """Return whether one more row of this length fits. If so, count it among the live rows."""
        longest = max(length, self._longest)
        if self._live >= min(self._most, self._whole.max_items(longest)):
            return False
        self._live, self._longest = self._live + 1, longest
        return True
