"""Random histories of the real scheduler, compared step by step with a model.

The model is a list of calls in the order of arrival, simple enough to be obviously right. Each
answer of the scheduler is compared with a scan of that list. The counts are compared after every
step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from batched._core.linger import AT_ONCE, NEVER, Eager, FlushReason, Window
from batched._core.policy import BatchPolicy
from batched._core.scheduler import Batch, Request, Scheduler

pytestmark = [pytest.mark.once, pytest.mark.timeout(300)]

policies = st.builds(
    BatchPolicy,
    batch_size=st.sampled_from([5, 3, 8, 2, 16, 32, 1]),
    timeout_ms=st.sampled_from([1000, None, 1e6, 5.5, 1, 0]),
    small_batch_threshold=st.sampled_from([1, 3, 8, 0]),
    # "auto" depends on all earlier batches: see test_linger
    flush=st.sampled_from(["window", "window", "window", "eager"]),
    max_concurrent_batches=st.integers(1, 3),
    max_queue_size=st.sampled_from([None, None, None, None, 20, 7, 1]),
    queue_timeout_ms=st.sampled_from([None, 1, 5.5, 1000]),
)
sizes = st.sampled_from([1, 1, 1, 2, 3, 5, 9, 10, 17, 40])
groups = st.integers(0, 11) | st.integers(0, 1)
picks = st.integers(0, 10**6)  # index of a call or batch, modulo their number


@dataclass(eq=False)
class Call:
    """Call in the model."""

    request: Request
    number: int  # index in the order of arrival
    arrived: float
    small: bool
    waiting: int  # items not handed out yet
    handed_out: int = 0  # items handed out so far, from the first on
    cancelled: bool = False


@dataclass
class Watch:
    """Oldest large call that may leave, and the number of batches since then."""

    call: Call
    owed: int  # items that waited at that moment
    batches: int = 0


@dataclass
class Model:
    policy: BatchPolicy
    batch_size: int
    calls: list[Call] = field(default_factory=list)  # all calls ever made
    queue: list[Call] = field(default_factory=list)  # calls with waiting items
    line: list[Call] = field(default_factory=list)  # calls that wait for room in the queue
    running: list[Batch] = field(default_factory=list)
    released: set[Any] = field(default_factory=set)  # groups that may leave, whatever happens
    counts_from_free: bool = False  # whether time behind a busy worker does not count
    free_since: float = AT_ONCE  # since when a worker is free
    held_since: dict[Any, float] = field(default_factory=dict)  # `free_since` when first held
    draining: bool = False

    def look(self, now: float) -> None:
        """Release the groups that may leave, if there are several, and hold the others."""
        if not self.has_room:
            return
        may = {group for group in self.groups if self.ready_at(group)[0] <= now}
        if len(self.groups) > 1:
            self.released |= may
        if len(self.groups) > 1 or now > AT_ONCE:
            for group in self.groups - may:
                self.held_since.setdefault(group, self.free_since)

    def hand_out(self, call: Call, items: int) -> None:
        call.handed_out += items
        call.waiting -= items
        if not call.waiting:
            self.queue.remove(call)

    @property
    def timeout(self) -> float:
        return 0.005 if self.policy.timeout_ms is None else self.policy.timeout_ms / 1e3

    @property
    def waiting(self) -> int:
        return sum(call.waiting for call in self.queue)

    def has_room_for(self, call: Call) -> bool:
        return not self.queue or self.waiting + call.waiting <= (
            self.policy.max_queue_size or math.inf
        )

    def let_in(self) -> None:
        while self.line and self.has_room_for(self.line[0]):
            self.queue.append(self.line.pop(0))

    @property
    def full(self) -> bool:
        return bool(self.line) or self.waiting >= (self.policy.max_queue_size or math.inf)

    @property
    def hopeful(self) -> list[Call]:
        """Calls that expire unless they begin."""
        return (
            [call for call in (*self.queue, *self.line) if not call.handed_out]
            if self.policy.queue_timeout_ms is not None
            else []
        )

    @property
    def expiry(self) -> float:
        return min(
            (call.arrived + (self.policy.queue_timeout_ms or 0.0) / 1e3 for call in self.hopeful),
            default=NEVER,
        )

    @property
    def groups(self) -> set[Any]:
        return {call.request.group_key for call in self.queue}

    def ready_at(self, group: object) -> tuple[float, FlushReason]:
        calls = [call for call in self.queue if call.request.group_key == group]
        if sum(call.waiting for call in calls) >= self.batch_size or self.full:
            return AT_ONCE, "full"
        if self.draining:
            return AT_ONCE, "drain"
        if self.policy.flush != "window" or any(call.handed_out for call in calls):
            return AT_ONCE, "eager"
        oldest = min(call.arrived for call in calls)
        if self.counts_from_free:
            oldest = max(oldest, self.held_since.get(group, self.free_since))
        return AT_ONCE if group in self.released else oldest + self.timeout, "timeout"

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.policy.max_concurrent_batches

    @property
    def deadline(self) -> float:
        return (
            min((self.ready_at(group)[0] for group in self.groups), default=NEVER)
            if self.has_room
            else NEVER
        )

    def filled(self, leader: Call) -> list[tuple[Request, int, int]]:
        """Return the slices of a batch behind `leader`.

        The small calls of its group follow, then the large calls, in the order of arrival.
        """
        others = [
            call
            for call in self.queue
            if call.request.group_key == leader.request.group_key and call is not leader
        ]
        room = self.batch_size
        slices: list[tuple[Request, int, int]] = []
        for call in (leader, *sorted(others, key=lambda call: (not call.small, call.number))):
            items = min(room, call.waiting)
            room -= items
            if items:
                slices.append((call.request, call.handed_out, call.handed_out + items))
        return slices


class FromFree(Window):
    """Rule whose linger begins when a worker is free."""

    since = Eager.since


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(policy=policies, counts_from_free=st.booleans())
    def begin(self, policy: BatchPolicy, counts_from_free: bool) -> None:
        self.real = Scheduler(policy)
        self.model = Model(policy, policy.batch_size)
        if policy.flush == "window" and counts_from_free:  # as "auto", but with a fixed linger
            self.real._rule = FromFree(self.model.timeout)
            self.model.counts_from_free = True
        self.now = 0.0
        self.watch: Watch | None = None
        self.overtaken = 0  # batches in a row led by a large call although a small call could lead

    # ------------------------------------------------------------ steps

    @rule(size=sizes, group=groups)
    def submit(self, size: int, group: int) -> None:
        request = Request(list(range(size)), size, group, waker=None)
        call = Call(
            request,
            len(self.model.calls),
            self.now,
            size <= self.model.policy.small_batch_threshold,
            waiting=size,
        )
        self.model.calls.append(call)
        admitted = not self.model.line and self.model.has_room_for(call)
        assert self.real.admits(request) == admitted
        (self.model.queue if admitted else self.model.line).append(call)
        of = self.real.submit(request, self.now)
        assert self.real.ready_at(of) == (self.model.ready_at(group)[0] if admitted else AT_ONCE)
        assert request.arrived == self.now

    @precondition(lambda self: len(self.model.queue) <= 2 * self.model.policy.batch_size)
    @rule(count=st.sampled_from([2, 3, 5, 10, 12, 40]), group=groups, apart=st.integers(0, 2))
    def submit_many(self, count: int, group: int, apart: int) -> None:
        for number in range(count):
            self.submit(1, (group + number * apart) % 12)

    @precondition(lambda self: self.model.calls)
    @rule(pick=picks)
    def cancel_any(self, pick: int) -> None:
        """Cancel a call that waits, runs, has ended or was cancelled."""
        self.cancel(self.model.calls[-1 - pick % len(self.model.calls)])

    @precondition(lambda self: self.model.queue)
    @rule(pick=picks)
    def cancel_one_that_waits(self, pick: int) -> None:
        self.cancel(self.model.queue[pick % len(self.model.queue)])

    def cancel(self, call: Call) -> None:
        assert self.real.cancel(call.request) is (call.waiting == call.request.size)
        self.gone(call)

    def gone(self, call: Call) -> None:
        if call.waiting and call not in self.model.line:
            self.model.released.discard(call.request.group_key)
        if call.waiting:
            (self.model.line if call in self.model.line else self.model.queue).remove(call)
            call.waiting, call.cancelled = 0, True
            if call.request.group_key not in self.model.groups:
                self.model.held_since.pop(call.request.group_key, None)
        self.model.let_in()

    @precondition(lambda self: self.model.line)
    @rule(pick=picks)
    def cancel_one_in_line(self, pick: int) -> None:
        self.cancel(self.model.line[pick % len(self.model.line)])

    @rule()
    def expire(self) -> None:
        """Expire the calls that have waited too long, the oldest first."""
        expired = [
            call
            for call in self.model.hopeful
            if call.arrived + (self.model.policy.queue_timeout_ms or 0.0) / 1e3 <= self.now
        ]
        assert self.real.expire(self.now) == [
            call.request for call in sorted(expired, key=lambda call: call.number)
        ]
        for call in expired:
            self.gone(call)

    @precondition(lambda self: self.now < self.model.expiry < NEVER)
    @rule()
    def wait_until_one_expires(self) -> None:
        self.now = max(self.now, math.nextafter(self.model.expiry, -math.inf))
        assert self.real.expire(self.now) == []
        self.now = self.model.expiry
        self.expire()

    @rule(seconds=st.sampled_from([0.0, 0.0001, 0.001, 0.0055, 0.1, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.now < self.model.deadline < NEVER)
    @rule()
    def wait_almost_until_the_deadline(self) -> None:
        self.now = max(self.now, math.nextafter(self.model.deadline, -math.inf))
        self.take()
        assert self.now < self.model.deadline

    @precondition(lambda self: self.now < self.model.deadline < NEVER)
    @rule()
    def wait_until_the_deadline(self) -> None:
        self.now = self.model.deadline
        self.take()

    @rule()
    def take(self) -> None:
        deadline = self.real.next_deadline()
        assert deadline == self.model.deadline
        self.model.look(AT_ONCE)
        self.model.look(self.now)
        allowed = {
            group for group in self.model.groups if self.model.ready_at(group)[0] <= self.now
        }
        if self.model.has_room:
            self.look_at_the_oldest_large_call(allowed)
        batch = self.real.take(self.now)
        assert (batch is not None) == (deadline <= self.now)
        if batch is None:
            return
        by_request = {call.request: call for call in self.model.queue}
        leader = by_request[batch.slices[0][0]]
        assert leader.request.group_key in allowed
        assert leader is next(
            call
            for call in self.model.queue
            if call.request.group_key in allowed and call.small == leader.small
        )  # first come, first served
        assert batch.reason == self.model.ready_at(leader.request.group_key)[1]
        assert [
            (request, start, stop) for request, start, stop in batch.slices
        ] == self.model.filled(leader)
        assert (
            batch.size
            == sum(stop - start for _, start, stop in batch.slices)
            <= self.model.batch_size
        )
        assert batch.started == self.now

        small_might = any(
            call.small and call.request.group_key in allowed for call in self.model.queue
        )
        self.overtaken = self.overtaken + 1 if small_might and not leader.small else 0
        assert self.overtaken <= 2
        for request, start, stop in batch.slices:
            assert start == by_request[request].handed_out
            self.model.hand_out(by_request[request], stop - start)
        self.model.released.discard(leader.request.group_key)
        self.model.held_since.pop(leader.request.group_key, None)
        self.model.running.append(batch)
        self.model.let_in()
        if self.watch is not None and self.watch.call.waiting:
            self.watch.batches += 1
            assert self.watch.batches <= math.ceil(4 * self.watch.owed / self.model.batch_size), (
                "one more must finish it"
            )

    def look_at_the_oldest_large_call(self, allowed: set[Any]) -> None:
        oldest = next(
            (
                call
                for call in self.model.queue
                if not call.small and call.request.group_key in allowed
            ),
            None,
        )
        if oldest is None:
            self.watch = None
        elif self.watch is None or self.watch.call is not oldest:
            self.watch = Watch(oldest, owed=oldest.waiting)

    @precondition(lambda self: self.model.running)
    @rule(pick=picks, seconds=st.sampled_from([0.0, 0.001, 0.1]))
    def finish(self, pick: int, seconds: float) -> None:
        self.now += seconds
        if not self.model.has_room:
            self.model.free_since = self.now
        batch = self.model.running.pop(pick % len(self.model.running))
        self.real.finished(batch, self.now)
        assert batch.ended == self.now

    @rule(batches=st.integers(1, 20))
    def run(self, batches: int) -> None:
        """Take and finish batches in turn, so that long calls end."""
        for _ in range(batches):
            if not self.model.has_room:
                self.finish(0, 0.0)
            deadline = self.real.next_deadline()
            self.model.look(AT_ONCE)
            if deadline > self.now:
                break
            self.take()

    @rule(batch_size=st.sampled_from([1, 2, 3, 5, 16, 32]))
    def resize(self, batch_size: int) -> None:
        self.real.resize(batch_size)
        self.model.batch_size = batch_size
        self.watch = None

    @precondition(lambda self: not self.model.draining)
    @rule()
    def close(self) -> None:
        self.real.draining = True
        self.model.draining = True

    @precondition(lambda self: self.model.draining)
    @rule()
    def reopen(self) -> None:
        self.real.draining = False
        self.model.draining = False

    # ------------------------------------------------------------ invariants

    @invariant()
    def counts_agree(self) -> None:
        assert self.real.waiting == self.model.waiting
        assert len(self.real.blocked) == len(self.model.line)
        assert self.real.waiting or not self.real.blocked
        limit = self.model.policy.max_queue_size
        assert limit is None or self.real.waiting <= limit or len(self.model.queue) == 1
        assert self.real.in_flight == sum(batch.size for batch in self.model.running)
        waiting = list(self.real)
        assert len(waiting) == len(self.model.queue) + len(self.model.line)
        assert set(waiting) == {call.request for call in (*self.model.queue, *self.model.line)}
        assert list(self.real.running) == self.model.running
        assert set(self.real._groups) == self.model.groups

    @invariant()
    def deadlines_agree(self) -> None:
        assert self.real.has_room == self.model.has_room
        assert len(self.real.running) <= self.model.policy.max_concurrent_batches
        assert self.real.next_deadline() == self.model.deadline
        self.model.look(AT_ONCE)
        assert self.real.next_expiry() == self.model.expiry

    def teardown(self) -> None:
        """Check that all waiting calls leave after closing, and that the scheduler is empty."""
        self.real.draining = True
        self.model.draining = True
        while self.model.running or self.model.queue:
            while self.model.queue and self.model.has_room:
                before = sum(call.waiting for call in self.model.calls)
                self.take()
                assert sum(call.waiting for call in self.model.calls) < before
            self.finish(0, 0.0)
            self.counts_agree()
        real = self.real
        assert not any([real.waiting, real.in_flight, real._groups, [*real], len(real.blocked)])
        assert real.next_deadline() == real.next_expiry() == NEVER
        assert all(
            call.cancelled or call.handed_out == call.request.size for call in self.model.calls
        )


@pytest.mark.parametrize("histories", [50, pytest.param(400, marks=pytest.mark.slow)])
def test_the_scheduler_does_as_a_naive_model(histories: int) -> None:
    chosen = settings(
        max_examples=histories, stateful_step_count=60, derandomize=True, deadline=None
    )
    run_state_machine_as_test(SchedulerMachine, settings=chosen)
