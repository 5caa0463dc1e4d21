"""Which items of a call still wait, where they leave in another order than first to last."""

from __future__ import annotations

from collections.abc import Iterator

Span = tuple[int, int]
"""The positions of the first and after the last of some neighbouring items of a call."""


class Rest:
    """The positions of a call's items that wait, as few spans; what leaves is cut out by rank: how
    many wait before it.
    """

    __slots__ = ("spans",)

    def __init__(self, size: int) -> None:
        self.spans: list[Span] = [(0, size)]  # in order, none empty, with a gap between any two

    def rank(self, position: int) -> int:
        """How many wait before `position`."""
        rank = 0
        for start, stop in self.spans:
            if position < stop:
                return rank + max(0, position - start)
            rank += stop - start
        return rank

    def before(self, position: int) -> Iterator[int]:
        """The positions before `position`, nearest first."""
        for start, stop in reversed(self.spans):
            yield from range(min(stop, position) - 1, start - 1, -1)

    def cut(self, low: int, high: int) -> list[Span]:
        """Takes out those of rank `low` up to, not including, `high`, at least one, and returns
        them in order.
        """
        spans = self.spans
        at, left = 0, high - low
        while low >= (count := spans[at][1] - spans[at][0]):
            low -= count
            at += 1
        first = at
        kept: list[Span] = []
        gone: list[Span] = []
        while left:
            start, end = spans[at]
            begin = start + low
            stop = min(end, begin + left)
            gone.append((begin, stop))
            left -= stop - begin
            kept += [span for span in ((start, begin), (stop, end)) if span[0] < span[1]]
            low = 0
            at += 1
        spans[first:at] = kept
        return gone
