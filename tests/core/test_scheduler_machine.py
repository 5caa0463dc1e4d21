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
    request: Request
    number: int  # index in the order of arrival
    arrived: float
    small: bool
    waiting: int  # items not handed out yet
    handed_out: int = 0  # items handed out so far, from the first on


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
    def expiries(self) -> dict[Call, float]:
        """Moments at which calls expire unless they begin."""
        limit = self.policy.queue_timeout_ms
        calls = [call for call in (*self.queue, *self.line) if not call.handed_out]
        return {} if limit is None else {call: call.arrived + limit / 1e3 for call in calls}

    @property
    def expiry(self) -> float:
        return min(self.expiries.values(), default=NEVER)

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
        moments = [self.ready_at(group)[0] for group in self.groups] if self.has_room else []
        return min(moments, default=NEVER)

    def filled(self, leader: Call) -> list[tuple[Request, int, int]]:
        """Return the slices of a batch behind `leader`.

        The small calls of its group follow, then the large calls, in the order of arrival.
        """
        calls = [each for each in self.queue if each.request.group_key == leader.request.group_key]
        room = self.batch_size
        slices: list[tuple[Request, int, int]] = []
        for call in sorted(calls, key=lambda c: (c is not leader, not c.small, c.number)):
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
        self.overtaken = 0  # batches in a row led by a large call although a small call could lead

    @rule(size=sizes, group=groups)
    def submit(self, size: int, group: int) -> None:
        model, request = self.model, Request(list(range(size)), size, group, waker=None)
        small = size <= model.policy.small_batch_threshold
        call = Call(request, len(model.calls), self.now, small, waiting=size)
        model.calls.append(call)
        admitted = not model.line and model.has_room_for(call)
        assert self.real.admits(request) == admitted
        (model.queue if admitted else model.line).append(call)
        of = self.real.submit(request, self.now)
        assert self.real.ready_at(of) == (model.ready_at(group)[0] if admitted else AT_ONCE)
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
        calls = [*self.model.queue, *self.model.line]
        self.cancel(calls[pick % len(calls)])

    def cancel(self, call: Call) -> None:
        assert self.real.cancel(call.request) is (call.waiting == call.request.size)
        self.gone(call)

    def gone(self, call: Call) -> None:
        if call.waiting and call not in self.model.line:
            self.model.released.discard(call.request.group_key)
        if call.waiting:
            (self.model.line if call in self.model.line else self.model.queue).remove(call)
            call.waiting = 0
            if call.request.group_key not in self.model.groups:
                self.model.held_since.pop(call.request.group_key, None)
        self.model.let_in()

    @rule()
    def expire(self) -> None:
        """Expire the calls that have waited too long, the oldest first."""
        expired = [call for call, moment in self.model.expiries.items() if moment <= self.now]
        expired.sort(key=lambda call: call.number)
        assert self.real.expire(self.now) == [call.request for call in expired]
        for call in expired:
            self.gone(call)

    @rule(seconds=st.sampled_from([0.0, 0.0001, 0.001, 0.0055, 0.1, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.now < self.model.deadline < NEVER)
    @rule(almost=st.booleans())
    def wait_until_the_deadline(self, almost: bool) -> None:
        moment = self.model.deadline
        self.now = max(self.now, math.nextafter(moment, -math.inf)) if almost else moment
        self.take()
        assert not almost or self.now < self.model.deadline

    @rule()
    def take(self) -> None:
        model, deadline = self.model, self.real.next_deadline()
        assert deadline == model.deadline
        model.look(AT_ONCE)
        model.look(self.now)
        allowed = {group for group in model.groups if model.ready_at(group)[0] <= self.now}
        may_lead = [call for call in model.queue if call.request.group_key in allowed]
        batch = self.real.take(self.now)
        assert (batch is not None) == (deadline <= self.now)
        if batch is None:
            return
        leader = next(call for call in may_lead if call.request is batch.slices[0][0])
        first = next(call for call in may_lead if call.small == leader.small)
        assert leader is first, "first come, first served"
        assert batch.reason == model.ready_at(leader.request.group_key)[1]
        assert batch.slices == model.filled(leader)
        assert batch.size == sum(stop - start for _, start, stop in batch.slices)
        assert batch.size <= model.batch_size
        assert batch.started == self.now
        small_might = any(call.small for call in may_lead)
        self.overtaken = self.overtaken + 1 if small_might and not leader.small else 0
        assert self.overtaken <= 2
        by_request = {call.request: call for call in model.queue}
        for request, start, stop in batch.slices:
            model.hand_out(by_request[request], stop - start)
        model.released.discard(leader.request.group_key)
        model.held_since.pop(leader.request.group_key, None)
        model.running.append(batch)
        model.let_in()

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

    @rule()
    def close_or_reopen(self) -> None:
        self.real.draining = self.model.draining = not self.model.draining

    @invariant()
    def counts_and_moments_agree(self) -> None:
        real, model = self.real, self.model
        assert real.waiting == model.waiting
        assert len(real.blocked) == len(model.line)
        assert real.waiting or not real.blocked
        limit = model.policy.max_queue_size
        assert limit is None or real.waiting <= limit or len(model.queue) == 1
        assert real.in_flight == sum(batch.size for batch in model.running)
        waiting = list(real)
        assert len(waiting) == len(model.queue) + len(model.line)
        assert set(waiting) == {call.request for call in (*model.queue, *model.line)}
        assert list(real.running) == model.running
        assert set(real._groups) == model.groups
        assert real.has_room == model.has_room
        assert real.next_deadline() == model.deadline
        model.look(AT_ONCE)
        assert real.next_expiry() == model.expiry

    def teardown(self) -> None:
        """Check that all waiting calls leave after closing, and that the scheduler is empty."""
        real, model = self.real, self.model
        real.draining = model.draining = True
        while model.running or model.queue:
            while model.queue and model.has_room:
                before = sum(call.waiting for call in model.calls)
                self.take()
                assert sum(call.waiting for call in model.calls) < before
            self.finish(0, 0.0)
            self.counts_and_moments_agree()
        assert not any([real.waiting, real.in_flight, real._groups, [*real], len(real.blocked)])
        assert real.next_deadline() == real.next_expiry() == NEVER


@pytest.mark.parametrize("histories", [50, pytest.param(400, marks=pytest.mark.slow)])
def test_the_scheduler_does_as_a_naive_model(histories: int) -> None:
    chosen = settings(
        max_examples=histories, stateful_step_count=60, derandomize=True, deadline=None
    )
    run_state_machine_as_test(SchedulerMachine, settings=chosen)
