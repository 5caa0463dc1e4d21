"""Scheduler: choice of the items of the next batch, and of the moment at which it may leave.

The rules, in the order in which they are applied:

1. A batch is formed only when a worker is free: at most `max_concurrent_batches` run at once.
2. Requests that may share a batch form a group. A group may leave when it fills a batch, when one
   of its calls has begun (unless the items of the call are `separate`), when the queue is full,
   when the scheduler drains, or when the flush rule releases it. A group that may leave may do so
   until a batch takes from it, or one of its calls is cancelled. While a group is held, a free
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
   or blocked.

The caller is the runtime; `now` is its clock (s).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from itertools import chain, count, islice
from typing import Final

from .capacity import Capacity, Room
from .formation import form_batch
from .group import Group, Order, Place
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
        # No step looks at all groups. A group is in `_changed` until the next look, and from then
        # on in `_held`, by the moment at which its linger begins (the linger is equal for all), or
        # in `_ready`, by the numbers of its oldest large and its oldest small request.
        self._changed: dict[Group, None] = {}
        self._held: Order = deque()
        self._ready: tuple[Order, Order] = deque(), deque()
        self._numbers = count(1)  # of requests that enter the queue
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
        self._free = policy.max_concurrent_batches  # workers without a batch
        self.has_room = True  # whether one more batch may run
        self._free_since = AT_ONCE  # since when at least one worker is free (s)
        self._decision_due = False  # the rule must record a decision point at the next `take`
        self._batch_ended = False  # since the rule last learned
        self.draining = False  # whether nothing is held; may be set and reset at any time

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests of which some items still wait."""
        return chain(chain.from_iterable(self._groups.values()), self.blocked)

    def resize(self, batch_size: int) -> None:
        """Change the most items of later batches."""
        self.capacity.batch_size = self._rule.batch_size = batch_size
        self._changed.update(dict.fromkeys(self._groups.values()))

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
        self._expiring.pop(request, None)
        if request.queued:
            self.waiting -= request.size - request.dispatched
            group = self._groups[request.group_key]
            group.withdraw(request)
            self._look_again(group)
        elif request in self.blocked:
            del self.blocked[request]
        else:
            return False
        self._admit()
        return request.dispatched == 0

    def next_expiry(self) -> float:
        """Return the moment at which the next request expires; infinite if none can."""
        for since in self._expiring.values():
            return since + self._queue_timeout
        return NEVER

    def expire(self, now: float) -> list[Request]:
        """Remove the requests that have waited too long, and return them."""
        expired = []
        while self.next_expiry() <= now:
            expired.append(next(iter(self._expiring)))
            self.cancel(expired[-1])
        return expired

    def take(self, now: float) -> Batch | None:
        """Return the next batch, or None if no batch may leave yet: see `next_deadline`."""
        if not self._free:
            return None
        if self._batch_ended or self._decision_due:
            self._batch_ended = False
            # one group is enough: few functions have several that wait
            group = next(iter(self._groups.values()), None)
            if group is None or not (group.begun or group.waiting >= self.capacity.batch_size):
                if group is not None and self._decision_due:
                    outstanding = self.waiting + self.in_flight
                    self._rule.decide(group.key, group.waiting, outstanding, now)
                self._decision_due = False
                self._rule.evaluate()
        leader = self._choose_leader(now) if self.waiting else None
        if leader is None:
            return None
        batch = self._form(leader, now)
        # leading a batch spends the credit; a large call that still waits earns with each batch
        self._credit = QUANTUM + self._credit * (leader.number != self._oldest_large)
        if self.blocked:
            self._admit()
        return batch

    def join(self, key: Hashable, room: Room, now: float) -> list[Batch]:
        """Return rows that join the live rows of a run. Each is a batch, because `batch_size` is 1.

        The run has calls of the group `key`. If the next call to run is of another group, no call
        joins, so that the other group runs once all rows of the run have left.
        """
        rows: list[Batch] = []
        while (
            (leader := self._choose_leader(now)) is not None
            and leader.group_key == key
            and room.admits(leader.longest)
            and (batch := self.take(now)) is not None
        ):
            rows.append(batch)
        return rows

    def next_deadline(self, now: float = NEVER) -> float:
        """Return the moment from which `take` can return a batch.

        The moment is past if `take` can do so now. It is infinite if no batch can leave before
        another call arrives or a batch ends; but for the only worker, idle at `now`, it is the end
        of the linger that began with the free worker: returning callers need not wake it until
        then.
        """
        if not self._groups or not self._free:
            rule = self._rule
            if self._free == 1 and rule.holds and not self.draining:
                until = rule.since(AT_ONCE, self._free_since) + rule.linger
                if until > now:
                    return until
            return NEVER
        if len(self._groups) == 1:
            return self.ready_at(*self._groups.values())
        self._sort_groups(AT_ONCE)
        return AT_ONCE if any(self._ready) else self.ready_at(self._held[0][2])

    def finished(self, batch: Batch, now: float) -> None:
        """Free the worker that ran `batch`, which ended at `now`."""
        batch.ended = now
        longest, capacity = batch.longest, self.capacity
        seconds = now - batch.started
        # equal items may have been computed once
        computed = (batch.fitted and batch.computed) or batch.size
        outstanding = self.waiting + self.in_flight
        self._rule.finished(computed, seconds, outstanding, outstanding - batch.size)
        self._batch_ended = True
        if not self._free:
            self._free_since = now
            self._decision_due = True
        del self.running[batch]
        self._free += 1
        self.has_room = True
        self.in_flight -= batch.size
        for attempt in batch.too_big:
            capacity.too_big(*attempt)
            self.resize(capacity.batch_size)  # fewer items may fill a batch
        if batch.fitted:
            if longest or capacity.varies or computed > capacity.known:
                capacity.fitted(computed, longest)
            if longest and batch.attempts == 1:  # else several calls took the time
                capacity.cost.add(computed * longest, seconds)

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
        if (
            group is None
            or group.ready
            or self.draining
            or not rule.holds
            or self._free > rule.max_free
            or group.begun
            or self._is_full(group)
            or rule.is_complete(self.waiting + self.in_flight, group.waiting)
        ):
            return AT_ONCE
        return rule.since(group.oldest, min(group.held_since, self._free_since)) + rule.linger

    def _fits_queue(self, request: Request) -> bool:
        return not self.waiting or self.waiting + request.size <= self._max_waiting

    def _enqueue(self, request: Request) -> Group:
        key = request.group_key
        group = self._groups.get(key)
        request.number = next(self._numbers)
        if group is None:
            group = self._groups[key] = Group(key)
        self._changed[group] = None
        request.small = request.size <= self.policy.small_batch_threshold
        self.waiting += request.size
        group.queues[request.small][request] = None
        if request.lengths is not None:
            group.note_lengths(request)
        group.waiting += request.size
        request.queued = True
        return group

    def _admit(self) -> None:
        """Queue as many blocked requests as there is room for."""
        while self.blocked:
            request = next(iter(self.blocked))
            if not self._fits_queue(request):
                return
            self._enqueue(request)  # first: an exception that interrupts must not lose the request
            del self.blocked[request]
            self.admitted[request] = None

    def _is_full(self, group: Group) -> bool:
        """Return whether `group` fills a batch, or the queue has no room for more items."""
        capacity, waiting = self.capacity, group.waiting
        return (
            waiting >= capacity.batch_size
            or (capacity.varies and waiting >= capacity.max_items(group.longest))
            or self.waiting >= self._max_waiting
            or bool(self.blocked)
        )

    def _sort_groups(self, now: float) -> None:
        """Place the groups that have changed, and those that need not be held after `now`."""
        changed, held = [*reversed(self._changed)], self._held
        self._changed.clear()
        while changed or (held and self.ready_at(held[0][2]) <= now):
            group = changed.pop() if changed else held[0][2]
            if self.ready_at(group) <= now:
                group.ready = True
                queues = zip(self._ready, group.queues, strict=True)
                firsts = [
                    (order, (first.number, first))
                    for order, queue in queues
                    for first in islice(queue, 1)
                ]
                self._place(group, *firsts)
            else:
                # the linger counts from the moment when this worker became free, even if another
                # group takes the worker
                group.held_since = min(group.held_since, self._free_since)
                begins = self._rule.since(group.oldest, group.held_since)
                self._place(group, (held, (begins, id(group), group)))

    def _place(self, group: Group, *places: Place) -> None:
        """Move `group` to these orders, with an entry for each."""
        for order, entry in group.places:
            del order[bisect_left(order, entry)]
        for order, entry in places:
            insort(order, entry)
        group.places = places

    def _look_again(self, group: Group) -> None:
        """Take `group` out of the orders, because a batch or a call has left it."""
        group.ready = False
        self._place(group)
        if group.waiting:
            self._changed[group] = None
        else:
            self._changed.pop(group, None)
            del self._groups[group.key]

    def _choose_leader(self, now: float) -> Request | None:
        """Return the request that leads the next batch; None if no group may leave."""
        if len(self._groups) == 1:  # the usual case: no order is needed
            group = next(iter(self._groups.values()))
            if self._rule.holds and self.ready_at(group) > now:
                group.held_since = min(group.held_since, self._free_since)
                return None
            large = next(iter(group.large)) if group.large else None
            small = next(iter(group.small)) if group.small else None
        else:
            self._sort_groups(now)
            large, small = [order[0][1] if order else None for order in self._ready]
        number = 0 if large is None else large.number
        if number != self._oldest_large:
            self._oldest_large, self._credit = number, 0.0
        if large is None:
            return small
        # whether the oldest large call has earned a batch, or all that it still needs
        room = self.capacity.max_items(large.longest)
        is_due = self._credit * room >= min(large.size - large.dispatched, room)
        return large if small is None or is_due else small

    def _form(self, leader: Request, now: float) -> Batch:
        """Return the batch that `leader` leads, and remove its items from the queue."""
        group, rule, expiring = self._groups[leader.group_key], self._rule, self._expiring
        reason: FlushReason = "full"
        if not self._is_full(group):
            at_once = group.begun or not rule.holds or self._free > rule.max_free
            reason = "drain" if self.draining else "eager" if at_once else rule.reason
        slices, size, longest = form_batch(leader, group, self.capacity)
        waits: list[float] = []
        batch = Batch(slices, size, reason, now, longest, waits)
        self.running[batch] = None
        self._free -= 1
        self.has_room = self._free > 0
        self.in_flight += size
        self.waiting -= size
        group.waiting -= size
        group.held_since = NEVER
        for request, start, stop in slices:
            before = request.dispatched
            request.dispatched = taken = before + stop - start
            if taken == request.size:
                del group.queues[request.small][request]
                request.queued = False
                if before:
                    group.begun -= not request.separate
                    continue
            elif before:
                continue
            else:
                group.begun += not request.separate
            waits.append(now - request.arrived)
            if expiring:
                expiring.pop(request, None)
        if group.waiting or group.places:
            self._look_again(group)
        else:
            del self._groups[group.key], self._changed[group]
        return batch
