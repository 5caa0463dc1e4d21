"""Requests, and batches of their slices: the scheduler fills them in, and runtimes read them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from .linger import FlushReason


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
    # of a list call whose `items` are sorted by length, or without repetitions: the first place of
    # each of them in the call, and for each place the position of its item
    order: list[int] | None = None
    places: list[int] | None = None
    keys: list[Hashable] | None = None  # of `items`: a batch computes items of one key once
    # a list call whose items have outcomes of their own: a failed item does not end the call, and
    # items that leave do not hurry the rest
    separate: bool = False
    # gets the outcomes of items that have ended: the position of the first one, and a result or an
    # exception for each; only for `separate` items
    on_part: Callable[[int, list[Any]], object] | None = None
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
    _remaining: list[int] | None = None  # see `remaining`; None until it is needed

    @property
    def remaining(self) -> list[int]:
        """Positions of the items that wait, in order; only where lengths matter.

        The rank of a waiting item is its place here.
        """
        if self._remaining is None:
            self._remaining = list(range(self.size))
        return self._remaining

    @property
    def longest(self) -> int:
        """Length of the longest item that waits; 0 where lengths do not matter."""
        return self.waiting_lengths(0, 1)[0] if self.lengths else 0

    def waiting_lengths(self, low: int, high: int) -> list[int]:
        """Return lengths of the waiting items of rank `low` to `high` (exclusive), longest first.

        Called only where lengths matter.
        """
        assert self.lengths is not None
        if not self.dispatched:
            return self.lengths[low:high]
        return [self.lengths[at] for at in self.remaining[low:high]]

    def cut(self, low: int, high: int) -> list[Slice]:
        """Remove the items of rank `low` to `high` (exclusive) from `remaining`.

        Return slices of them; neighbours are one slice.
        """
        if high - low == self.size:  # no item will need `remaining`
            return [(self, 0, high)]
        slices: list[Slice] = []
        for at in self.remaining[low:high]:
            start = slices.pop()[1] if slices and slices[-1][2] == at else at
            slices.append((self, start, at + 1))
        del self.remaining[low:high]
        return slices


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
    started: float  # moment of forming (s)
    longest: int = 0  # the length of the longest item; 0 where lengths do not matter
    # time since arrival, for each request that begins with this batch (s)
    waits: Sequence[float] = ()
    ended: float = 0.0  # moment at which the function had returned (s)
    # filled in by the execution:
    # for each attempt that ran out of memory, its items and the length of the longest item
    too_big: Sequence[tuple[int, int]] = ()
    fitted: bool = True  # whether one call of the function returned for the whole batch
    computed: int = 0  # items in the last call of the function, fewer if some were equal
    attempts: int = 0  # calls of the function, for the batch or parts of it
    cells: int = 0  # places in the collated arrays, padding included
    padding: int = 0  # cells that are padding
