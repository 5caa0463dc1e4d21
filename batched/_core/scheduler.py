"""Which items form the next batch, and when it may leave.

The rules, in the order they are applied:

1. A batch is formed only when a worker is free: at most `max_concurrent_batches` run at once, and
   `prefetch` more are ready.
2. Requests that may share a batch form a group. A group may leave when it fills a batch, when a
   call of it has already begun, when the scheduler drains, or when the linger rule lets it go. A
   held group never keeps a worker from another group. How many items fill a batch depends on the
   longest of them (`Capacity`).
3. One request leads, and the batch is filled from its group: the oldest small call of all groups
   that may leave, or, when its share is due, the oldest large one. A call is small if it has at
   most `small_batch_threshold` items.
4. The batch takes the leader, then the group's small calls, then its large ones, each class first
   come, first served. A call that does not fit is split, and its rest goes first in its class next
   time. Where lengths matter and more waits in the group than fits, like lengths go together
   instead (`alike`): the leader still takes as much as fits of what waits of it, and large calls
   still get only the room that small ones can not use. Where, by the times of batches so far,
   padding would take longer than another batch, it is cut short.
5. The heir is the oldest large call that may leave. It earns a quarter of a batch with every batch,
   of any group, after which some of it still waits; its share is due once it has earned a whole
   batch or all that it still needs. Leading spends all it has earned, filling room that small calls
   leave spends nothing. So a call of m items is finished within ceil(4 * m / batch_size) + 1
   batches once it is the heir, however many small calls arrive, and where lengths limit batches,
   within 4 * r + 1 if it would need r batches alone. A new heir has earned nothing, so small calls
   never wait for more than two batches in a row that large ones lead.
6. No order of lengths makes a small call wait for long: every batch that a small call leads is led
   by the oldest one that may leave. So behind k older small calls, each of which fits one batch, a
   call that may leave has begun within k + 1 batches led by small calls, and within 3 * (k + 1)
   batches in all. (Older calls count as often as the batches that each would need alone.)
7. With `max_queue_size` the queue has an entrance, where calls stand in line for room, first come,
   first served. The first one enters as soon as all its items fit or, however many they are, the
   queue is empty. A full queue holds nothing back.
8. A call of which nothing has left `queue_timeout_ms` after its arrival, in the queue or in line
   for it, expires.

Times are seconds on whichever clock the caller passes as `now`.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Final

from .capacity import Capacity
from .forming import chosen
from .group import Group, Queue, tidy
from .linger import AT_ONCE, NEVER, FlushReason, Hindsight, linger
from .policy import BatchPolicy
from .request import Batch, MeasuredRequest, Request, Slice

__all__ = ["Batch", "MeasuredRequest", "Request", "Scheduler", "Slice"]

SHARE: Final = 4
"""A large call that waits earns one part in this many of each batch."""
TOGETHER: Final = 8
"""Batches that are learned from together, where nothing depends on what they show."""


class Scheduler:
    """Hands out batches when asked; the caller provides time, exclusion from other threads, and
    workers whose waits take a `tick` (s).
    """

    def __init__(self, policy: BatchPolicy, tick: float = 0.0) -> None:
        self.policy = policy
        self._most_running = policy.max_concurrent_batches + policy.prefetch  # batches
        self._most_waiting = policy.max_queue_size or math.inf  # items
        self._small_size = policy.small_batch_threshold  # items of a call
        self._patience = policy.queue_timeout  # of a call that waits (s); None: endless
        self.waiting = 0  # items in the queue and not yet handed out, in all groups
        self.draining = False  # nothing is held any more
        self.capacity = Capacity(policy.batch_size, policy.max_batch_tokens)  # of one batch
        self.in_flight = 0  # items in batches that are running
        self.running: dict[Batch, None] = {}  # handed out and not finished, oldest first
        self.has_room = True  # for one more batch to run, or to be made ready
        self._linger = linger(policy, tick)
        # which learns from what happens
        self._hindsight = self._linger if isinstance(self._linger, Hindsight) else None
        self._ready = AT_ONCE  # since when a batch may run (s)
        self._unnoted = False  # `hindsight` does not know yet that what waits might leave
        # of each batch that `hindsight` does not know of yet: size, time (s), items left
        self._ended: list[tuple[int, float, int]] = []
        self._groups: dict[Hashable, Group] = {}  # never an empty one
        self._small: Queue = deque()  # small requests of all groups
        self._large: Queue = deque()  # large requests of all groups
        # requests that are not in the queue yet, in the order in which they will be
        self._line: OrderedDict[Request, None] = OrderedDict()
        # requests that have left the line for the queue; taken out by whoever tells them
        self.entered: dict[Request, None] = {}
        # those of which nothing has left, oldest first, if that can expire
        self._expiring: OrderedDict[Request, None] = OrderedDict()
        self._heir: Request | None = None  # the large request that leads when its share is due
        self._earned = 0  # by the heir so far, in batches / SHARE

    def __iter__(self) -> Iterator[Request]:
        """The requests of which anything still waits."""
        return chain(
            (request for request in chain(self._small, self._large) if request.queues is not None),
            self._line,
        )

    @property
    def in_line(self) -> int:
        """Requests that wait for room in the queue."""
        return len(self._line)

    def admits(self, request: Request) -> bool:
        """Whether `request` would enter the queue at once."""
        return not self._line and (
            not self.waiting or self.waiting + request.size <= self._most_waiting
        )

    def submit(self, request: Request, now: float, *, in_turn: bool = False) -> None:
        """Queues `request`, or puts it in line. `in_turn`: a task of a loop called; others that are
        ready do before a worker looks.
        """
        request.arrived = now
        if self._patience is not None:
            self._expiring[request] = None
        if self._line or (self.waiting and self.waiting + request.size > self._most_waiting):
            self._line[request] = None
            return
        group = self._enqueue(request)
        if (hindsight := self._hindsight) is not None:
            if hindsight.expected > 0:
                hindsight.arrived(group.key, request.size, now)
            if (
                group.waiting == request.size < self.capacity.batch_size
                and self.has_room
                and not self._ended
            ):
                if in_turn:
                    self._unnoted = True
                else:
                    hindsight.present(self.waiting + self.in_flight)
                    hindsight.chance(group.key, request.size, now)

    def _enqueue(self, request: Request) -> Group:
        group = self._groups.get(request.group)
        if group is None:
            group = self._groups[request.group] = Group(request.group)
        size = request.size
        small = size <= self._small_size
        if small:
            group.small.append(request)
            self._small.append(request)
        else:
            group.large.append(request)
            self._large.append(request)
        if request.lengths is not None:
            group.joined(request, request.lengths[0], small=small)
        group.waiting += size
        self.waiting += size
        request.queues = group  # last: from now on it is there
        return group

    def _let_in(self) -> None:
        """Has as many requests enter the queue as there is room for."""
        while self._line:
            request = next(iter(self._line))
            if self.waiting and self.waiting + request.size > self._most_waiting:
                return
            self._enqueue(request)
            self.entered[request] = None
            del self._line[request]  # last, so that it is somewhere if a signal breaks in

    def cancel(self, request: Request) -> bool:
        """Takes what still waits of `request` out of the queue, or out of the line; True if none of
        it was ever handed out.
        """
        group = request.queues
        if group is not None:
            if request.lengths is not None:
                group.parted(request, small=request.size <= self._small_size)
            if self._hindsight is not None:
                self._hindsight.present(self.waiting + self.in_flight)
            rest = request.size - request.taken
            group.waiting -= rest
            group.begun -= request.taken > 0
            self.waiting -= rest
            request.queues = None
            self._part(group)
        elif request in self._line:
            del self._line[request]
        else:
            return False
        self._expiring.pop(request, None)
        self._let_in()
        return request.taken == 0

    def next_expiry(self) -> float:
        """The moment from which `expire` finds something; infinite if time alone changes
        nothing.
        """
        return (
            next(iter(self._expiring)).arrived + self._patience
            if self._expiring and self._patience is not None
            else NEVER
        )

    def expire(self, now: float) -> list[Request]:
        """Takes the requests that have waited too long out of the queue and the line."""
        expired: list[Request] = []
        while self.next_expiry() <= now:
            expired.append(next(iter(self._expiring)))
            self.cancel(expired[-1])
        return expired

    def take(self, now: float) -> Batch | None:
        """The next batch, or None while there is none to run yet: see `next_deadline`."""
        if not self.has_room:
            return None
        small = self._first(self._small, now) if self._small else None
        large = self._first(self._large, now) if self._large else None
        if large is not self._heir:
            self._heir, self._earned = large, 0
        leader = (
            small if large is None or (small is not None and not self._is_due(large)) else large
        )
        if leader is None:
            return None
        batch = self._formed(leader, now)
        self._earned = 1 + (0 if leader is large else self._earned)
        if self._expiring:
            for request, _, _ in batch.slices:
                self._expiring.pop(request, None)
        if self._line:
            self._let_in()
        return batch

    def next_deadline(self) -> float:
        """The moment from which `take` can succeed: at most now if it can already, infinite if time
        alone changes nothing.
        """
        if not self.has_room:
            return NEVER
        earliest = NEVER
        for group in self._groups.values():
            earliest = min(earliest, self.departure(group))
        return earliest

    def return_time(self, now: float) -> float:
        """Until when what comes after a batch is held, if it comes soon; infinite if that is over,
        or nothing is held.
        """
        if self._hindsight is None or self.draining or not self._hindsight.holds:
            return NEVER
        until = self._hindsight.until(AT_ONCE, self._ready)
        return until if until > now else NEVER

    def finished(self, batch: Batch, now: float) -> None:
        """Frees the worker that ran `batch`, which ended at `now`. Then come its callers, who wait
        to be told, and then `learn`.
        """
        batch.ended = now
        if self._hindsight is not None:
            self._hindsight.present(self.waiting + self.in_flight)
            self._ended.append(
                (batch.size, now - batch.started, self.waiting + self.in_flight - batch.size)
            )
        if not self.has_room:
            self._ready = now
            self._unnoted = True
        del self.running[batch]
        self.has_room = True
        self.in_flight -= batch.size
        if not batch.too_big:
            self.capacity.fitted(batch.size, batch.longest)
        for items, longest in batch.too_big:
            self.capacity.too_big(items, longest)
        # where the time is that of the function
        if batch.longest and batch.attempts == 1 and not self.policy.prefetch:
            self.capacity.took(batch.size * batch.longest, now - batch.started)

    def learn(self, now: float) -> None:
        """Notes what the batches that have finished since the last time show; to be called before
        the next `take`.
        """
        hindsight = self._hindsight
        if hindsight is None or not (self._ended or self._unnoted):
            return
        group = (self._small or self._large)[0].queues if self.waiting else None
        leaves = group is not None and (
            group.begun > 0 or group.waiting >= self.capacity.batch_size
        )
        # it does so whatever they show
        if leaves and len(self._groups) == 1 and len(self._ended) < TOGETHER:
            return
        for size, seconds, left in self._ended:
            hindsight.finished(size, seconds, left)
        self._ended.clear()
        if self._unnoted and group is not None and not leaves:
            hindsight.chance(group.key, group.waiting, now)
        self._unnoted = False
        hindsight.look_back()

    def close(self) -> None:
        """Holds nothing back from now on, until it is opened again, so that what waits leaves as
        fast as workers get free.
        """
        self.draining = True

    def reopen(self) -> None:
        self.draining = False

    def departure(self, group: Group | None) -> float:
        """The moment from which `group` may leave; while requests stand in line (which are in none)
        any may.
        """
        rule = self._linger
        if group is None or group.begun or self.draining or not rule.holds:
            return AT_ONCE
        if self.waiting + self.in_flight >= rule.everyone or self._is_full(group):
            return AT_ONCE
        return rule.until(group.oldest, self._ready)

    def _is_full(self, group: Group) -> bool:
        """Whether it would fill a batch, or nothing can join it."""
        capacity, waiting = self.capacity, group.waiting
        if waiting >= capacity.batch_size or (
            capacity.varies and waiting >= capacity.most(group.longest)
        ):
            return True
        return self.waiting >= self._most_waiting or bool(self._line)

    def _is_due(self, heir: Request) -> bool:
        """Whether `heir` has earned a batch, or as much of one as it still needs."""
        most = self.capacity.most(heir.longest)
        return self._earned * most >= SHARE * min(heir.size - heir.taken, most)

    def _first(self, requests: Queue, now: float) -> Request | None:
        """The oldest of `requests` whose group may leave."""
        group = requests[0].queues
        if self.departure(group) <= now:
            return requests[0]
        held = {None, group}
        for request in requests if len(self._groups) > 1 else ():
            group = request.queues
            if group not in held:
                if self.departure(group) <= now:
                    return request
                held.add(group)
                if len(held) > len(self._groups):
                    break
        return None

    def _formed(self, leader: Request, now: float) -> Batch:
        """The batch that `leader` leads; what is handed out whole leaves the queues."""
        group = leader.queues
        assert group is not None
        held: FlushReason = (
            "drain" if self.draining else "eager" if group.begun else self._linger.reason
        )
        reason = "full" if self._is_full(group) else held
        slices, size, longest = chosen(
            leader, group, self.capacity, small=leader.size <= self._small_size
        )
        batch = Batch(slices, size, reason, now, longest)
        # first, so that what is handed out is somewhere if a signal breaks in
        self.running[batch] = None
        self.has_room = len(self.running) < self._most_running
        self.in_flight += size
        self.waiting -= size
        group.waiting -= size
        left = False
        for request, start, stop in slices:
            before = request.taken
            request.taken = taken = before + stop - start
            if taken == request.size:
                request.queues = None
                left = True
                if before:
                    group.begun -= 1
            elif not before:
                group.begun += 1
        if left:
            self._part(group)
        return batch

    def _part(self, group: Group) -> None:
        """Tidies up after requests have left `group`."""
        for queue in group.small, group.large:
            tidy(queue, group.waiting)
        for queue in self._small, self._large:
            tidy(queue, self.waiting)
        if self._heir is not None and self._heir.queues is None:
            self._heir = None
        if not group.waiting:
            del self._groups[group.key]
