"""Group: the waiting requests that may share a batch."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Any

from .length_index import LengthIndex
from .linger import NEVER
from .request import Request

Order = deque[tuple[Any, ...]]
"""Sorted entries of groups. Entries with equal keys differ in the next part. Most enter at the end
and leave at the start.
"""
Place = tuple[Order, tuple[Any, ...]]
"""An order, and an entry of it."""


class Group:
    """Small and large requests that may share a batch, with their counts and lengths."""

    def __init__(self, key: Hashable) -> None:
        self.key = key  # the `group_key` of all its requests
        # requests with waiting items, first come, first served
        self.large: OrderedDict[Request, None] = OrderedDict()
        self.small: OrderedDict[Request, None] = OrderedDict()
        self.queues = self.large, self.small  # by `Request.small`
        self.waiting = 0  # items not yet handed out
        self.begun = 0  # requests with some items handed out, unless they are `separate`
        self.ready = False  # whether it may leave, until a batch takes from it
        self.places: tuple[Place, ...] = ()  # its entries in orders of groups
        # moment since which a worker was free when the group was first held; NEVER: not held (s)
        self.held_since = NEVER
        self._length_index: LengthIndex | None = None  # None until needed
        self._longest: int | None = 0  # see `longest`; None: unknown

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests: small before large, the oldest of each class first."""
        return chain(self.small, self.large)

    @property
    def oldest(self) -> float:
        """Moment at which the oldest request arrived (s)."""
        return min([next(iter(queue)).arrived for queue in self.queues if queue])

    @property
    def longest(self) -> int:
        """Length of the longest waiting item, computed once after each batch."""
        if self._longest is None:
            self._longest = max([request.longest for request in self])
        return self._longest

    def note_lengths(self, request: Request) -> None:
        """Note the lengths of a request that is being queued."""
        assert request.lengths is not None
        if self._longest is not None:
            self._longest = max(self._longest, request.lengths[0])
        if self._length_index is not None and request.small:
            self._length_index.add(request)

    def withdraw(self, request: Request) -> None:
        """Remove the waiting items of a request."""
        self.forget_longest()
        if self._length_index is not None and request.small:
            self._length_index.discard(request)
        self.waiting -= request.size - request.dispatched
        self.begun -= request.dispatched > 0 and not request.separate
        del self.queues[request.small][request]
        request.queued = False

    def length_index(self, batch_size: int) -> LengthIndex:
        """Return the index of the small requests next in line, by length."""
        if self._length_index is None:
            self._length_index = LengthIndex(self.small)
        self._length_index.fill(batch_size)
        return self._length_index

    def forget_longest(self) -> None:
        """Discard the longest length, because items leave."""
        self._longest = None
