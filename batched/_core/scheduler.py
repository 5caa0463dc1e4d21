"""Scheduler: which items form the next batch, and when it may leave.

The rules, in the order in which they are applied:

1. A batch is formed only when a worker is free: at most `max_concurrent_batches` run at once.
   `prefetch` more, each of them full, are made ready ahead.
2. Requests that may share a batch form a group. A group may leave when it fills a batch, when a
   call of it has already begun, when the scheduler drains, or when the linger rule lets it go. A
   held group never keeps a worker from another group. How many items fill a batch depends on the
   longest of them (`Capacity`).
3. One request leads, and the batch is filled from its group: the oldest small call of all groups
   that may leave or, when its share is due, the oldest large one. A call is small if it has at
   most `small_batch_threshold` items.
4. The batch takes the leader, then the group's small calls, then its large ones, each class first
   come, first served. A call that does not fit is split, and its rest goes first in its class next
   time. Where lengths matter and more waits in the group than fits, like lengths go together
   instead (`pack_by_length`): the leader still takes as much as fits of what waits of it, and large
   calls still get only the room that small ones can not use. Where, by the times of batches so far,
   padding would take longer than another batch, it is cut short.
5. The oldest large call that may leave has a credit, as flows have in deficit round robin. It earns
   a quarter of a batch with every batch, of any group, after which some of it still waits; its
   share is due once it has earned a whole batch or all that it still needs. Leading spends its
   credit, filling room that small calls leave spends nothing. So a call of m items is finished
   within ceil(4 * m / batch_size) + 1 batches once it is the oldest large one, however many small
   calls arrive, and where lengths limit batches, within 4 * r + 1 if it would need r batches alone.
   The next one starts with no credit, so small calls never wait for more than two batches in a row
   that large ones lead.
6. No order of lengths makes a small call wait for long: every batch that a small call leads is led
   by the oldest one that may leave. So behind k older small calls, each of which fits one batch, a
   call that may leave has begun within k + 1 batches led by small calls, and within 3 * (k + 1)
   batches in all. (Older calls count as often as the batches that each would need alone.)
7. With `max_queue_size` calls are blocked while there is no room for them, and admitted first come,
   first served. The first one is admitted as soon as all its items fit or, however many they are,
   the queue is empty. A full queue holds nothing back.
8. A call of which nothing has left `queue_timeout_ms` after its arrival, in the queue or blocked,
   expires. What a caller sends ahead of its turn counts from its turn on (`count_wait`).

Times are seconds on whichever clock the caller passes as `now`. A signal handler may raise between
any two statements, where a loop runs the scheduler in the main thread: so the order of some of them
keeps a request somewhere at every moment, which their comments say.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from heapq import heappop, heappush, heapreplace
from itertools import chain
from operator import attrgetter
from typing import Final

from .batch_formation import form_batch
from .capacity import Capacity
from .group import Group, Queue
from .linger import AT_ONCE, NEVER, FlushReason, linger_rule
from .policy import BatchPolicy
from .request import Batch, Request, Slice

__all__ = ["Batch", "Request", "Scheduler", "Slice"]

QUANTUM: Final = 0.25
"""Credit that the oldest large call earns with each batch, in batches."""


class Scheduler:
    """Hands out batches when asked.

    The caller provides time, exclusion from other threads, and workers whose waits take at least a
    `tick` (s).
    """

    def __init__(self, policy: BatchPolicy, tick: float = 0.0) -> None:
        self.policy = policy
        self._most_waiting = policy.max_queue_size or math.inf  # items
        self._small_size = policy.small_batch_threshold  # items of a call
        self._queue_timeout = policy.queue_timeout or NEVER  # (s)
        self.capacity = Capacity(policy.batch_size, policy.max_batch_tokens)  # of one batch
        self._rule = linger_rule(policy, tick)
        self._groups: dict[Hashable, Group] = {}  # what waits in the queue; never an empty group
        # queues of these, of small and of large calls: heaps by the number of the first request of
        # each, or of an earlier one, which is seen where it comes first
        self._small: list[tuple[int, Queue]] = []
        self._large: list[tuple[int, Queue]] = []
        self._numbers = 0  # requests that have come to the queue
        self.waiting = 0  # items in the queue and not yet handed out, in all groups
        # requests that are not in the queue yet, in the order in which they will be
        self._blocked: OrderedDict[Request, None] = OrderedDict()
        # requests that were blocked and no longer are; taken out by whoever tells them
        self.admitted: dict[Request, None] = {}
        # those of which nothing has left, if that can expire, and since when that counts, oldest
        # first (s)
        self._expiring: OrderedDict[Request, float] = OrderedDict()
        self._oldest_large: Request | None = None  # that may leave
        self._credit = 0.0  # of it, in batches
        self.running: dict[Batch, None] = {}  # handed out and not finished, oldest first
        self.in_flight = 0  # items in these, without the items in `_early`
        self._early: set[Request] = set()  # of one item, answered while their batches run on
        # workers without a batch; below 0, batches that are made ready ahead of them
        self._free = policy.max_concurrent_batches
        self.has_room = True  # for one more batch to run, or to be made ready
        self._free_since = AT_ONCE  # since when any worker is free (s)
        self._undecided = False  # what waits might leave now, and the rule was not told
        self._news = False  # a batch has ended since the rule last learned
        self.draining = False  # nothing is held any more; set by the runtime

    def __iter__(self) -> Iterator[Request]:
        """Requests of which anything still waits."""
        return chain(chain.from_iterable(self._groups.values()), self._blocked)

    @property
    def blocked(self) -> int:
        """Requests that wait for room in the queue."""
        return len(self._blocked)

    def admits(self, request: Request) -> bool:
        """Whether `request` would enter the queue at once."""
        return not self._blocked and self._fits_queue(request)

    def submit(self, request: Request, now: float, *, from_event_loop: bool = False) -> None:
        """Queues `request`, or blocks it while there is no room.

        `from_event_loop`: a task of a loop called; others that are ready do so before a worker
        looks.
        """
        request.arrived = now
        if self._queue_timeout < NEVER:
            self._expiring[request] = now
        waiting = self.waiting
        if self._blocked or (waiting and waiting + request.size > self._most_waiting):
            self._blocked[request] = None
            return
        group = self._enqueue(request)
        alone = group.waiting == request.size < self.capacity.batch_size
        if self._free != 1 or self._news or not alone:
            self._rule.arrived(group.key, request.size, now)
        elif from_event_loop:
            self._undecided = True
        else:
            self._rule.decide(group.key, request.size, self.waiting + self.in_flight, now)

    def cancel(self, request: Request) -> bool:
        """Takes out what still waits of `request`; True if none of it was ever handed out."""
        self._expiring.pop(request, None)  # first: a signal must not leave it to expire again
        group = request.queued_in
        if group is not None:
            self._rule.note_outstanding(self.waiting + self.in_flight)
            self.waiting -= request.size - request.dispatched
            group.withdraw(request)
            self._tidy(group)
        elif request in self._blocked:
            del self._blocked[request]
        else:
            return False
        self._admit()
        return request.dispatched == 0

    def next_expiry(self) -> float:
        """Moment from which `expire` finds something; infinite if time alone changes nothing."""
        for since in self._expiring.values():
            return since + self._queue_timeout
        return NEVER

    def count_wait(self, request: Request, since: float | None) -> None:
        """Has the time that `request` waits for its turn count from `since`, which is now, or not
        at all.
        """
        self._expiring.pop(request, None)
        waits = request.queued_in is not None or request in self._blocked
        if waits and not request.dispatched and since is not None:
            self._expiring[request] = since

    def expire(self, now: float) -> list[Request]:
        """Takes out the requests that have waited too long, and returns them."""
        expired: list[Request] = []
        while self.next_expiry() <= now:
            expired.append(next(iter(self._expiring)))
            self.cancel(expired[-1])
        return expired

    def take(self, now: float) -> Batch | None:
        """The next batch, or None while there is none to run yet: see `next_deadline`."""
        if not self.has_room:
            return None
        if self._news or self._undecided:
            self._learn(now)
        leader = self._choose_leader(now)
        if leader is None or not self._may_begin(leader):
            return None
        batch = self._form(leader, now)
        # leading spends it; what still waits earns with this very batch
        self._credit = QUANTUM + (0.0 if leader is self._oldest_large else self._credit)
        if self._expiring:
            for request, _, _ in batch.slices:
                self._expiring.pop(request, None)
        if self._blocked:
            self._admit()
        return batch

    def next_deadline(self) -> float:
        """Moment from which `take` can succeed: at most now if it can already, infinite if time
        alone changes nothing.
        """
        if not self.has_room:
            return NEVER
        if self._free < 1:
            leader = self._choose_leader(AT_ONCE)
            return AT_ONCE if leader is not None and self._may_begin(leader) else NEVER
        return min(map(self.ready_at, self._groups.values()), default=NEVER)

    def return_time(self, now: float) -> float:
        """Moment until which an idle worker should stay awake for callers who come back, so that
        they need not ring it; infinite if that is over, or nothing is held.
        """
        if self.draining or self._free != 1 or not self._rule.holds:
            return NEVER
        until = self._rule.until(AT_ONCE, self._free_since)
        return until if until > now else NEVER

    def answer_early(self, requests: list[Request]) -> None:
        """Take out of flight `requests` of one item, answered while their batch runs on."""
        self._early.update(requests)
        self.in_flight -= len(requests)

    def finished(self, batch: Batch, now: float) -> None:
        """Free the worker that ran `batch`, which ended at `now`."""
        batch.ended = now
        seconds = now - batch.started
        ended = batch.size
        if self._early:
            early = self._early.intersection([request for request, _, _ in batch.slices])
            self._early -= early
            ended -= len(early)
        outstanding = self.waiting + self.in_flight
        self._rule.finished(batch.size, seconds, outstanding, outstanding - ended)
        self._news = True
        if not self._free:
            self._free_since = now
            self._undecided = True
        del self.running[batch]
        self._free += 1
        self.has_room = True
        self.in_flight -= ended
        for items, longest in batch.too_big:
            self.capacity.too_big(items, longest)
        if batch.fitted:
            self.capacity.fitted(batch.size, batch.longest)
            if batch.longest and batch.attempts == 1:  # else the time is not that of one call
                self.capacity.cost.add(batch.size * batch.longest, seconds)

    def ready_at(self, group: Group | None) -> float:
        """Moment from which `group` may leave; None (a request was blocked): any may, at once."""
        rule = self._rule
        if not rule.holds or self._free > rule.most_free:
            return AT_ONCE
        if group is None or group.begun or self.draining or self._is_full(group):
            return AT_ONCE
        if rule.is_here(self.waiting + self.in_flight, group.waiting):
            return AT_ONCE
        return rule.until(group.oldest, min(group.held_since, self._free_since))

    def _fits_queue(self, request: Request) -> bool:
        return not self.waiting or self.waiting + request.size <= self._most_waiting

    def _enqueue(self, request: Request) -> Group:
        group = self._groups.get(request.group_key)
        if group is None:
            group = self._groups[request.group_key] = Group(request.group_key)
        self._numbers += 1
        request.number = self._numbers
        request.small = request.size <= self._small_size
        self.waiting += request.size
        queue, heap = (group.small, self._small) if request.small else (group.large, self._large)
        if not queue.listed:
            heappush(heap, (request.number, queue))
            queue.listed = True  # after it is: a signal may break in, and it may be there twice
        group.add(request)
        return group

    def _admit(self) -> None:
        """Queues as many blocked requests as there is room for."""
        while self._blocked:
            request = next(iter(self._blocked))
            if request.queued_in is None:  # else a signal broke in on this before its last line
                if not self._fits_queue(request):
                    return
                self._enqueue(request)
            self.admitted[request] = None
            del self._blocked[request]  # last: it is somewhere if a signal breaks in

    def _learn(self, now: float) -> None:
        """Has the rule learn, and tells it of a decision point if what waits need not leave now."""
        self._news = False
        for group in self._groups.values():
            if group.begun or group.waiting >= self.capacity.batch_size:
                return
            if self._undecided:
                outstanding = self.waiting + self.in_flight
                self._rule.decide(group.key, group.waiting, outstanding, now)
            break  # the first one is as good as any
        self._undecided = False
        self._rule.evaluate()

    def _is_full(self, group: Group) -> bool:
        """Whether it would fill a batch, or nothing can join it."""
        capacity, waiting = self.capacity, group.waiting
        if waiting >= capacity.batch_size:
            return True
        if capacity.varies and waiting >= capacity.most(group.longest):
            return True
        return self.waiting >= self._most_waiting or bool(self._blocked)

    def _choose_leader(self, now: float) -> Request | None:
        """The request that leads the next batch, of those whose groups may leave."""
        small = self._oldest(self._small, now) if self._small else None
        large = self._oldest(self._large, now) if self._large else None
        if large is not self._oldest_large:
            self._oldest_large, self._credit = large, 0.0
        return small if large is None or (small is not None and not self._is_due(large)) else large

    def _oldest(self, heap: list[tuple[int, Queue]], now: float) -> Request | None:
        """The oldest first request in these queues whose group may leave."""
        while heap:
            number, queue = heap[0]
            if not queue:
                queue.listed = False
                heappop(heap)
            elif queue[0].number != number:
                heapreplace(heap, (queue[0].number, queue))
            elif self._free < 1 or self.ready_at(queue[0].queued_in) <= now:
                return queue[0]
            else:
                return self._oldest_of_many(heap, now)
        return None

    def _oldest_of_many(self, heap: list[tuple[int, Queue]], now: float) -> Request | None:
        """As `_oldest`, where the group of the very oldest is held."""
        ready: list[Request] = []
        for request in [queue[0] for _, queue in heap if queue]:
            group = request.queued_in
            assert group is not None
            if self.ready_at(group) <= now:
                ready.append(request)
            else:  # counted from now on: none is held for ever behind others
                group.held_since = min(group.held_since, self._free_since)
        return min(ready, key=attrgetter("number"), default=None)

    def _may_begin(self, leader: Request) -> bool:
        """Whether its batch may be formed now: ahead of the workers only if it is full, for else it
        would run no sooner for that, and only be smaller.
        """
        group = leader.queued_in
        assert group is not None
        return self._free > 0 or self._is_full(group)

    def _is_due(self, large: Request) -> bool:
        """Whether the oldest large call has earned a batch, or as much of one as it still needs."""
        most = self.capacity.most(large.longest)
        return self._credit * most >= min(large.size - large.dispatched, most)

    def _form(self, leader: Request, now: float) -> Batch:
        """The batch that `leader` leads; what is handed out whole leaves the queue."""
        group = leader.queued_in
        assert group is not None
        reason: FlushReason
        if group.waiting >= self.capacity.batch_size or self._is_full(group):
            reason = "full"
        elif self.draining:
            reason = "drain"
        else:
            rule = self._rule
            reason = "eager" if group.begun or self._free > rule.most_free else rule.reason
        slices, size, longest = form_batch(leader, group, self.capacity)
        batch = Batch(slices, size, reason, now, longest)
        # first, so that what is handed out is somewhere if a signal breaks in
        self.running[batch] = None
        self._free -= 1
        self.has_room = self._free + self.policy.prefetch > 0
        self.in_flight += size
        self.waiting -= size
        group.waiting -= size
        group.held_since = NEVER
        left = False
        waits: list[float] = []
        for request, start, stop in slices:
            before = request.dispatched
            request.dispatched = taken = before + stop - start
            if not before:
                waits.append(now - request.arrived)
            if taken == request.size:
                request.queued_in = None
                left = True
                group.begun -= before > 0
            elif not before:
                group.begun += 1
        batch.waits = waits
        if left:
            self._tidy(group)
        return batch

    def _tidy(self, group: Group) -> None:
        """Lets go of what has left `group`."""
        group.tidy()
        if self._oldest_large is not None and self._oldest_large.queued_in is None:
            self._oldest_large = None
        if not group.waiting:
            del self._groups[group.key]
            for heap in self._small, self._large:
                if len(heap) > 2 * len(self._groups):
                    _drop_empty(heap)


def _drop_empty(heap: list[tuple[int, Queue]]) -> None:
    """Drops the queues of a heap in which nothing waits."""
    for _, queue in heap:
        queue.listed = bool(queue)
    heap[:] = sorted([entry for entry in heap if entry[1]])
