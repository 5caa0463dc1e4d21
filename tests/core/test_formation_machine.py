"""Random histories with lengths, budgets, costs and memory errors, compared with a model.

The model sorts all items whenever a batch is formed, and chooses them one by one. The real capacity
decides how many items fit; it has tests of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

from batched._core.length_index import LOOK_AHEAD
from batched._core.linger import AT_ONCE, NEVER
from batched._core.policy import BatchPolicy
from batched._core.scheduler import Batch, Request, Scheduler

pytestmark = [pytest.mark.once, pytest.mark.timeout(300)]

policies = st.builds(
    BatchPolicy,
    batch_size=st.sampled_from([8, 4, 3, 2, 1]),
    timeout_ms=st.sampled_from([1000, 1, 0]),
    small_batch_threshold=st.sampled_from([1, 3, 8, 0, 100]),
    flush=st.sampled_from(["window", "eager"]),
    max_batch_tokens=st.sampled_from([None, 20, 60, 150, 1]),
    max_concurrent_batches=st.integers(1, 3),
)
lengths = st.sampled_from([1, 2, 5, 9, 10, 11, 17, 30, 31, 70])
groups = st.sampled_from("aab")
picks = st.integers(0, 10**6)  # index of a call or batch, modulo their number


@dataclass(eq=False)
class Call:
    """Call in the model."""

    request: Request
    number: int  # in the order of arrival
    small: bool
    waiting: list[int]  # positions not handed out yet
    shelved: bool = False
    owed: int = 0  # batches led by small calls within which it must begin
    led: int = 0  # such batches so far, while it might have left

    def length(self, position: int) -> int:
        assert self.request.lengths is not None
        return self.request.lengths[position]

    @property
    def longest(self) -> int:
        return self.length(self.waiting[0])


Item = tuple[Call, int]


@dataclass
class Chosen:
    """A batch to which items are added one by one."""

    real: Scheduler
    items: set[Item] = field(default_factory=set)
    longest: int = 0
    padding: int = 0

    def cost_of(self, item: Item) -> float:
        """Return the padding that `item` would add; infinite if it does not fit."""
        length, size = item[0].length(item[1]), len(self.items)
        if item in self.items or size >= self.real.capacity.max_items(max(length, self.longest)):
            return math.inf
        return max(length - self.longest, 0) * size + max(self.longest - length, 0)

    def add(self, candidates: Sequence[Item], nearest: bool = True) -> None:
        """Add the items that need the least padding, or in their order, as long as they fit.

        `candidates` are sorted, longest first.
        """
        left = [each for each in candidates if each not in self.items]
        longer = [each for each in left if nearest and each[0].length(each[1]) > self.longest]
        shorter = left[len(longer) :]
        while some := [*shorter[:1], *longer[-1:]]:
            item = min(some, key=self.cost_of)
            cost = self.cost_of(item)
            if cost == math.inf or self.padding + cost > self.real.capacity.cost.fixed_size:
                return
            (shorter if item in shorter[:1] else longer).remove(item)
            self.padding += int(cost)
            self.longest = max(self.longest, item[0].length(item[1]))
            self.items.add(item)


class FormationMachine(RuleBasedStateMachine):
    @initialize(
        policy=policies,
        memory=st.sampled_from([math.inf, math.inf, 300, 100, 30]),
        batch_in_cells=st.sampled_from([20, 100, 1, math.inf]),
    )
    def begin(self, policy: BatchPolicy, memory: float, batch_in_cells: float) -> None:
        self.policy = policy
        self.real = Scheduler(policy)
        self.real.capacity.cost.fixed_size = batch_in_cells
        self.memory = memory  # most items times the longest of them that fit
        self.calls: list[Call] = []  # all calls ever made
        self.queue: list[Call] = []  # calls with waiting items, in the order of arrival
        self.running: list[Batch] = []
        self.now = 0.0
        self.draining = False
        self.heir: Call | None = None
        self.heir_owed = 0  # batches within which the heir must be finished
        self.in_a_row = 0  # batches that large calls led although a small one might have

    # ------------------------------------------------------------ the model

    def of(self, group: object) -> list[Call]:
        return [call for call in self.queue if call.request.group_key == group]

    def may_leave(self, group: object) -> bool:
        calls = self.of(group)
        waiting = sum(len(call.waiting) for call in calls)
        if (
            waiting >= self.real.capacity.max_items(max(call.longest for call in calls))
            or self.draining
            or self.policy.flush != "window"
        ):
            return True
        return (
            any(call.request.dispatched for call in calls)
            or min(call.request.arrived for call in calls) + self.policy.timeout <= self.now
        )

    def alone(self, call: Call) -> int:
        """Return the number of batches that its waiting items would need alone."""
        left, batches = list(call.waiting), 0
        while left:
            chosen = Chosen(self.real, longest=call.length(left[0]))
            chosen.add([(call, position) for position in left], nearest=False)
            left = left[len(chosen.items) :]
            batches += 1
        return batches

    def note_owed(self) -> None:
        """Start counting anew, after capacity has changed."""
        ahead = 0
        for call in self.queue:
            if call.small:
                call.owed, call.led = ahead + 1, 0
                ahead += self.alone(call)
        if self.heir is not None:
            self.heir_owed = 4 * self.alone(self.heir) + 1

    def shelf(self, calls: Sequence[Call]) -> list[Item]:
        """Return the items of the small calls next in line, longest first."""
        on = [call for call in calls if call.small and call.shelved]
        count = sum(len(call.waiting) for call in on)
        for call in calls:
            if call.small and not call.shelved and count < LOOK_AHEAD * self.policy.batch_size:
                call.shelved = True
                count += len(call.waiting)
        items = [
            (call, position)
            for call in calls
            if call.small and call.shelved
            for position in call.waiting
        ]
        return sorted(items, key=lambda item: (-item[0].length(item[1]), item[0].number, item[1]))

    def chosen(self, leader: Call) -> Chosen:
        calls = self.of(leader.request.group_key)
        chosen = Chosen(self.real, longest=leader.longest)
        chosen.add([(leader, position) for position in leader.waiting], nearest=False)
        chosen.add(self.shelf(calls))
        for call in calls:
            if not call.small and call is not leader:
                chosen.add([(call, position) for position in call.waiting])
        return chosen

    # ------------------------------------------------------------ steps

    @rule(sizes=st.lists(lengths, min_size=1, max_size=20), group=groups)
    def submit(self, sizes: list[int], group: str) -> None:
        request = Request(
            list(sizes), len(sizes), group, waker=None, lengths=sorted(sizes, reverse=True)
        )
        call = Call(
            request,
            len(self.calls),
            request.size <= self.policy.small_batch_threshold,
            list(range(request.size)),
        )
        if call.small:
            call.owed = sum(self.alone(other) for other in self.queue if other.small) + 1
        self.calls.append(call)
        self.queue.append(call)
        of = self.real.submit(request, self.now)
        assert (self.real.ready_at(of) <= self.now) == self.may_leave(group)

    @precondition(lambda self: len(self.queue) <= 150)
    @rule(sizes=st.lists(lengths, min_size=10, max_size=80), group=groups)
    def submit_many(self, sizes: list[int], group: str) -> None:
        for length in sizes:
            self.submit([length], group)

    @precondition(lambda self: self.queue)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        call = self.queue.pop(pick % len(self.queue))
        assert self.real.cancel(call.request) is (len(call.waiting) == call.request.size)
        call.waiting = []

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.5, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        allowed = {
            group
            for group in {call.request.group_key for call in self.queue}
            if self.may_leave(group)
        }
        has_room = len(self.running) < self.policy.max_concurrent_batches
        if has_room:
            oldest = next(
                (
                    call
                    for call in self.queue
                    if not call.small and call.request.group_key in allowed
                ),
                None,
            )
            if oldest is not self.heir:
                self.heir = oldest
                self.heir_owed = 4 * self.alone(oldest) + 1 if oldest is not None else 0
        batch = self.real.take(self.now)
        assert (batch is not None) == bool(has_room and allowed)
        if batch is None:
            return
        leader = next(call for call in self.queue if call.request is batch.slices[0][0])
        assert leader is next(
            call
            for call in self.queue
            if call.request.group_key in allowed and call.small == leader.small
        )
        expected = self.chosen(leader)
        self.check_slices(batch, expected)
        assert batch.size == len(expected.items) <= self.real.capacity.max_items(batch.longest)
        self.check_waiting(leader, allowed)
        for call, position in expected.items:
            call.waiting.remove(position)
        self.queue = [call for call in self.queue if call.waiting]
        self.running.append(batch)
        self.heir_owed -= 1
        if self.heir is not None:
            assert self.heir_owed >= (1 if self.heir.waiting else 0)

    def check_slices(self, batch: Batch, expected: Chosen) -> None:
        spelled = [
            (request, position)
            for request, start, stop in batch.slices
            for position in range(start, stop)
        ]
        assert len(spelled) == len(set(spelled))
        assert set(spelled) == {(call.request, position) for call, position in expected.items}
        assert batch.longest == expected.longest
        ends = {(request, stop) for request, _, stop in batch.slices}
        assert not any((request, start) in ends for request, start, _ in batch.slices), (
            "neighbours are one slice"
        )

    def check_waiting(self, leader: Call, allowed: set[Any]) -> None:
        small_might = any(call.small and call.request.group_key in allowed for call in self.queue)
        self.in_a_row = self.in_a_row + 1 if small_might and not leader.small else 0
        assert self.in_a_row <= 2
        if leader.small:
            for call in self.queue:
                if (
                    call.small
                    and call.request.group_key in allowed
                    and len(call.waiting) == call.request.size
                ):
                    call.led += 1
                    assert call.led <= call.owed

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        batch = self.running.pop(pick % len(self.running))
        items, longest = batch.size, batch.longest
        while items * longest > self.memory and len(batch.too_big) < 4:
            batch.too_big = [*batch.too_big, (items, longest)]
            items = (items + 1) // 2
        batch.fitted = not batch.too_big
        self.real.finished(batch, self.now)
        if batch.too_big:
            self.note_owed()

    @rule(batches=st.integers(1, 20))
    def run(self, batches: int) -> None:
        """Run batches as a worker that is always there, so that deep queues come to their end."""
        for _ in range(batches):
            if len(self.running) == self.policy.max_concurrent_batches:
                self.finish(0)
            if self.real.next_deadline() > self.now:
                break
            self.take()

    @rule(draining=st.booleans())
    def close_or_reopen(self, draining: bool) -> None:
        self.draining = draining
        self.real.draining = draining

    # ------------------------------------------------------------ invariants

    @invariant()
    def counts_agree(self) -> None:
        assert self.real.waiting == sum(len(call.waiting) for call in self.queue)
        assert self.real.in_flight == sum(batch.size for batch in self.running)
        waiting = list(self.real)
        assert len(waiting) == len(self.queue)
        assert set(waiting) == {call.request for call in self.queue}
        assert set(self.real._groups) == {call.request.group_key for call in self.queue}
        for call in self.queue:
            assert [
                position
                for start, stop in call.request.remaining.spans
                for position in range(start, stop)
            ] == call.waiting
            assert call.request.dispatched == call.request.size - len(call.waiting)

    @invariant()
    def deadlines_agree(self) -> None:
        ready = any(
            self.may_leave(group) for group in {call.request.group_key for call in self.queue}
        )
        has_room = len(self.running) < self.policy.max_concurrent_batches
        assert (self.real.next_deadline() <= self.now) == (ready and has_room)

    def teardown(self) -> None:
        """Check that all waiting calls leave after closing, and that the scheduler is empty."""
        self.close_or_reopen(True)
        while self.running or self.queue:
            while self.queue and len(self.running) < self.policy.max_concurrent_batches:
                assert self.real.next_deadline() == AT_ONCE
                self.take()
            self.finish(0)
            self.counts_agree()
        assert (self.real.waiting, self.real.in_flight, self.real._groups, list(self.real)) == (
            0,
            0,
            {},
            [],
        )
        assert self.real.next_deadline() == NEVER
        assert all(not request.queued for request in (call.request for call in self.calls))


@pytest.mark.parametrize("histories", [20, pytest.param(120, marks=pytest.mark.slow)])
def test_batches_by_length_keep_the_rules_of_the_scheduler(histories: int) -> None:
    chosen = settings(
        max_examples=histories, stateful_step_count=40, derandomize=True, deadline=None
    )
    run_state_machine_as_test(FormationMachine, settings=chosen)
