"""Requests, and batches of their slices: the scheduler fills them in, and runtimes read them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from .linger import FlushReason

Span = tuple[int, int]
"""Range of neighbouring items of a call: the first position, and the position after the last."""


class RemainingSpans:
    """Positions of the waiting items of a call, as few spans.

    The rank of an item is the number of items that wait before it.
    """

    __slots__ = ("spans",)

    def __init__(self, size: int) -> None:
        # in order of position, none empty, with a gap between any two
        self.spans: list[Span] = [(0, size)]

    def rank(self, position: int) -> int:
        """Return the number of items that wait before `position`."""
        return sum([min(stop, position) - start for start, stop in self.spans if start < position])

    def between(self, low: int, high: int) -> list[Span]:
        """Return spans of the items of rank `low` to `high` (exclusive), in order."""
        found: list[Span] = []
        rank = 0  # rank of the first item of the span
        for start, stop in self.spans:
            if low < rank + stop - start and rank < high:
                found.append((start + max(low - rank, 0), min(start + high - rank, stop)))
            rank += stop - start
        return found

    def cut(self, low: int, high: int) -> list[Span]:
        """Remove the items of rank `low` to `high` (exclusive), and return their spans in order."""
        gone = self.between(low, high)
        self.spans = [*self.between(0, low), *self.between(high, self.spans[-1][1])]
        return gone


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One call, all its items together, from its arrival to its answer."""

    items: Any  # a list if `listed`, else one item, or features
    size: int  # items
    group_key: Hashable  # equal for requests that may share a batch
    waker: Any = None  # wakes the caller at the end; None once no caller waits
    listed: bool = False  # a list call, answered with a list
    owner: object = None  # instance of a called method, kept alive until the answer
    # lengths of `items`, longest first; None where lengths do not matter
    lengths: list[int] | None = None
    order: list[int] | None = None  # place of each item in the call, if sorted by length
    # a list call whose items have outcomes of their own: a failed item does not end the call, and
    # items that leave do not hurry the rest
    separate: bool = False
    arrived: float = 0.0  # moment of arrival at the scheduler (s)
    number: int = 0  # rank among all requests that have entered the queue
    small: bool = False  # whether the call is small; known once it is queued
    queued: bool = False  # whether any of its items waits in the queue
    dispatched: int = 0  # items handed out in batches so far
    answered: int = 0  # items that have a result
    # results so far of a split request, each with the position of its first item
    parts: list[tuple[int, Any]] | None = None
    result: Any = None  # the answer, once it is complete
    error: BaseException | None = None  # the answer, if the call failed
    origin: Any = None  # span of the caller, if batches are traced
    pieces: Any = None  # stream of a call whose caller reads pieces of the result
    _remaining: RemainingSpans | None = None  # see `remaining`; None until it is needed

    @property
    def remaining(self) -> RemainingSpans:
        """Positions of the items that wait; only where lengths matter."""
        if self._remaining is None:
            self._remaining = RemainingSpans(self.size)
        return self._remaining

    @property
    def longest(self) -> int:
        """Length of the longest item that waits; 0 where lengths do not matter."""
        return self.lengths[self.remaining.spans[0][0]] if self.lengths else 0

    def waiting_lengths(self, low: int, high: int) -> list[int]:
        """Return lengths of the waiting items of rank `low` to `high` (exclusive), longest first.

        Called only where lengths matter.
        """
        assert self.lengths is not None
        found: list[int] = []
        for start, stop in self.remaining.between(low, high):
            found += self.lengths[start:stop]
        return found


Slice = tuple[Request, int, int]
"""A request, and a range of its items: the first position, and the position after the last.

A plain tuple, since each batch has at least one for each call.
"""


@dataclass(slots=True, eq=False, repr=False)
class Batch:
    """Slices of requests that are to run together."""

    # in the order of the function's items; where lengths matter, a request may have several
    slices: list[Slice]
    size: int  # items in all slices
    reason: FlushReason  # reason why it left
    started: float  # moment of forming, or if formed ahead, when a worker was free for it (s)
    longest: int = 0  # the length of the longest item; 0 where lengths do not matter
    # time since arrival, for each request that begins with this batch (s)
    waits: Sequence[float] = ()
    ended: float = 0.0  # moment at which the function had returned (s)
    # filled in by the execution:
    # for each attempt that ran out of memory, its items and the length of the longest item
    too_big: Sequence[tuple[int, int]] = ()
    fitted: bool = True  # whether one call of the function returned for the whole batch
    begun: bool = False  # whether the function has been, or is about to be, called
    attempts: int = 0  # calls of the function, for the batch or parts of it
    cells: int = 0  # places in the collated arrays, padding included
    early: int = 0  # items answered while it still runs
    padding: int = 0  # cells that are padding
