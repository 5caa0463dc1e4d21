"""Batch formation: choice of the items of a batch, once its leader is known."""

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
    """Return the slices of a batch, the number of their items, and the length of the longest item.

    Without lengths the batch takes the leader, then the small calls of the group, then the large
    calls, each class first come, first served.
    """
    if leader.lengths is not None:
        return _form_by_length(leader, group, capacity)
    room = capacity.most(0) if capacity.varies else capacity.batch_size
    start = leader.dispatched
    stop = min(leader.size, start + room)
    slices = [(leader, start, stop)]
    left = room - (stop - start)
    if left:
        for request in chain(group.small, group.large):
            if request is leader or request.queued_in is None:
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
    """Return the same as `form_batch`, for items with lengths."""
    size = group.waiting
    if size <= capacity.batch_size:  # else `longest` would look at more items than fit
        longest = group.longest
        # the padding is at most longest * (size - 1)
        if size <= capacity.most(longest) and longest * (size - 1) <= capacity.cost.fixed_size:
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

    For cells see `Capacity`.

    1. The items of the small calls next in line are sorted by length. From the long end they are
       cut into runs, each as large as its first item allows. The last run, if it is not full,
       begins as far ahead as all its items still fit. A small leader takes its own waiting items,
       as far as they fit. The rest of the room goes to the run of its longest item.
    2. A large leader takes its longest items, as many as the first of them allows.
    3. Room that small calls cannot use goes to large calls, the oldest first. Room that a large
       leader does not need goes to small calls, then to other large calls. Each call gives the
       items nearest in length. Items that are not longer than the batch come first, longest first;
       longer items follow, shortest first, as long as they fit.
    4. A batch is cut short where the cut saves more cells of padding than another batch costs
       (`batch_in_cells`). It keeps the part with the leader's longest item, and rule 3 adds
       nothing. Nor does rule 3 ever add more padding than another batch costs.
    """
    builder = BatchBuilder(leader, capacity)
    if leader.small:
        short = builder.add_run_of(leader, group.length_index(capacity.batch_size))
    else:
        room = min(leader.size - leader.dispatched, builder.room)
        lengths = [leader.longest] if room == 1 else leader.waiting_lengths(room)
        _, high = split_run(lengths, 0, builder.padding_left)
        builder.add(leader, 0, high)
        short = high < room or not builder.room
        if not short:
            builder.add_nearest_small(group.length_index(capacity.batch_size))
    for request in group.large:
        if short or not builder.room:
            break
        if request is not leader and request.queued_in is not None:
            builder.add_nearest(request)
    return builder


def split_run(lengths: list[int], at: int, batch_in_cells: float) -> tuple[int, int]:
    """Return begin and end of the part of a run that has the item at `at`.

    The run is cut as long as a cut pays. `lengths` are the lengths of the run, longest first. A cut
    before place k of n saves (longest - lengths[k]) * (n - k) cells: items after the cut are padded
    to the longest of them only.
    """
    low, high = 0, len(lengths)
    # no cut saves more than this
    while (lengths[low] - lengths[high - 1]) * (high - low - 1) > batch_in_cells:
        longest = lengths[low]
        saved, cut = max(
            [((longest - lengths[place]) * (high - place), place) for place in range(low + 1, high)]
        )
        if saved <= batch_in_cells:
            break
        if at < cut:
            high = cut
        else:
            low = cut
    return low, high


class BatchBuilder:
    """Batch under construction: items are still added."""

    __slots__ = ("_capacity", "longest", "padding_left", "size", "slices")

    def __init__(self, leader: Request, capacity: Capacity) -> None:
        self.slices: list[Slice] = []
        self.size = 0  # items in the slices
        self.longest = leader.longest  # length of the longest item in the slices
        self._capacity = capacity
        self.padding_left = capacity.cost.fixed_size  # padding that further items may add (cells)

    @property
    def room(self) -> int:
        """Number of items that still fit if none is longer than `longest`."""
        return self._capacity.most(self.longest) - self.size

    def fits(self, length: int, more: int = 1) -> bool:
        """Return whether `more` items fit, the longest of length `length`."""
        return self.size + more <= self._capacity.most(length)

    def add(self, request: Request, low: int, high: int) -> None:
        """Add the waiting items of `request` ranked `low` to `high` (exclusive)."""
        # a request that leaves as a whole needs no spans any more
        spans = [(0, high)] if high - low == request.size else request.remaining.cut(low, high)
        for start, stop in spans:
            self.slices.append((request, start, stop))
        self.size += high - low

    def add_run_of(self, leader: Request, index: LengthIndex) -> bool:
        """Add the run of a small leader. Return True if it was cut short."""
        first = leader.remaining.spans[0][0]
        at = index.find_place(leader, first)
        low = index.find_run(at, self._capacity)
        lengths = index.lengths(low, low + self._capacity.most(index.length(low)))
        begin, end = split_run(lengths, at - low, self.padding_left)
        short = end - begin < len(lengths)
        low, high = low + begin, low + end
        others = high - low - index.count_of(leader, low, high) if short else 0
        self.add(leader, 0, min(leader.size - leader.dispatched, self.room))
        index.take_of(leader, first, self.slices[-1][2] - 1)
        while low < at and not self.fits(index.length(low)):
            low += 1  # items of the run that are too long stay
            others -= 1
        if low < at:
            self.longest = index.length(low)
        self._take(index, low, low + (min(others, self.room) if short else self.room))
        return short

    def add_nearest_small(self, index: LengthIndex) -> None:
        """Add the items of small calls that are nearest in length."""
        low = at = index.not_longer(self.longest)
        high = at + self._pay_padding_of(index.lengths(at, at + self.room))
        while low and self._pay_stretch_to(index.length(low - 1), high - low + 1):
            low -= 1
            self.longest = index.length(low)
        self._take(index, low, high)

    def add_nearest(self, request: Request) -> None:
        """Add the items of a large call that are nearest in length."""
        lengths = request.lengths
        assert lengths is not None
        position = bisect_left(lengths, -self.longest, key=neg)
        low = request.remaining.rank(position)
        high = min(low + self.room, request.size - request.dispatched)
        if self.padding_left < math.inf:
            high = low + self._pay_padding_of(request.waiting_lengths(high)[low:])
        for longer in request.remaining.before(position):
            if not self._pay_stretch_to(lengths[longer], high - low + 1):
                break
            low -= 1
            self.longest = lengths[longer]
        if low < high:
            self.add(request, low, high)

    def _pay_padding_of(self, lengths: list[int]) -> int:
        """Return how many of the first `lengths` may be padded to the length of the batch.

        `lengths` are the longest first, and none is longer than the batch.
        """
        for number, length in enumerate(lengths):
            if self.longest - length > self.padding_left:
                return number
            self.padding_left -= self.longest - length
        return len(lengths)

    def _pay_stretch_to(self, length: int, more: int) -> bool:
        """Return whether `more` items fit, the longest of length `length`.

        That item is longer than the batch is now, so all items are padded to it.
        """
        padding = (length - self.longest) * (self.size + more - 1)
        if padding > self.padding_left or not self.fits(length, more):
            return False
        self.padding_left -= padding
        return True

    def _take(self, index: LengthIndex, low: int, high: int) -> None:
        """Add the items of `index` from `low` to `high` (exclusive)."""
        # by request: the least position among its items, and their number
        found: dict[Request, list[int]] = {}
        for _, _, position, request in index.take(low, high):
            found.setdefault(request, [position, 0])[1] += 1
        for request, (position, count) in found.items():
            rank = request.remaining.rank(position)
            self.add(request, rank, rank + count)
