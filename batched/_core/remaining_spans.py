"""Waiting items of one call, where items do not leave in the order of the call."""

from __future__ import annotations

from collections.abc import Iterator

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

    def before(self, position: int) -> Iterator[int]:
        """Yield the waiting positions before `position`, nearest first."""
        for start, stop in reversed(self.spans):
            yield from range(min(stop, position) - 1, start - 1, -1)

    def cut(self, low: int, high: int) -> list[Span]:
        """Remove the items of rank `low` to `high` (exclusive), and return their spans in order."""
        start, stop = self.spans[0]
        if not low and start + high < stop:  # most often: the first items of the first span
            self.spans[0] = start + high, stop
            return [(start, start + high)]
        kept: list[Span] = []
        gone: list[Span] = []
        rank = 0  # rank of the first item of the span
        for start, stop in self.spans:
            begin = min(max(start + low - rank, start), stop)
            end = min(max(start + high - rank, start), stop)
            gone += [(begin, end)] if begin < end else []
            kept += [each for each in ((start, begin), (end, stop)) if each[0] < each[1]]
            rank += stop - start
        self.spans = kept
        return gone
