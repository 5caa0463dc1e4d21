"""Scheduler: choice of the items of the next batch, and of the moment at which it may leave.

The rules, in the order in which they are applied:

1. A batch is formed only when a worker is free: at most `max_concurrent_batches` run at once. Up to
   `prefetch` more batches, each of them full, are formed ahead.
2. Requests that may share a batch form a group. A group may leave when it fills a batch, when one
   of its calls has begun (unless the items of the call are `separate`), when the queue is full,
   when the scheduler drains, or when the flush rule releases it. While a group is held, a free
   worker takes any other group that may leave. The number of items that fill a batch depends on the
   length of the longest of them (`Capacity`).
3. One request leads the batch, and its group fills the rest. The leader is the oldest small call of
   all groups that may leave or, when its share is due, the oldest large call. A call is small if it
   has at most `small_batch_threshold` items.
4. The batch takes the leader, then the small calls of the group, then the large calls, each class
   first come, first served. A call that does not fit is split, and its rest is first in its class
   next time. If items have lengths and more items wait in the group than fit, the batch takes items
   of similar lengths instead (`pack_by_length`). The leader still goes first, and large calls get
   only the room that small calls cannot use. The padding of a batch takes at most as long as
   the fixed cost of one more batch, by the times of past batches.
5. The oldest large call that may leave has a credit, as in deficit round robin. It earns a quarter
   of a batch with every batch, of any group, after which part of it still waits. Its share is due
   once the credit reaches a whole batch, or all that the call still needs. Leading a batch spends
   the credit; filling room that small calls leave spends nothing. Once it is the oldest large call,
   a call of m items ends within ceil(4 * m / batch_size) + 1 batches, however many small calls
   arrive. Where the length of items limits a batch to fewer items, the bound is 4 * r + 1 for a
   call that needs r batches alone. The next large call starts with no credit, so small calls never
   wait for more than two batches in a row that large calls lead.
6. Lengths do not delay a small call for long: the oldest small call that may leave leads every
   batch that a small call leads. A call may have k older small calls before it, each of which fits
   one batch. It has begun within k + 1 batches led by small calls, and within 3 * (k + 1) batches
   in all. An older call that needs several batches alone counts once for each of them.
7. With `max_queue_size` calls are blocked while the queue has no room for them, and admitted first
   come, first served. The first blocked call is admitted as soon as all its items fit, or the queue
   is empty. No group is held while the queue is full.
8. A call expires if none of its items has left `queue_timeout_ms` after its arrival, in the queue
   or blocked. For an item that `map` submits ahead, time counts from the moment when the caller
   waits for it (`count_wait`).

The caller is the runtime; `now` is its clock (s). An event loop may run the scheduler in the main
thread, where a signal handler can raise an exception between any two statements. So each request
is in some container at every moment. Comments mark the statements whose order ensures this.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Final

from .capacity import Capacity, Room
from .formation import form_batch
from .group import Group
from .linger import AT_ONCE, NEVER, FlushReason, flush_rule
from .policy import BatchPolicy
from .request import Batch, Request, Slice

__all__ = ["Batch", "Request", "Scheduler", "Slice"]

QUANTUM: Final = 0.25
"""Credit that the oldest large call earns with each batch (batches)."""


class Scheduler:
    """Queue of requests that returns batches when asked.

    The runtime provides the time, a lock, and workers. `tick` is the shortest time for which a
    worker can wait (s).
    """

    def __init__(self, policy: BatchPolicy, tick: float = 0.0) -> None:
        self.policy = policy
        self._max_waiting = policy.max_queue_size or math.inf  # items
        self._queue_timeout = (policy.queue_timeout_ms or NEVER) / 1e3  # longest wait (s)
        self.capacity = Capacity(policy.batch_size, policy.max_batch_tokens)
        self._rule = flush_rule(policy, tick)
        self._groups: dict[Hashable, Group] = {}  # groups that wait; never an empty one
        self._last_number = 0  # number of the latest request that entered the queue
        self.waiting = 0  # items in the queue and not yet handed out, in all groups
        # requests that wait for room in the queue, first come, first served
        self.blocked: OrderedDict[Request, None] = OrderedDict()
        # requests that were blocked and have been admitted; the runtime removes each once its
        # caller is notified
        self.admitted: dict[Request, None] = {}
        # requests that can expire, oldest first, each with the moment from which its wait counts
        # (s); a request can expire until its first item is handed out
        self._expiring: OrderedDict[Request, float] = OrderedDict()
        self._oldest_large = 0  # number of the oldest large call that may leave; 0: none
        self._credit = 0.0  # credit of that call (batches)
        self.running: dict[Batch, None] = {}  # handed out and not finished, oldest first
        self.in_flight = 0  # items of `running` that have no answer yet
        # workers without a batch; -n while n batches have been formed ahead of the workers
        self._free = policy.max_concurrent_batches
        self.has_room = True  # whether one more batch may run, or be formed ahead
        self._free_since = AT_ONCE  # since when at least one worker is free (s)
        self._decision_due = False  # the rule must record a decision point at the next `take`
        self._batch_ended = False  # since the rule last learned
        self.draining = False  # whether no group is held any more; set by the runtime

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests of which some items still wait."""
        return chain(chain.from_iterable(self._groups.values()), self.blocked)

    def admits(self, request: Request) -> bool:
        """Return whether `request` would enter the queue at once."""
        return not self.blocked and self._fits_queue(request)

    def submit(
        self, request: Request, now: float, *, from_event_loop: bool = False
    ) -> Group | None:
        """Queue `request` and return its group, or block it while there is no room.

        `from_event_loop`: the caller is a task of an event loop, where all tasks that are ready
        call before a worker looks for a batch.
        """
        request.arrived = now
        if self._queue_timeout < NEVER:
            self._expiring[request] = now
        waiting = self.waiting
        if self.blocked or (waiting and waiting + request.size > self._max_waiting):
            self.blocked[request] = None
            return None
        group = self._enqueue(request)
        alone = group.waiting == request.size < self.capacity.batch_size
        if self._free != 1 or self._batch_ended or not alone:
            self._rule.arrived(group.key, request.size, now)
        elif from_event_loop:
            self._decision_due = True
        else:
            self._rule.decide(group.key, request.size, self.waiting + self.in_flight, now)
        return group

    def cancel(self, request: Request) -> bool:
        """Remove the waiting items of `request`.

        Return True if the request was waiting and none of its items has been handed out.
        """
        # first: if a signal interrupts the removal, the request must not expire as well
        self._expiring.pop(request, None)
        if request.queued:
            self._rule.note_outstanding(self.waiting + self.in_flight)
            self.waiting -= request.size - request.dispatched
            group = self._groups[request.group_key]
            group.withdraw(request)
            if not group.waiting:
                del self._groups[group.key]
        elif request in self.blocked:
            del self.blocked[request]
        else:
            return False
        self._admit()
        return request.dispatched == 0

    def repair(self) -> None:
        """Rebuild queues and counts from the waiting requests.

        The runtime calls this after an exception has interrupted a change. A request without a
        waker has ended and is dropped. A request with an error was about to be cancelled. Its error
        is removed, and the request waits on.
        """
        queued = [
            request
            for group in self._groups.values()
            for request in group
            if request.queued and request.waker is not None
        ]
        rebuilt = Scheduler(self.policy)
        for request in sorted(queued, key=attrgetter("number")):
            request.error = None
            rebuilt._last_number = request.number - 1  # the request keeps its number
            group, taken = rebuilt._enqueue(request), request.dispatched
            group.waiting -= taken
            rebuilt.waiting -= taken
            group.begun += taken > 0 and not request.separate
            group.forget_longest()
        for request in self.blocked:
            if request.queued:
                self.admitted[request] = None
            elif request.waker is not None:
                request.error = None
                rebuilt.blocked[request] = None
        for request, since in self._expiring.items():
            if request.waker is not None and not request.dispatched:
                rebuilt._expiring[request] = since
        # all changes of `self` are here, and no exception interrupts assignments
        self._groups, self.waiting = rebuilt._groups, rebuilt.waiting
        self.blocked, self._expiring = rebuilt.blocked, rebuilt._expiring
        self._admit()

    def next_expiry(self) -> float:
        """Return the moment at which the next request expires; infinite if none can."""
        for since in self._expiring.values():
            return since + self._queue_timeout
        return NEVER

    def count_wait(self, request: Request, since: float | None) -> None:
        """Let the wait of `request` count from `since`, the present moment (s).

        With None the wait does not count, and the request does not expire.
        """
        self._expiring.pop(request, None)
        waits = request.queued or request in self.blocked
        if waits and not request.dispatched and since is not None:
            self._expiring[request] = since

    def expire(self, now: float) -> list[Request]:
        """Remove the requests that have waited too long, and return them."""
        expired: list[Request] = []
        while self.next_expiry() <= now:
            expired.append(next(iter(self._expiring)))
            self.cancel(expired[-1])
        return expired

    def take(self, now: float) -> Batch | None:
        """Return the next batch, or None if no batch may leave yet: see `next_deadline`."""
        if not self.has_room:
            return None
        if self._batch_ended or self._decision_due:
            self._batch_ended = False
            # one group is enough: few functions have several that wait
            group = next(iter(self._groups.values()), None)
            if group is None or not (group.begun or group.waiting >= self.capacity.batch_size):
                self._learn(group, now)
        leader = self._choose_leader(now) if self.waiting else None
        if leader is None:
            return None
        batch = self._form(leader, now)
        # leading a batch spends the credit; a large call that still waits earns with each batch
        self._credit = QUANTUM + (0.0 if leader.number == self._oldest_large else self._credit)
        if self._expiring:
            for request, _, _ in batch.slices:
                self._expiring.pop(request, None)
        if self.blocked:
            self._admit()
        return batch

    def join(self, key: Hashable, room: Room, now: float) -> Batch | None:
        """Return calls that join the live rows of a run, or None if no call may join.

        The run has calls of the group `key`. If the next call to run is of another group, no call
        joins, so that the other group runs once all rows of the run have left.
        """
        whole = self.capacity
        try:
            self.capacity = room
            leader = self._choose_leader(now) if self.waiting else None
            if leader is None or leader.group_key != key or not room.holds(leader.longest):
                return None
            return self.take(now)
        finally:
            self.capacity = whole

    def next_deadline(self) -> float:
        """Return the moment from which `take` can return a batch.

        The moment is past if `take` can do so now. It is infinite if no batch can leave before
        another call arrives or a batch ends.
        """
        if not self.has_room:
            return NEVER
        if self._free < 1:
            return NEVER if self._choose_leader(AT_ONCE) is None else AT_ONCE
        return min(map(self.ready_at, self._groups.values())) if self._groups else NEVER

    def linger_end(self, now: float) -> float:
        """Return the moment at which the linger that began with the free worker ends (s).

        The idle worker sleeps until then, so that returning callers need not wake it. The moment is
        infinite if nothing would be held, if not exactly one worker is free, or if it is past.
        """
        if self.draining or self._free != 1 or not self._rule.holds:
            return NEVER
        until = self._rule.leaves_at(AT_ONCE, self._free_since)
        return until if until > now else NEVER

    def answer_early(self, batch: Batch, items: int) -> None:
        """Take `items` out of flight: they have ended, or were given up, while `batch` runs."""
        batch.early += items
        self.in_flight -= items

    def finished(self, batch: Batch, now: float) -> None:
        """Free the worker that ran `batch`, which ended at `now`."""
        batch.ended = now
        size, longest, capacity = batch.size, batch.longest, self.capacity
        seconds, ended = now - batch.started, size - batch.early
        outstanding = self.waiting + self.in_flight
        self._rule.finished(size, seconds, outstanding, outstanding - ended)
        self._batch_ended = True
        if not self._free:
            self._free_since = now
            self._decision_due = True
        del self.running[batch]
        self._free += 1
        self.has_room = True
        self.in_flight -= ended
        for attempt in batch.too_big:
            capacity.too_big(*attempt)
        if batch.fitted:
            if longest or capacity.varies or size > capacity.known:
                capacity.fitted(size, longest)
            if longest and batch.attempts == 1:  # else several calls took the time
                capacity.cost.add(size * longest, seconds)

    def time_left(self, most: int) -> float:
        """Return the time of all waiting and running items in batches of `most`, one by one (s).

        It is 0 before the first batch has ended.
        """
        items = self.waiting + self.in_flight
        return math.ceil(items / most) * self._rule.time(min(items, most))

    def ready_at(self, group: Group | None) -> float:
        """Return the moment from which `group` may leave.

        None is the result of `submit` for a blocked request: while requests are blocked, any group
        may leave at once.
        """
        rule = self._rule
        if not rule.holds or self._free > rule.max_free:
            return AT_ONCE
        if group is None or group.begun or self.draining or self._is_full(group):
            return AT_ONCE
        if rule.is_complete(self.waiting + self.in_flight, group.waiting):
            return AT_ONCE
        return rule.leaves_at(group.oldest, min(group.held_since, self._free_since))

    def _fits_queue(self, request: Request) -> bool:
        return not self.waiting or self.waiting + request.size <= self._max_waiting

    def _enqueue(self, request: Request) -> Group:
        key = request.group_key
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key)
        self._last_number += 1
        request.number = self._last_number
        request.small = request.size <= self.policy.small_batch_threshold
        self.waiting += request.size
        (group.small if request.small else group.large)[request] = None
        if request.lengths is not None:
            group.note_lengths(request)
        group.waiting += request.size
        request.queued = True  # last: now the group and all counts include the request
        return group

    def _admit(self) -> None:
        """Queue as many blocked requests as there is room for."""
        while self.blocked:
            request = next(iter(self.blocked))
            if not request.queued:  # true if a signal has interrupted an earlier `_admit`
                if not self._fits_queue(request):
                    return
                self._enqueue(request)
            self.admitted[request] = None
            del self.blocked[request]  # last: a signal must not lose the request

    def _learn(self, group: Group | None, now: float) -> None:
        """Let the rule learn, after it has recorded the decision point that is due, if any.

        `group` is a waiting group that may be held; None if no group waits.
        """
        if group is not None and self._decision_due:
            self._rule.decide(group.key, group.waiting, self.waiting + self.in_flight, now)
        self._decision_due = False
        self._rule.evaluate()

    def _is_full(self, group: Group) -> bool:
        """Return whether `group` fills a batch, or the queue has no room for more items."""
        capacity, waiting = self.capacity, group.waiting
        if waiting >= capacity.batch_size:
            return True
        if capacity.varies and waiting >= capacity.max_items(group.longest):
            return True
        return self.waiting >= self._max_waiting or bool(self.blocked)

    def _choose_leader(self, now: float) -> Request | None:
        """Return the request that leads the next batch; None if no group may leave.

        While all workers are busy, only a full batch is formed ahead of them: a smaller one would
        not run sooner, and could not be joined any more.
        """
        small = large = None  # the oldest of each class
        all_may_leave = self._free < 1 or not self._rule.holds
        for group in self._groups.values():
            if not all_may_leave and self.ready_at(group) > now:
                # its linger counts from the moment when this worker became free, even if another
                # group takes the worker
                group.held_since = min(group.held_since, self._free_since)
                continue
            if group.small:
                first = next(iter(group.small))
                small = first if small is None or first.number < small.number else small
            if group.large:
                first = next(iter(group.large))
                large = first if large is None or first.number < large.number else large
        number = 0 if large is None else large.number
        if number != self._oldest_large:
            self._oldest_large, self._credit = number, 0.0
        leader = large if small is None or (large is not None and self._is_due(large)) else small
        if self._free < 1 and leader is not None:
            return leader if self._is_full(self._groups[leader.group_key]) else None
        return leader

    def _is_due(self, large: Request) -> bool:
        """Return whether the oldest large call has earned a batch, or all that it still needs."""
        room = self.capacity.max_items(large.longest)
        return self._credit * room >= min(large.size - large.dispatched, room)

    def _form(self, leader: Request, now: float) -> Batch:
        """Return the batch that `leader` leads, and remove its items from the queue."""
        group, rule, capacity = self._groups[leader.group_key], self._rule, self.capacity
        reason: FlushReason = "full"
        if group.waiting < capacity.batch_size and not self._is_full(group):
            at_once = group.begun or not rule.holds or self._free > rule.max_free
            reason = "drain" if self.draining else "eager" if at_once else rule.reason
        slices, size, longest = form_batch(leader, group, capacity)
        waits: list[float] = []
        batch = Batch(slices, size, reason, now, longest, waits)
        # first: an exception that interrupts must not lose the requests
        self.running[batch] = None
        self._free -= 1
        self.has_room = self._free + self.policy.prefetch > 0
        self.in_flight += size
        self.waiting -= size
        group.waiting -= size
        group.held_since = NEVER
        for request, start, stop in slices:
            before = request.dispatched
            request.dispatched = taken = before + stop - start
            if taken == request.size:
                del (group.small if request.small else group.large)[request]
                request.queued = False
                if before:
                    group.begun -= not request.separate
                    continue
            elif before:
                continue
            else:
                group.begun += not request.separate
            waits.append(now - request.arrived)
        if not group.waiting:
            del self._groups[group.key]
        return batch
