"""Capacity: the number of items that fit one batch, by settings and by past memory errors."""

from __future__ import annotations

import math
from typing import Final

from .cost import TimeBySize

PATIENCE: Final = 512
"""Full batches before a raise. So at most one full batch in 512 fails because of a raise."""
STEP: Final = 8
"""Divisor of a raise: a ceiling is raised by 1 / STEP, at least by one item."""


class Ceiling:
    """Most items, or cells, that memory allows in one batch, learned from failures."""

    __slots__ = ("_failed", "_held", "_reached", "fitted", "most")

    def __init__(self) -> None:
        self.most = math.inf
        self.fitted = 0  # largest size that is known to fit
        self._failed = 0  # largest size that failed
        self._held = 0.0  # value of `most` before its raise; 0 if it was not raised
        self._reached = 0  # batches that reached `most` since it was set or raised

    def note_fitted(self, size: int, step: int) -> None:
        """Record a batch of size `size` that fitted. One more item would have added `step`."""
        if size > self.fitted:
            self.fitted = size
        if size + step <= self.most:
            return  # it did not reach the ceiling
        self._reached += 1
        if self._reached >= PATIENCE:
            self._held, self._reached = self.most, 0
            self.most += max(step, self.most // STEP)
            if self.most >= self._failed:  # every size that ever failed is allowed again
                self.most, self._held, self._failed = math.inf, 0.0, 0

    def note_failed(self, size: int, half: int) -> None:
        """Record a batch of size `size` that failed. Its larger half has size `half`."""
        if size <= self.fitted:
            self.fitted = 0
        most: float = max(half, self.fitted)
        if 0 < self._held < size <= self.most:  # the raise was wrong: undo it
            most = self._held
        self._failed = max(self._failed, size)
        if most < self.most:
            self.most, self._held, self._reached = most, 0.0, 0


class Capacity:
    """Size of a full batch, which depends on the longest item in it.

    A cell is one unit of length of one item, padding included: n items, the longest of length w,
    are n * w cells; an item without length is one cell. A batch holds at most `batch_size` items
    and `max_batch_tokens` cells. Memory errors set a ceiling in items and one in cells, below these
    limits:

    1. A failure counts against items if as many cells have fitted with fewer items, else against
       cells. The ceiling is set to half of the failed size or, if greater, to the largest size that
       is known to fit.
    2. Another process may free memory. Once `PATIENCE` batches have reached a ceiling, it is raised
       by an eighth. Once the ceiling allows every size that ever failed, it is removed.
    3. A raise that fails is undone. So a function that never fits more runs out of memory once in
       `PATIENCE` full batches at most.
    4. A failure of a size that was known to fit means that memory has become scarcer. The known
       size is then forgotten.
    """

    def __init__(self, batch_size: int, max_batch_tokens: int | None = None) -> None:
        self.batch_size = batch_size  # items
        self.cost = TimeBySize()  # time of a batch by its cells
        self._budget = math.inf if max_batch_tokens is None else max_batch_tokens  # limit (cells)
        self.items, self._cells = Ceiling(), Ceiling()  # ceilings in items and in cells
        self.varies = max_batch_tokens is not None  # whether `most` can be less than `batch_size`

    def most(self, longest: int) -> int:
        """Return the most items, none longer than `longest`, that fit one batch: at least 1."""
        if not self.varies:
            return self.batch_size
        cells = min(self._budget, self._cells.most)
        return int(max(1, min(self.batch_size, self.items.most, cells / (longest or 1))))

    def fitted(self, items: int, longest: int) -> None:
        """Record a batch that ran: its items, and the length of the longest item."""
        width = longest or 1
        if self.varies or items > self.items.fitted or items * width > self._cells.fitted:
            self.items.note_fitted(items, 1)
            self._cells.note_fitted(items * width, width)
            self.varies = min(self._budget, self.items.most, self._cells.most) < math.inf

    def too_big(self, items: int, longest: int) -> None:
        """Record a batch that ran out of memory: its items, and the length of the longest item."""
        if items == 1:
            return  # no smaller batch can be tried
        width, half = longest or 1, (items + 1) // 2
        if self.items.fitted < items and items * width <= self._cells.fitted:
            self.items.note_failed(items, half)
        else:
            self._cells.note_failed(items * width, half * width)
        self.varies = True
