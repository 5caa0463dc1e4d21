"""Batch formation: choice of the items of a batch, once its leader is known.

Padding is limited by its cost. Where callers call again as soon as they are answered and lengths
are mixed, one batch of all items that fit often takes twice as long as two batches of similar
lengths.
"""

from __future__ import annotations

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
        return pack_by_length(leader, group, capacity)
    room = capacity.max_items(0) if capacity.varies else capacity.batch_size
    start, stop = leader.dispatched, min(leader.size, leader.dispatched + room)
    slices, left = [(leader, start, stop)], min(room, group.waiting) - (stop - start)
    size = left + stop - start
    for request in chain(group.small, group.large) if left else ():
        if request is not leader:
            start, stop = request.dispatched, min(request.size, request.dispatched + left)
            slices.append((request, start, stop))
            left -= stop - start
            if not left:
                break
    return slices, size, 0


def pack_by_length(
    leader: Request, group: Group, capacity: Capacity
) -> tuple[list[Slice], int, int]:
    """Return the slices, size and longest length of a batch of items of similar lengths.

    A cell is one unit of length of one item, padding included (`Capacity`). All items leave if they
    fit. Otherwise:

    1. The leader takes its longest items, as many as fit with the first of them.
    2. Room that the leader does not need goes to the small calls next in line, then to the other
       large calls, the oldest first. Of each, the item that needs the least padding joins next.
    3. The padding is limited (`Capacity.may_pad`).
    """
    size, longest = group.waiting, 0
    fits = size <= capacity.batch_size
    if fits:  # otherwise many items wait, and to look at all of them takes long
        longest = group.longest
        fits = size <= capacity.max_items(longest)
    group.forget_longest()
    if fits:
        cells = sum([sum(each.waiting_lengths(0, each.size)) for each in group])
        if capacity.may_pad(longest * size - cells, cells):
            calls = sorted(group, key=lambda call: call is not leader)
            slices = [one for call in calls for one in call.cut(0, call.size - call.dispatched)]
            return slices, size, longest
    builder = BatchBuilder(leader, capacity)
    index = group.length_index(capacity.batch_size)
    builder.add_leader(leader, index)
    builder.add_small(index)
    for request in group.large:
        if not builder.room:
            break
        if request is not leader:
            builder.add_large(request)
    return builder.slices, builder.size, builder.longest


class BatchBuilder:
    """Batch under construction: items are still added."""

    def __init__(self, leader: Request, capacity: Capacity) -> None:
        self.slices: list[Slice] = []
        self.size = 0  # items in the slices
        self.longest = leader.longest  # length of the longest item in the slices
        self._capacity = capacity
        self.cells = 0  # sum of the lengths of the items
        self._padding = 0  # cells of the batch that are padding

    @property
    def room(self) -> int:
        """Number of items that still fit if none is longer than `longest`."""
        return self._capacity.max_items(self.longest) - self.size

    def add_leader(self, leader: Request, index: LengthIndex) -> None:
        """Add the longest items of the leader, and remove them from `index`."""
        first = leader.remaining[0]
        _, count = self._choose_nearest(leader.waiting_lengths(0, self.room), [])
        self._add(leader, 0, count)
        if leader.small:
            index.remove(leader, first, self.slices[-1][2] - 1)

    def add_small(self, index: LengthIndex) -> None:
        """Add the items of small calls that are nearest in length."""
        # the index has the longest item first: items at places below `at` are longer than `longest`
        at, room = bisect_left(index.entries, (-self.longest,)), self.room
        longer = index.lengths(max(at - room, 0), at)
        before, after = self._choose_nearest(index.lengths(at, at + room), longer)
        # for each request, the first position of its chosen items, and their number
        found: dict[Request, list[int]] = {}
        for _, _, position, request in index.entries[at - before : at + after]:
            found.setdefault(request, [position, 0])[1] += 1
        del index.entries[at - before : at + after]
        for request, (position, count) in found.items():
            rank = bisect_left(request.remaining, position)
            self._add(request, rank, rank + count)

    def add_large(self, request: Request) -> None:
        """Add the items of a large call that are nearest in length."""
        assert request.lengths is not None
        at, room = bisect_left(request.lengths, -self.longest, key=neg), self.room
        rank = bisect_left(request.remaining, at)
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
            # for the next item of `shorter` or `longer`: cells of padding, whether it is of
            # `longer`, and its length
            joining = []
            if after < len(shorter) and size < self._capacity.max_items(self.longest):
                length = shorter[after]
                joining.append((self.longest - length, False, length))
            if before < len(longer):
                length = longer[-before - 1]
                if size < self._capacity.max_items(length):
                    joining.append(((length - self.longest) * size, True, length))
            if not joining:
                return before, after
            padding, is_longer, length = min(joining)
            if not self._capacity.may_pad(self._padding + padding, self.cells + length):
                return before, after
            self._padding += padding
            self.cells += length
            self.longest = max(self.longest, length)
            before += is_longer
            after += not is_longer

    def _add(self, request: Request, low: int, high: int) -> None:
        """Add the waiting items of `request` ranked `low` to `high` (exclusive)."""
        self.slices += request.cut(low, high)
        self.size += high - low
