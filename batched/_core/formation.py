"""Batch formation: choice of the items of a batch, once its leader is known.

Padding is limited by its cost. Where callers call again as soon as they are answered and lengths
are mixed, one batch of all items that fit often takes twice as long as two batches of similar
lengths.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import chain
from operator import neg

from .capacity import Capacity
from .group import Group
from .length_index import LengthIndex
from .request import Request, Slice


def form_batch(leader: Request, group: Group, capacity: Capacity) -> tuple[list[Slice], int, int]:
    """Return the slices of a batch, their number of items, and the length of the longest item.

    `leader` is a request of `group`; the length is 0 for items without lengths.

    Without lengths the batch takes the leader, then the small calls of the group, then the large
    calls, each class first come, first served.
    """
    if leader.lengths is not None:
        return _form_by_length(leader, group, capacity)
    room = capacity.max_items(0) if capacity.varies else capacity.batch_size
    start = leader.dispatched
    stop = min(leader.size, start + room)
    slices = [(leader, start, stop)]
    left = room - (stop - start)
    if left:
        for request in chain(group.small, group.large):
            if request is leader:
                continue
            start, stop = request.dispatched, request.size
            if stop - start >= left:
                slices.append((request, start, start + left))
                return slices, room, 0
            slices.append((request, start, stop))
            left -= stop - start
    return slices, room - left, 0


def _form_by_length(
    leader: Request, group: Group, capacity: Capacity
) -> tuple[list[Slice], int, int]:
    """Return the slices, size and longest length of a batch of items with lengths."""
    size = group.waiting
    if size <= capacity.batch_size:  # `longest` iterates over all requests of the group
        longest = group.longest
        # longest * (size - 1) is an upper bound of the padding
        if size <= capacity.max_items(longest) and longest * (size - 1) <= capacity.cost.fixed_size:
            group.forget_longest()
            return take_all(leader, group), size, longest
    group.forget_longest()
    builder = pack_by_length(leader, group, capacity)
    return builder.slices, builder.size, builder.longest


def take_all(leader: Request, group: Group) -> list[Slice]:
    """Return slices of all waiting items: the leader, then small calls, then large calls."""
    others = [request for request in group if request is not leader]
    return [
        (request, start, stop)
        for request in (leader, *others)
        for start, stop in request.remaining.spans
    ]


def pack_by_length(leader: Request, group: Group, capacity: Capacity) -> BatchBuilder:
    """Return the builder of a batch of items of similar lengths.

    A cell is one unit of length of one item, padding included (`Capacity`).

    1. The leader takes its longest items, as many as fit with the first of them.
    2. Room that the leader does not need goes to the small calls next in line, then to the other
       large calls, the oldest first. Of each, the item that needs the least padding joins next.
    3. The padding has at most as many cells as take the fixed time of one more batch, once that
       time is known (`TimeBySize.fixed_size`).
    """
    builder = BatchBuilder(leader, capacity)
    index = group.length_index(capacity.batch_size)
    builder.add_leader(leader, index)
    builder.add_small(index)
    for request in group.large:
        if not builder.room:
            break
        if request is not leader:
            builder.add_large(request)
    return builder


class BatchBuilder:
    """Batch under construction: items are still added."""

    def __init__(self, leader: Request, capacity: Capacity) -> None:
        self.slices: list[Slice] = []
        self.size = 0  # items in the slices
        self.longest = leader.longest  # length of the longest item in the slices
        self._capacity = capacity
        self._padding_left = capacity.cost.fixed_size  # padding that further items may add (cells)

    @property
    def room(self) -> int:
        """Number of items that still fit if none is longer than `longest`."""
        return self._capacity.max_items(self.longest) - self.size

    def add_leader(self, leader: Request, index: LengthIndex) -> None:
        """Add the longest items of the leader, and remove them from `index`."""
        first = leader.remaining.spans[0][0]
        _, count = self._choose_nearest(leader.waiting_lengths(0, self.room), [])
        self._add(leader, 0, count)
        if leader.small:
            index.remove(leader, first, self.slices[-1][2] - 1)

    def add_small(self, index: LengthIndex) -> None:
        """Add the items of small calls that are nearest in length."""
        # the index has the longest item first: items at places below `at` are longer than `longest`
        at, room = index.not_longer(self.longest), self.room
        longer = index.lengths(max(at - room, 0), at)
        before, after = self._choose_nearest(index.lengths(at, at + room), longer)
        # for each request, the first position of its chosen items, and their number
        found: dict[Request, list[int]] = {}
        for _, _, position, request in index.take(at - before, at + after):
            found.setdefault(request, [position, 0])[1] += 1
        for request, (position, count) in found.items():
            rank = request.remaining.rank(position)
            self._add(request, rank, rank + count)

    def add_large(self, request: Request) -> None:
        """Add the items of a large call that are nearest in length."""
        assert request.lengths is not None
        at, room = bisect_left(request.lengths, -self.longest, key=neg), self.room
        rank = request.remaining.rank(at)
        longer = request.waiting_lengths(max(rank - room, 0), rank)
        before, after = self._choose_nearest(request.waiting_lengths(rank, rank + room), longer)
        if before + after:
            self._add(request, rank - before, rank + after)

    def _choose_nearest(self, shorter: list[int], longer: list[int]) -> tuple[int, int]:
        """Return how many items at the end of `longer`, and at the start of `shorter`, join.

        Both lists are lengths, longest first. Items of `shorter` are not longer than the batch, and
        are padded themselves. If an item of `longer` joins, all other items are padded.
        """
        before = after = 0  # items that join of `longer`, and of `shorter`
        while True:
            size = self.size + before + after
            # cells of padding for the next item of `shorter`, and for the next of `longer`
            padding, stretch = math.inf, math.inf
            if after < len(shorter) and size < self._capacity.max_items(self.longest):
                padding = self.longest - shorter[after]
            if before < len(longer) and size < self._capacity.max_items(longer[-before - 1]):
                stretch = (longer[-before - 1] - self.longest) * size
            if min(padding, stretch) == math.inf or min(padding, stretch) > self._padding_left:
                return before, after
            if padding <= stretch:
                self._padding_left -= padding
                after += 1
            else:
                self._padding_left -= stretch
                self.longest = longer[-before - 1]
                before += 1

    def _add(self, request: Request, low: int, high: int) -> None:
        """Add the waiting items of `request` ranked `low` to `high` (exclusive)."""
        # a request that leaves as a whole does not need its `remaining` spans any more
        spans = [(0, high)] if high - low == request.size else request.remaining.cut(low, high)
        for start, stop in spans:
            self.slices.append((request, start, stop))
        self.size += high - low
