"""Which items form the next batch, and when it may leave.

The rules, in the order they are applied:

1. A batch is formed only when a worker is free: at most `max_concurrent_batches` run at once.
2. Requests that may share a batch form a group. A group may leave when it fills a batch, when a call of it has
   already begun, when the scheduler drains, or when the linger rule lets it go. A held group never keeps a worker
   from another group.
3. One request leads, and the batch is filled from its group: the oldest small call of all groups that may leave, or,
   when its share is due, the oldest large one. A call is small if it has at most `small_batch_threshold` items.
4. The batch takes the leader, then the group's small calls, then its large ones, each class first come, first served.
   A call that does not fit is split, and its rest goes first in its class next time.
5. The heir is the oldest large call that may leave. It earns a quarter of a batch with every batch, of any group, after
   which some of it still waits; its share is due once it has earned a whole batch or all that it still needs. Leading
   spends all it has earned, filling room that small calls leave spends nothing. So a call of m items is finished within
   ceil(4 * m / batch_size) + 1 batches once it is the heir, however many small calls arrive. A new heir has earned
   nothing, so small calls never wait for more than two batches in a row that large ones lead.

Times are seconds on whichever clock the caller passes as `now`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Any, Final

from .linger import AT_ONCE, NEVER, FlushReason, linger
from .policy import BatchPolicy

SHARE: Final = 4
"""A large call that waits earns one part in this many of each batch."""


class Request:
    """One call, all its items together, from its arrival to its answer."""

    __slots__ = (
        "arrived",
        "error",
        "group",
        "items",
        "listed",
        "owner",
        "parts",
        "queues",
        "result",
        "size",
        "taken",
        "unanswered",
        "waker",
    )

    def __init__(self, items: Any, size: int, group: Hashable, *, waker: Any, listed: bool = False, owner: object = None) -> None:
        self.items = items  # the call's items, as the collator knows them
        self.size = size  # how many items
        self.group = group  # key of the requests that may share a batch with this one
        self.waker = waker  # tells the caller that the answer is there; None once nobody waits for it any more
        self.listed = listed  # a list call, answered with a list
        self.owner = owner  # the instance whose method was called, alive until the answer
        self.arrived = 0.0  # when the scheduler got it (s)
        self.taken = 0  # items handed out in batches so far
        self.unanswered = size  # items without a result so far
        self.parts: list[tuple[int, Any]] = []  # results so far, each with the position of its first item
        self.result: Any = None  # the answer, once all parts are there
        self.error: BaseException | None = None  # the answer, if the call failed
        self.queues: _Group | None = None  # where it waits; None before and after

    def outcome(self) -> Any:
        """The result, or raises the error; to be called once, by the caller who was woken."""
        error, self.error = self.error, None
        if error is None:
            return self.result
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


Slice = tuple[Request, int, int]
"""A request, and the positions of the first and after the last of the items meant. Plain, for there is one per call in each batch."""


class Batch:
    """Slices of requests that are to run together."""

    __slots__ = ("ended", "reason", "size", "slices", "started")

    def __init__(self, slices: list[Slice], size: int, reason: FlushReason, started: float) -> None:
        self.slices = slices  # in the order the batch function sees them
        self.size = size  # items in all slices
        self.reason: FlushReason = reason  # why it left
        self.started = started  # when it was formed (s)
        self.ended = started  # when its function had returned (s)


_Queue = OrderedDict[Request, None]  # first come, first served, and any request leaves in constant time


class _Group:
    """The waiting requests that may share a batch."""

    __slots__ = ("begun", "key", "large", "small", "waiting")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.small: _Queue = OrderedDict()
        self.large: _Queue = OrderedDict()
        self.waiting = 0  # items not yet handed out
        self.begun = 0  # requests of which a part was handed out

    @property
    def oldest(self) -> float:
        return min(next(iter(queue)).arrived for queue in (self.small, self.large) if queue)


class Scheduler:
    """Hands out batches when asked; the caller provides the time, and the exclusion from other threads."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self.waiting = 0  # items not yet handed out, in all groups
        self.draining = False  # nothing is held any more
        self.running: dict[Batch, None] = {}  # handed out and not finished, oldest first
        self._linger = linger(policy)
        self._groups: dict[Hashable, _Group] = {}  # never an empty one
        self._small: _Queue = OrderedDict()  # small requests of all groups, oldest first
        self._large: _Queue = OrderedDict()  # large requests of all groups, oldest first
        self._heir: Request | None = None  # the large request that leads when its share is due
        self._earned = 0  # by the heir so far, in items / SHARE

    def __iter__(self) -> Iterator[Request]:
        """The requests of which anything still waits."""
        return chain(self._small, self._large)

    @property
    def in_flight(self) -> int:
        """Items in batches that are running."""
        return sum(batch.size for batch in list(self.running))

    @property
    def has_room(self) -> bool:
        """Whether one more batch may run."""
        return len(self.running) < self.policy.max_concurrent_batches

    def submit(self, request: Request, now: float) -> float:
        """Queues `request` and returns the moment from which its group may leave."""
        group = self._groups.get(request.group)
        if group is None:
            group = self._groups[request.group] = _Group(request.group)
        request.arrived = now
        request.queues = group
        if request.size <= self.policy.small_batch_threshold:
            group.small[request] = self._small[request] = None
        else:
            group.large[request] = self._large[request] = None
        group.waiting += request.size
        self.waiting += request.size
        return self._departure(group)[0]

    def cancel(self, request: Request) -> bool:
        """Takes what still waits of `request` out of the queue; True if none of it was ever handed out."""
        if request.queues is None:
            return False
        self._remove(request)
        return request.taken == 0

    def take(self, now: float) -> Batch | None:
        """The next batch, or None while there is none to run yet: see `next_deadline`."""
        if not self.has_room:
            return None
        small = self._first(self._small, now) if self._small else None
        large = self._first(self._large, now) if self._large else None
        if large is not self._heir:
            self._heir, self._earned = large, 0
        if large is None or (small is not None and self._earned < SHARE * min(large.size - large.taken, self.policy.batch_size)):
            leader = small
        else:
            leader = large
        if leader is None:
            return None
        batch = self._formed(leader, now)
        self._earned = self.policy.batch_size + (0 if leader is large else self._earned)
        self.running[batch] = None
        return batch

    def next_deadline(self) -> float:
        """The moment from which `take` can succeed: at most now if it can already, infinite if time alone changes nothing."""
        if not self.has_room:
            return NEVER
        return min((self._departure(group)[0] for group in self._groups.values()), default=NEVER)

    def finished(self, batch: Batch, now: float) -> None:
        """Frees the worker that ran `batch`, which ended at `now`."""
        batch.ended = now
        del self.running[batch]

    def close(self) -> None:
        """Holds nothing back from now on, so that what waits leaves as fast as workers get free."""
        self.draining = True

    def reopen(self) -> None:
        """Holds back again what the linger rule says, as before `close`."""
        self.draining = False

    def _departure(self, group: _Group) -> tuple[float, FlushReason]:
        if group.waiting >= self.policy.batch_size:
            return AT_ONCE, "full"
        if self.draining:
            return AT_ONCE, "drain"
        if group.begun:
            return AT_ONCE, "eager"
        return self._linger.until(group.oldest), self._linger.reason

    def _first(self, requests: _Queue, now: float) -> Request | None:
        """The oldest of `requests` whose group may leave."""
        held: set[_Group] = set()
        for request in requests:
            group = request.queues
            assert group is not None
            if group in held:
                continue
            if self._departure(group)[0] <= now:
                return request
            held.add(group)
            if len(held) == len(self._groups):
                break
        return None

    def _formed(self, leader: Request, now: float) -> Batch:
        """The batch of at most `batch_size` items that `leader` leads; what is handed out whole leaves the queues."""
        group = leader.queues
        assert group is not None
        reason = self._departure(group)[1]
        full = room = self.policy.batch_size
        slices: list[Slice] = []
        for request in chain((leader,), group.small, group.large):
            if request is leader and slices:
                continue
            start = request.taken
            stop = min(request.size, start + room)
            slices.append((request, start, stop))
            room -= stop - start
            if not room:
                break
        for request, start, stop in slices:
            if stop == request.size:
                self._remove(request)
            else:
                group.begun += start == 0
                group.waiting -= stop - start
                self.waiting -= stop - start
            request.taken = stop
        return Batch(slices, full - room, reason, now)

    def _remove(self, request: Request) -> None:
        group = request.queues
        assert group is not None
        own, every = (group.small, self._small) if request in self._small else (group.large, self._large)
        del own[request], every[request]
        rest = request.size - request.taken
        group.waiting -= rest
        group.begun -= request.taken > 0
        self.waiting -= rest
        request.queues = None
        if request is self._heir:
            self._heir = None
        if not group.waiting:
            del self._groups[group.key]
