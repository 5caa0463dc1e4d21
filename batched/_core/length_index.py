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

    def __init__(self, calls: Iterable[Request]) -> None:
        self.entries: list[Entry] = []  # longest first, then oldest first
        self._beyond = OrderedDict[Request, None].fromkeys(calls)  # calls without entries so far

    def add(self, request: Request) -> None:
        """Add a small call, without entries so far."""
        self._beyond[request] = None

    def fill(self, batch_size: int) -> None:
        """Add the entries of as many calls as the look-ahead holds."""
        while self._beyond and len(self.entries) < LOOK_AHEAD * batch_size:
            request, _ = self._beyond.popitem(last=False)
            assert request.lengths is not None
            for position, length in enumerate(request.lengths):
                self.entries.append((-length, request.number, position, request))
        self.entries.sort()

    def lengths(self, low: int, high: int) -> list[int]:
        """Return lengths of the items from `low` to `high` (exclusive), or to the last item."""
        return [-entry[0] for entry in self.entries[low:high]]

    def remove(self, request: Request, first: int, last: int) -> None:
        """Remove the items of `request` from position `first` to `last` (inclusive)."""
        assert request.lengths is not None
        low, high = [
            bisect_left(self.entries, (-request.lengths[at], request.number, at))
            for at in (first, last)
        ]
        self.entries[low : high + 1] = [
            entry for entry in self.entries[low : high + 1] if entry[3] is not request
        ]

    def discard(self, request: Request) -> None:
        """Remove all items of a call."""
        if request in self._beyond:
            del self._beyond[request]
        else:
            self.remove(request, request.remaining[0], request.remaining[-1])
