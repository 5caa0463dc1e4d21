"""The requests that wait and may share a batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import chain

from .request import Request
from .shelf import Shelf

Queue = OrderedDict[Request, None]  # first come, first served, and any request leaves in constant time


class Group:
    """Its two classes of requests, and what is known about them together."""

    __slots__ = ("_longest", "_shelf", "begun", "key", "large", "small", "waiting")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.small: Queue = OrderedDict()
        self.large: Queue = OrderedDict()
        self.waiting = 0  # items not yet handed out
        self.begun = 0  # requests of which a part was handed out
        self._shelf: Shelf | None = None  # see `shelf`; None until it is needed
        self._longest: int | None = 0  # see `longest`; None: to be looked up

    @property
    def oldest(self) -> float:
        """When the oldest of its requests arrived (s)."""
        return min(next(iter(queue)).arrived for queue in (self.small, self.large) if queue)

    @property
    def longest(self) -> int:
        """The length of the longest item that waits. Looks at all requests, once after each batch."""
        if self._longest is None:
            self._longest = max(request.longest for request in chain(self.small, self.large))
        return self._longest

    def joined(self, request: Request, length: int) -> None:
        """Notes that `request`, whose longest item is of that length, has come to wait here."""
        if self._longest is not None and length > self._longest:
            self._longest = length
        if self._shelf is not None and request in self.small:
            self._shelf.add(request)

    def parted(self, request: Request) -> None:
        """Notes that what waits of `request` is about to leave without having been in a batch."""
        self._longest = None
        if self._shelf is not None and request in self.small:
            self._shelf.discard(request)

    def shrunk(self) -> None:
        """Notes that items have left with a batch."""
        self._longest = None

    def shelf(self, batch_size: int) -> Shelf:
        """Its small calls next in line, sorted."""
        if self._shelf is None:
            self._shelf = Shelf(self.small, batch_size)
        self._shelf.fill()
        return self._shelf
