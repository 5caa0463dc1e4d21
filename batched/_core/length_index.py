"""Length index: items of the small calls next in line, longest first.

Batches of similar lengths are cut from it as runs of neighbouring items.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from .capacity import Capacity
from .request import Request

LOOK_AHEAD: Final = 32
"""Size of the index: enough for similar lengths to meet, nearly as in a full sort (full batches).
"""
FEW: Final = 8
"""Divisor of the number of entries: if at most 1 / FEW of them is new, inserting the new entries
one by one is faster than sorting all (measured).
"""

Entry = tuple[int, int, int, Request]
"""Minus the length of an item, the number of its request, its position there, and the request.

Number and position together are unique, so requests are never compared.
"""


class LengthIndex:
    """Items of small calls in the order of their lengths.

    Calls beyond the look-ahead wait in order of arrival.
    """

    __slots__ = ("_beyond", "_entries", "_limit")

    def __init__(self, calls: Iterable[Request], batch_size: int) -> None:
        self._entries: list[Entry] = []  # longest first, then oldest first
        self._limit = LOOK_AHEAD * batch_size  # number of entries from which no call is added
        self._beyond = OrderedDict[Request, None].fromkeys(calls)  # calls without entries so far

    def add(self, request: Request) -> None:
        """Add a small call, without entries so far."""
        self._beyond[request] = None

    def fill(self) -> None:
        """Add the entries of as many calls as the look-ahead holds."""
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
        """Return the length of the item at place `at`."""
        return -self._entries[at][0]

    def lengths(self, low: int, high: int) -> list[int]:
        """Return lengths of the items from `low` to `high` (exclusive), or to the last item."""
        return [-entry[0] for entry in self._entries[low:high]]

    def count_of(self, request: Request, low: int, high: int) -> int:
        """Return the number of items of `request` from `low` to `high` (exclusive)."""
        return sum([entry[3] is request for entry in self._entries[low:high]])

    def find_place(self, request: Request, position: int) -> int:
        """Return the place of the waiting item at `position` of `request`."""
        assert request.lengths is not None
        return bisect_left(self._entries, (-request.lengths[position], request.number, position))

    def not_longer(self, length: int) -> int:
        """Return the place of the first item that is not longer than `length`."""
        return bisect_left(self._entries, (-length,))

    def find_run(self, at: int, capacity: Capacity) -> int:
        """Return the place where the run with the item at `at` begins.

        Each run is as large as its first item allows.
        """
        entries, low, high = self._entries, 0, 0
        while high <= at:
            low, high = high, high + capacity.most(-entries[high][0])
        if high >= len(entries):  # the last run
            while low and len(entries) - low < capacity.most(-entries[low - 1][0]):
                low -= 1
        return low

    def take(self, low: int, high: int) -> list[Entry]:
        """Remove the items from `low` to `high` (exclusive), and return them."""
        taken = self._entries[low:high]
        del self._entries[low:high]
        return taken

    def take_of(self, request: Request, first: int, last: int) -> None:
        """Remove the items of `request` from position `first` to `last` (inclusive)."""
        low, high = self.find_place(request, first), self.find_place(request, last) + 1
        self._entries[low:high] = [
            entry for entry in self._entries[low:high] if entry[3] is not request
        ]

    def discard(self, request: Request) -> None:
        """Remove all items of a call."""
        if request in self._beyond:
            del self._beyond[request]
        else:
            spans = request.remaining.spans
            self.take_of(request, spans[0][0], spans[-1][1] - 1)
