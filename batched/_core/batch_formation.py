"""Batch formation: the items of a batch, once it is clear which request leads it."""

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
    """Return the slices of a batch, the number of items in them, and the length of the longest.

    Without lengths the batch takes the leader, the group's small calls, then its large ones, each
    class first come, first served.
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
    """Return the same for items with lengths."""
    size = group.waiting
    if size <= capacity.batch_size:  # else `longest` looks at more than will fit
        longest = group.longest
        # the padding is at most longest * (size - 1)
        if size <= capacity.most(longest) and longest * (size - 1) <= capacity.batch_in_cells:
            group.forget_longest()
            return take_all(leader, group), size, longest
    group.forget_longest()
    builder = pack_by_length(leader, group, capacity)
    return builder.slices, builder.size, builder.longest


def take_all(leader: Request, group: Group) -> list[Slice]:
    """Slices of all that waits in the group: the leader, the small calls, the large ones."""
    others = [request for request in group if request is not leader]
    return [
        (request, start, stop)
        for request in (leader, *others)
        for start, stop in request.remaining.spans
    ]


def pack_by_length(leader: Request, group: Group, capacity: Capacity) -> BatchBuilder:
    """Batch of items of like lengths.

    For cells see `Capacity`.

    1. A small leader takes what waits of it, as far as that fits. The rest of the room goes to the
       run in which its longest item stands: the items of the small calls next in line are cut from
       the long end into runs, each as large as its first item allows. The last run, if it is not
       full, begins as much earlier as all of it still fits.
    2. A large leader takes its longest items, as many as the first of them allows.
    3. Room that small calls can not use goes to large ones, the oldest first; room that a large
       leader does not need goes to small calls and then to other large ones. Each gives its items
       nearest in length: those not longer than the batch is already, longest first, then longer
       ones, shortest first, as long as they fit.
    4. A batch is cut short where that saves more cells of padding than another batch costs
       (`batch_in_cells`); it keeps the part with the leader's longest item, and gets nothing of 3.
       No more padding than that comes with 3, either.
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
    """Begin and end of that part of a run that holds the item at `at`, cut as long as that pays.

    `lengths` are the lengths of the run, longest first. A cut before place k of n saves
    (longest - lengths[k]) * (n - k) cells: items behind the cut are padded to their own longest.
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
    """Batch of which the items are being picked."""

    __slots__ = ("_capacity", "longest", "padding_left", "size", "slices")

    def __init__(self, leader: Request, capacity: Capacity) -> None:
        self.slices: list[Slice] = []
        self.size = 0  # items in the slices
        self.longest = leader.longest  # the length of the longest of them
        self._capacity = capacity
        self.padding_left = capacity.batch_in_cells  # cells that items which fill it up may add

    @property
    def room(self) -> int:
        """Number of items that still fit if they are not longer."""
        return self._capacity.most(self.longest) - self.size

    def fits(self, length: int, more: int = 1) -> bool:
        """Whether `more` items fit of which the longest has that length."""
        return self.size + more <= self._capacity.most(length)

    def add(self, request: Request, low: int, high: int) -> None:
        """Adds the waiting items of `request` ranked `low` to `high` (exclusive)."""
        # a request that leaves whole needs no spans any more
        spans = [(0, high)] if high - low == request.size else request.remaining.cut(low, high)
        for start, stop in spans:
            self.slices.append((request, start, stop))
        self.size += high - low

    def add_run_of(self, leader: Request, index: LengthIndex) -> bool:
        """Adds the run of a small leader; True if it was cut short."""
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
            low += 1  # of the run only what is short enough
            others -= 1
        if low < at:
            self.longest = index.length(low)
        self._take(index, low, low + (min(others, self.room) if short else self.room))
        return short

    def add_nearest_small(self, index: LengthIndex) -> None:
        """Adds items of small calls."""
        low = at = index.not_longer(self.longest)
        high = at + self._pay_padding_of(index.lengths(at, at + self.room))
        while low and self._pay_stretch_to(index.length(low - 1), high - low + 1):
            low -= 1
            self.longest = index.length(low)
        self._take(index, low, high)

    def add_nearest(self, request: Request) -> None:
        """Adds items of a large call."""
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
        """Number of the first of `lengths`, longest first and none longer than the batch, that may
        be padded to it.
        """
        for number, length in enumerate(lengths):
            if self.longest - length > self.padding_left:
                return number
            self.padding_left -= self.longest - length
        return len(lengths)

    def _pay_stretch_to(self, length: int, more: int) -> bool:
        """Whether `more` items fit of which the longest is longer than the batch is now, so that
        all are padded to it.
        """
        padding = (length - self.longest) * (self.size + more - 1)
        if padding > self.padding_left or not self.fits(length, more):
            return False
        self.padding_left -= padding
        return True

    def _take(self, index: LengthIndex, low: int, high: int) -> None:
        """Adds the items from `low` to `high` (exclusive) of the index."""
        # each request, with the least position among them and their number
        found: dict[Request, list[int]] = {}
        for _, _, position, request in index.take(low, high):
            found.setdefault(request, [position, 0])[1] += 1
        for request, (position, count) in found.items():
            rank = request.remaining.rank(position)
            self.add(request, rank, rank + count)
