"""Length index: the small calls next in line, item by item and longest first, from which runs of
like lengths are cut.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from .capacity import Capacity
from .request import Request

LOOK_AHEAD: Final = 32
"""Full batches that the index holds: enough for like lengths to meet (a backlog of so many is as
good as sorted).
"""
FEW: Final = 8
"""Putting new items in their places one by one beats sorting anew if at most one part in this many
is new (measured).
"""

Entry = tuple[int, int, int, Request]
"""Minus the length of an item, the number of its request, its position there, and the request.

The number and the position are unique together, so that requests are never compared.
"""


class LengthIndex:
    """Items of small calls in the order of their lengths; calls beyond the look-ahead wait in order
    of arrival.
    """

    __slots__ = ("_beyond", "_entries", "_limit")

    def __init__(self, calls: Iterable[Request], batch_size: int) -> None:
        self._entries: list[Entry] = []  # longest first, then oldest first
        self._limit = LOOK_AHEAD * batch_size  # entries from which on no call is added
        self._beyond = OrderedDict[Request, None].fromkeys(calls)  # not among the entries yet

    def add(self, request: Request) -> None:
        """Queues a small call."""
        self._beyond[request] = None

    def fill(self) -> None:
        """Makes entries of as many calls as the look-ahead holds."""
        new: list[Entry] = []
        room = self._limit - len(self._entries)
        while self._beyond and len(new) < room:
            request, _ = self._beyond.popitem(last=False)
            assert request.lengths is not None
            for position, length in enumerate(request.lengths):
                new.append((-length, request.number, position, request))
        if FEW * len(new) > len(self._entries):
            self._entries += new
            self._entries.sort()
        else:
            for entry in new:
                insort(self._entries, entry)

    def length(self, at: int) -> int:
        """Length of the item at `at`."""
        return -self._entries[at][0]

    def lengths(self, low: int, high: int) -> list[int]:
        """Lengths of the items from `low` to `high` (exclusive), as far as there are so many."""
        return [-entry[0] for entry in self._entries[low:high]]

    def count_of(self, request: Request, low: int, high: int) -> int:
        """Number of items of `request` from `low` to `high` (exclusive)."""
        return sum([entry[3] is request for entry in self._entries[low:high]])

    def find_place(self, request: Request, position: int) -> int:
        """Place of the waiting item at `position` of `request`."""
        assert request.lengths is not None
        return bisect_left(self._entries, (-request.lengths[position], request.number, position))

    def not_longer(self, length: int) -> int:
        """Place of the first item that is not longer than `length`."""
        return bisect_left(self._entries, (-length,))

    def find_run(self, at: int, capacity: Capacity) -> int:
        """Place where the run begins that holds the item at `at`, as large as its first item
        allows.
        """
        entries, low, high = self._entries, 0, 0
        while high <= at:
            low, high = high, high + capacity.most(-entries[high][0])
        if high >= len(entries):  # the last one
            while low and len(entries) - low < capacity.most(-entries[low - 1][0]):
                low -= 1
        return low

    def take(self, low: int, high: int) -> list[Entry]:
        """Takes out the items from `low` to `high` (exclusive)."""
        taken = self._entries[low:high]
        del self._entries[low:high]
        return taken

    def take_of(self, request: Request, first: int, last: int) -> None:
        """Takes out the items of `request` from position `first` to `last` (inclusive)."""
        low, high = self.find_place(request, first), self.find_place(request, last) + 1
        self._entries[low:high] = [
            entry for entry in self._entries[low:high] if entry[3] is not request
        ]

    def discard(self, request: Request) -> None:
        """Takes out all items of a call."""
        if request in self._beyond:
            del self._beyond[request]
        else:
            spans = request.remaining.spans
            self.take_of(request, spans[0][0], spans[-1][1] - 1)
