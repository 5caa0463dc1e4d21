"""Requests, and batches of slices of them: the scheduler fills them in, and runtimes read them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, starmap
from typing import TYPE_CHECKING, Any

from .exceptions import SharedError
from .linger import FlushReason
from .remaining_spans import RemainingSpans

if TYPE_CHECKING:
    from .group import Group


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One call, all its items together, from its arrival to its answer."""

    items: Any  # as the collator knows them: a list if `listed`, else one item, or features
    size: int  # items
    group_key: Hashable  # equal for requests that may share a batch
    waker: Any = None  # tells the caller of the answer; None once nobody waits for it any more
    listed: bool = False  # a list call, answered with a list
    owner: object = None  # the instance whose method was called, alive until the answer
    # of the items, longest first, as the function will see them; None where they do not matter
    lengths: list[int] | None = None
    order: list[int] | None = None  # where each item stood in the call, if sorted by length
    arrived: float = 0.0  # when the scheduler got it (s)
    number: int = field(init=False)  # in the order of all requests that came to the queue
    small: bool = field(init=False)  # one of the calls that go first; known once it is queued
    queued_in: Group | None = None  # where it waits; None before and after
    dispatched: int = 0  # items handed out in batches so far
    answered: int = 0  # items that have a result
    # results so far, if it was split, each with the position of its first item
    parts: list[tuple[int, Any]] | None = None
    result: Any = field(init=False)  # the answer, once all of it is there
    error: BaseException | None = None  # the answer, if the call failed
    _remaining: RemainingSpans | None = None  # see `remaining`; None until it is needed

    @property
    def pending(self) -> int:
        """Items without a result so far."""
        return self.size - self.answered

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

    def waiting_lengths(self, count: int) -> list[int]:
        """Return lengths of the longest `count` items that wait; only where lengths matter."""
        assert self.lengths is not None
        start, stop = self.remaining.spans[0]
        if start + count <= stop:
            return self.lengths[start : start + count]
        positions = chain.from_iterable(starmap(range, self.remaining.spans))
        return [self.lengths[position] for position in islice(positions, count)]

    def outcome(self) -> Any:
        """The result, or raises the error; to be called once, by the caller who was woken."""
        error, self.error = self.error, None
        if error is None:
            return self.result
        try:
            raise error if type(error) is not SharedError else error.restored()
        finally:
            del error  # its traceback holds this frame


Slice = tuple[Request, int, int]
"""A request, and the positions of the first and after the last of the items meant.

A plain tuple, for there is one per call in each batch.
"""


@dataclass(slots=True, eq=False, repr=False)
class Batch:
    """Slices of requests that are to run together."""

    # in the order the function sees them; where lengths matter, a request may have several
    slices: list[Slice]
    size: int  # items in all slices
    reason: FlushReason  # why it left
    started: float  # when it was formed or, if that was ahead, a worker was free for it (s)
    longest: int = 0  # the length of the longest item; 0 where lengths do not matter
    # of the requests that begin with it, since their arrival (s)
    waits: Sequence[float] = ()
    ended: float = field(init=False)  # when its function had returned (s)
    # filled in by the execution:
    # items, and the length of the longest of them, of each attempt that ran out of memory
    too_big: Sequence[tuple[int, int]] = ()
    fitted: bool = True  # one call of the function returned for all of it
    begun: bool = False  # the function has been, or is about to be, called for it
    attempts: int = 0  # calls of the function, of any part of it
    cells: int = 0  # places in the collated arrays, padding included
    padding: int = 0  # those of them that are padding
