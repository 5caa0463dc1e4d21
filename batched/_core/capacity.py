"""How many items fit one batch, as far as settings say and memory errors have taught."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Final

from .cost import Cost

PATIENCE: Final = 128
"""Batches that must reach a ceiling before it is raised a little: at most one batch in so many runs
out of memory for it.
"""
LONGEST_PATIENCE: Final = 2**14
"""Where the patience with a ceiling that fails whenever it is raised stops doubling."""
STEP: Final = 8
"""A ceiling is raised by one part in this many, at least by one item."""


@dataclass(slots=True)
class Ceiling:
    """What memory allows from one length on, up to the length of the next ceiling."""

    items: int  # most in a batch
    patience: int = PATIENCE  # batches that must reach it before it is raised
    reached: int = 0  # batches that reached it since it was set or raised
    safe: int = 0  # what it was before it was raised; 0 if it was not raised since it was set


class Fits:
    """The batches known to have fitted, only those that no other one says more than: with fewer
    items the longer they are.
    """

    def __init__(self) -> None:
        self._lengths: list[int] = []  # ascending
        self._items: list[int] = []  # descending

    def most(self, longest: int) -> int:
        """The most items known to have fitted with one of that length or a longer one; 0 if none
        are.
        """
        at = bisect_left(self._lengths, longest)
        return self._items[at] if at < len(self._items) else 0

    def add(self, items: int, longest: int) -> None:
        """Adds a batch of more than `most(longest)` items."""
        low = high = bisect_right(self._lengths, longest)
        while low and self._items[low - 1] <= items:
            low -= 1
        self._lengths[low:high] = [longest]
        self._items[low:high] = [items]

    def forget(self, longest: int) -> None:
        """What was known of that length and longer ones."""
        at = bisect_left(self._lengths, longest)
        del self._lengths[at:], self._items[at:]


class Capacity:
    """The size of a full batch, which depends on the longest item in it.

    A batch holds at most `batch_size` items, and at most `max_batch_tokens` when all are padded to
    the longest. Below these lie ceilings that memory errors teach, by these rules:

    1. Memory grows with items and with length. A batch that ran out of memory sets a ceiling for
       its length and all longer ones: half its items, or more if more is known to have fitted
       there. Ceilings that this one makes useless are dropped. So no ceiling is below half of what
       fits, and short items do not pay for long ones.
    2. Memory may be freed by others. A ceiling that `PATIENCE` batches have reached is raised by an
       eighth, at most to the next one of shorter items; having been reached so often there, it is
       dropped. A raise that holds resets the patience.
    3. A raise that fails is taken back, and the patience doubles. If as many items have fitted at a
       shorter length, length is what matters, and it is taken back from the length on that failed;
       otherwise all of it is, and only what is shorter than what failed is raised the next time. So
       a function that never fits more than so many items runs out of memory once in 128 full
       batches at most, then in 256, 512 and so on.
    4. A failure of what was known to fit means that memory has become scarcer: what was known from
       that length on is forgotten.
    """

    def __init__(self, batch_size: int, max_batch_tokens: int | None = None) -> None:
        self.batch_size = batch_size  # items
        self._tokens = max_batch_tokens  # items times the longest of them; None: no such limit
        self._lengths: list[int] = []  # from which on each of the ceilings holds, ascending
        self._ceilings: list[Ceiling] = []  # never more items than the one before
        self._fits = Fits()
        self._latest = 0, 0  # items and length of the batch that ran last
        self.varies = max_batch_tokens is not None  # whether `most` can be less than `batch_size`
        self._cost = Cost()  # of batches by their cells

    @property
    def batch_in_cells(self) -> float:
        """So much padding takes as long as another batch; infinite as long as that is not known."""
        return self._cost.fixed_size

    def took(self, cells: int, seconds: float) -> None:
        """A batch of so many items times the longest of them took so long."""
        self._cost.add(cells, seconds)

    def most(self, longest: int) -> int:
        """The most items, none of them longer than `longest`, that fit one batch: at least 1, and
        never more for a longer one.
        """
        most = self.batch_size
        if self.varies:
            if self._tokens is not None:
                most = min(most, self._tokens // (longest or 1) or 1)
            at = bisect_right(self._lengths, longest)
            if at:
                most = min(most, self._ceilings[at - 1].items)
        return most

    def fitted(self, items: int, longest: int) -> None:
        """A batch of so many items, the longest of them of that length, ran."""
        if (items, longest) == self._latest and not self._ceilings:  # most are as the one before
            return
        self._latest = items, longest
        if items > self._fits.most(longest):
            self._fits.add(items, longest)
        if self._ceilings:
            at = bisect_right(self._lengths, longest) - 1
            if at >= 0 and items >= self._ceilings[at].items:
                self._reached(at)

    def too_big(self, items: int, longest: int) -> None:
        """A batch of so many items, the longest of them of that length, ran out of memory."""
        self._latest = 0, 0
        if items == 1:
            return  # there is nothing smaller to try
        if self._fits.most(longest) >= items:
            self._fits.forget(longest)
        known = self._fits.most(longest)
        at = bisect_right(self._lengths, longest) - 1
        ceiling = self._ceilings[at] if at >= 0 else Ceiling(self.batch_size)
        if not 0 < ceiling.safe < items <= ceiling.items:
            most = max((items + 1) // 2, known)
            if most < ceiling.items:
                self._set(longest, Ceiling(most))
            return
        back, patience, start = (
            max(ceiling.safe, known),
            min(2 * ceiling.patience, LONGEST_PATIENCE),
            self._lengths[at],
        )
        if self._fits.most(start) < items:
            self._set(start, Ceiling(back, patience))
        if start < longest:
            self._set(longest, Ceiling(back, patience))

    def _reached(self, at: int) -> None:
        """A batch has been as large as ceiling number `at` allows."""
        ceiling = self._ceilings[at]
        ceiling.reached += 1
        if ceiling.reached < ceiling.patience:
            return
        top = self._ceilings[at - 1].items if at else self.batch_size
        if ceiling.items < top:
            if ceiling.safe:
                ceiling.patience = PATIENCE
            ceiling.safe, ceiling.reached = ceiling.items, 0
            ceiling.items = min(top, ceiling.items + max(1, ceiling.items // STEP))
        else:
            del self._lengths[at], self._ceilings[at]
            self.varies = self._tokens is not None or bool(self._lengths)

    def _set(self, longest: int, ceiling: Ceiling) -> None:
        """Puts `ceiling` in force from the length `longest` on, in place of those that are no lower
        from there on.
        """
        low = high = bisect_left(self._lengths, longest)
        while high < len(self._lengths) and self._ceilings[high].items >= ceiling.items:
            high += 1
        self._lengths[low:high] = [longest]
        self._ceilings[low:high] = [ceiling]
        self.varies = True
