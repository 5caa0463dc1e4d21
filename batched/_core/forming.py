"""What a batch holds, once it is clear who leads it."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import chain
from operator import neg

from .capacity import Capacity
from .group import Group
from .request import Request, Slice
from .shelf import Shelf


def chosen(
    leader: Request, group: Group, capacity: Capacity, *, small: bool
) -> tuple[list[Slice], int, int]:
    """The slices of a batch, how many items they hold, and the length of the longest; `small`: that
    is what the leader is.
    """
    if leader.lengths is None:
        return *in_order(
            leader, group, capacity.most(0) if capacity.varies else capacity.batch_size
        ), 0
    longest, size = group.longest, group.waiting
    group.shrunk()
    if (
        size <= capacity.batch_size
        and size <= capacity.most(longest)
        and longest * (size - 1) <= capacity.batch_in_cells
    ):
        return everything(leader, group), size, longest
    draft = alike(leader, group, capacity, small=small)
    return draft.slices, draft.size, draft.longest


def in_order(leader: Request, group: Group, room: int) -> tuple[list[Slice], int]:
    """At most `room` items, and how many: the leader, the group's small calls, its large ones, each
    class first come, first served.
    """
    stop = min(leader.size, leader.taken + room)
    slices = [(leader, leader.taken, stop)]
    left = room - (stop - leader.taken)
    if left:
        for request in chain(group.small, group.large):
            if request is leader or request.queues is None:
                continue
            start, stop = request.taken, request.size
            if stop - start >= left:
                slices.append((request, start, start + left))
                return slices, room
            slices.append((request, start, stop))
            left -= stop - start
    return slices, room - left


def everything(leader: Request, group: Group) -> list[Slice]:
    """All that waits in the group, in the same order."""
    others = [request for request in group if request is not leader]
    return [
        (request, start, stop) for request in (leader, *others) for start, stop in request.spans
    ]


def alike(leader: Request, group: Group, capacity: Capacity, *, small: bool) -> Draft:
    """Items of like lengths; `small`: that is what the leader is.

    A cell is what an item takes for each unit of the batch's longest one, padding included.

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
    draft = Draft(leader, capacity)
    if small:
        short = draft.led_by_small(leader, group.shelf(capacity.batch_size))
    else:
        room = min(leader.size - leader.taken, draft.room)
        lengths = [leader.longest] if room == 1 else leader.waiting_lengths(room)
        _, high = part(lengths, 0, capacity.batch_in_cells)
        short = high < room
        draft.add(leader, 0, high)
        if draft.room and not short:
            draft.add_nearest_small(group.shelf(capacity.batch_size))
    for request in group.large:
        if short or not draft.room:
            break
        if request is not leader and request.queues is not None:
            draft.add_nearest(request)
    return draft


def part(lengths: list[int], at: int, batch_in_cells: float) -> tuple[int, int]:
    """Where that part of `lengths`, longest first, begins and ends that holds the one at `at`, if
    cut as long as a cut pays.

    A cut before place k of n saves (longest - lengths[k]) * (n - k) cells: what is behind it is
    padded to its own longest.
    """
    low, high = 0, len(lengths)
    while lengths[low] * (high - low - 1) > batch_in_cells:
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


class Draft:
    """A batch of which the items are being chosen."""

    __slots__ = ("_capacity", "_cells", "longest", "size", "slices")

    def __init__(self, leader: Request, capacity: Capacity) -> None:
        self.slices: list[Slice] = []
        self.size = 0  # items in the slices
        self.longest = leader.longest  # the length of the longest of them
        self._capacity = capacity
        self._cells = capacity.batch_in_cells  # of padding that may come with what fills it up

    @property
    def room(self) -> int:
        """How many more items fit that are not longer."""
        return self._capacity.most(self.longest) - self.size

    def fits(self, length: int, more: int = 1) -> bool:
        """Whether so many more items fit of which the longest is longer than the batch is now."""
        return self.size + more <= self._capacity.most(length)

    def add(self, request: Request, low: int, high: int) -> None:
        """Adds the waiting items of `request` ranked from `low` up to, not including, `high`."""
        spans = [(0, high)] if high - low == request.size else request.cut(low, high)
        self.slices += [(request, start, stop) for start, stop in spans]
        self.size += high - low

    def led_by_small(self, leader: Request, shelf: Shelf) -> bool:
        """Adds the run of the leader; True if it was cut short."""
        first = leader.spans[0][0]
        at = shelf.index(leader, first)
        low = shelf.run(at, self._capacity)
        lengths = shelf.lengths(low, low + self._capacity.most(shelf.length(low)))
        begin, end = part(lengths, at - low, self._cells)
        short = end - begin < len(lengths)
        low, high = low + begin, low + end
        others = high - low - shelf.count(leader, low, high) if short else 0
        self.add(leader, 0, min(leader.size - leader.taken, self.room))
        shelf.take_of(leader, first, self.slices[-1][2] - 1)
        while low < at and not self.fits(shelf.length(low)):
            low += 1  # of the run only what is short enough
            others -= 1
        if low < at:
            self.longest = shelf.length(low)
        self._take_down(shelf, low, low + (min(others, self.room) if short else self.room))
        return short

    def add_nearest_small(self, shelf: Shelf) -> None:
        low = at = shelf.not_longer(self.longest)
        high = at + self._affordable(shelf.lengths(at, at + self.room))
        while low and self._stretches(shelf.length(low - 1), high - low + 1):
            low -= 1
            self.longest = shelf.length(low)
        self._take_down(shelf, low, high)

    def add_nearest(self, request: Request) -> None:
        """Adds items of a large call."""
        lengths = request.lengths
        assert lengths is not None
        position = bisect_left(lengths, -self.longest, key=neg)
        low = request.rank(position)
        high = min(low + self.room, request.size - request.taken)
        if self._cells < math.inf:
            high = low + self._affordable(request.waiting_lengths(high)[low:])
        for longer in request.before(position):
            if not self._stretches(lengths[longer], high - low + 1):
                break
            low -= 1
            self.longest = lengths[longer]
        if low < high:
            self.add(request, low, high)

    def _affordable(self, lengths: list[int]) -> int:
        """How many of the first of `lengths`, longest first and none longer than the batch, may be
        padded to it.
        """
        for number, length in enumerate(lengths):
            if self.longest - length > self._cells:
                return number
            self._cells -= self.longest - length
        return len(lengths)

    def _stretches(self, length: int, more: int) -> bool:
        """Whether so many more items fit of which the longest is longer than the batch is now, so
        that all are padded to it.
        """
        padding = (length - self.longest) * (self.size + more - 1)
        if padding > self._cells or not self.fits(length, more):
            return False
        self._cells -= padding
        return True

    def _take_down(self, shelf: Shelf, low: int, high: int) -> None:
        """Adds the items that stand on the shelf from `low` up to, not including, `high`."""
        # for calls of more than one item: where the first of those is, and how many
        several: dict[Request, list[int]] = {}
        for _, _, position, request in shelf.take(low, high):
            if request.size == 1:
                self.slices.append((request, 0, 1))
                self.size += 1
            elif request in several:
                several[request][1] += 1
            else:
                several[request] = [position, 1]
        for request, (position, count) in several.items():
            rank = request.rank(position)
            self.add(request, rank, rank + count)
