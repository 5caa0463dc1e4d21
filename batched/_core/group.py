"""The requests that wait and may share a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from itertools import chain

from .request import Request
from .shelf import Shelf

Queue = deque[Request]
"""First come, first served. Its first one waits; of the others some may have left (their `queues`
is None), until `tidy` drops them.
"""


class Group:
    """Its two classes of requests, and what is known about them together."""

    __slots__ = ("_longest", "_shelf", "begun", "key", "large", "small", "waiting")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.small: Queue = deque()
        self.large: Queue = deque()
        self.waiting = 0  # items not yet handed out
        self.begun = 0  # requests of which a part was handed out
        self._shelf: Shelf | None = None  # see `shelf`; None until it is needed
        self._longest: int | None = 0  # see `longest`; None: to be looked up

    def __iter__(self) -> Iterator[Request]:
        """Those that wait: the small ones, then the large ones, the oldest first."""
        return (request for request in chain(self.small, self.large) if request.queues is not None)

    @property
    def oldest(self) -> float:
        """When the oldest of its requests arrived (s)."""
        small, large = self.small, self.large
        if not large:
            return small[0].arrived
        return min(small[0].arrived, large[0].arrived) if small else large[0].arrived

    @property
    def longest(self) -> int:
        """The length of the longest item that waits. Looks at all requests, once after each
        batch.
        """
        if self._longest is None:
            self._longest = max([request.longest for request in self])
        return self._longest

    def joined(self, request: Request, length: int, *, small: bool) -> None:
        """Notes that `request`, whose longest item is of that length, has come to wait here."""
        if self._longest is not None and length > self._longest:
            self._longest = length
        if self._shelf is not None and small:
            self._shelf.add(request)

    def parted(self, request: Request, *, small: bool) -> None:
        """Notes that what waits of `request` is about to leave without having been in a batch."""
        self._longest = None
        if self._shelf is not None and small:
            self._shelf.discard(request)

    def shrunk(self) -> None:
        """Notes that items have left with a batch."""
        self._longest = None

    def shelf(self, batch_size: int) -> Shelf:
        """Its small calls next in line, sorted."""
        if self._shelf is None:
            self._shelf = Shelf(
                [request for request in self.small if request.queues is not None], batch_size
            )
        self._shelf.fill()
        return self._shelf


def tidy(queue: Queue, waiting: int) -> None:
    """Drops requests that have left: those before the first that waits, and all once they are more
    than the items that wait.

    Dropping each at once would take a search; this takes a few steps for each.
    """
    if not waiting:
        queue.clear()
    while queue and queue[0].queues is None:
        queue.popleft()
    if len(queue) > 2 * waiting:
        # never out of the queue while they wait, for a signal may break in
        for _ in range(len(queue)):
            if queue[0].queues is None:
                queue.popleft()
            else:
                queue.rotate(-1)
