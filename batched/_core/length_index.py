"""Length index: items of the small calls next in line, longest first.

Items of the most similar lengths are neighbours in the index.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from .request import Request

LOOK_AHEAD: Final = 32
"""Size of the index, in full batches: enough for similar lengths to meet, nearly as in a full sort.
"""

Entry = tuple[int, int, int, Request]
"""Minus the length of an item, the number of its request, its position there, and the request.

Number and position together are unique, so requests are never compared.
"""


class LengthIndex:
    """Items of small calls in the order of their lengths.

    Calls beyond the look-ahead wait in order of arrival.
    """

    def __init__(self, calls: Iterable[Request], batch_size: int) -> None:
        self._entries: list[Entry] = []  # longest first, then oldest first
        self._limit = LOOK_AHEAD * batch_size  # number of entries from which no call is added
        self._beyond = OrderedDict[Request, None].fromkeys(calls)  # calls without entries so far

    def add(self, request: Request) -> None:
        """Add a small call, without entries so far."""
        self._beyond[request] = None

    def fill(self) -> None:
        """Add the entries of as many calls as the look-ahead holds."""
        while self._beyond and len(self._entries) < self._limit:
            request, _ = self._beyond.popitem(last=False)
            assert request.lengths is not None
            for position, length in enumerate(request.lengths):
                self._entries.append((-length, request.number, position, request))
        self._entries.sort()

    def lengths(self, low: int, high: int) -> list[int]:
        """Return lengths of the items from `low` to `high` (exclusive), or to the last item."""
        return [-entry[0] for entry in self._entries[low:high]]

    def not_longer(self, length: int) -> int:
        """Return the place of the first item that is not longer than `length`."""
        return bisect_left(self._entries, (-length,))

    def take(self, low: int, high: int) -> list[Entry]:
        """Remove the items from `low` to `high` (exclusive), and return them."""
        taken = self._entries[low:high]
        del self._entries[low:high]
        return taken

    def remove(self, request: Request, first: int, last: int) -> None:
        """Remove the items of `request` from position `first` to `last` (inclusive)."""
        assert request.lengths is not None
        low, high = [
            bisect_left(self._entries, (-request.lengths[at], request.number, at))
            for at in (first, last)
        ]
        self._entries[low : high + 1] = [
            entry for entry in self._entries[low : high + 1] if entry[3] is not request
        ]

    def discard(self, request: Request) -> None:
        """Remove all items of a call."""
        if request in self._beyond:
            del self._beyond[request]
        else:
            spans = request.remaining.spans
            self.remove(request, spans[0][0], spans[-1][1] - 1)
