"""Random histories with lengths, budgets and costs, compared with a model.

The model sorts all items whenever a batch is formed, and chooses them one by one. The real capacity
decides how many items fit; it has tests of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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

from batched._core.capacity import LARGE, MOST_PADDING
from batched._core.length_index import LOOK_AHEAD
from batched._core.policy import BatchPolicy
from batched._core.scheduler import Batch, Request, Scheduler

pytestmark = [pytest.mark.once, pytest.mark.timeout(300)]

policies = st.builds(
    BatchPolicy,
    batch_size=st.sampled_from([8, 4, 3, 2, 1]),
    small_batch_threshold=st.sampled_from([1, 3, 8, 0, 100]),
    flush=st.just("eager"),  # test_scheduler_machine holds groups
    max_batch_tokens=st.sampled_from([None, 20, 60, 150, 1]),
    max_concurrent_batches=st.integers(1, 3),
)
lengths = st.sampled_from([1, 2, 5, 9, 10, 11, 17, 30, 31, 70, 70_000])
groups = st.sampled_from("aab")
picks = st.integers(0, 10**6)  # index of a call or batch, modulo their number


@dataclass(eq=False)
class Call:
    request: Request
    number: int  # in the order of arrival
    small: bool
    waiting: list[int]  # positions not handed out yet
    shelved: bool = False

    def length(self, position: int) -> int:
        assert self.request.lengths is not None
        return self.request.lengths[position]


Item = tuple[Call, int]


@dataclass
class Chosen:
    """A batch to which items are added one by one."""

    real: Scheduler
    items: set[Item] = field(default_factory=set)
    longest: int = 0
    padding: int = 0

    def padding_with(self, item: Item) -> float:
        length, size = item[0].length(item[1]), len(self.items)
        if item in self.items or size >= self.real.capacity.max_items(max(length, self.longest)):
            return math.inf
        return max(length - self.longest, 0) * size + max(self.longest - length, 0)

    def may_pad(self, item: Item) -> bool:
        padding = self.padding + self.padding_with(item)
        cells = sum(call.length(position) for call, position in {*self.items, item})
        limit = self.real.capacity.cost.fixed_size
        if limit is None:
            return padding <= cells
        return padding <= limit and (padding <= MOST_PADDING * cells or padding + cells <= LARGE)

    def add(self, candidates: Sequence[Item], nearest: bool = True) -> None:
        """Add the items that need the least padding, or in their order, as long as they fit.

        `candidates` are sorted, longest first.
        """
        left = [each for each in candidates if each not in self.items]
        longer = [each for each in left if nearest and each[0].length(each[1]) > self.longest]
        shorter = left[len(longer) :]
        while some := [*shorter[:1], *longer[-1:]]:
            item = min(some, key=self.padding_with)
            if self.padding_with(item) == math.inf or not self.may_pad(item):
                return
            (shorter if item in shorter[:1] else longer).remove(item)
            self.padding += int(self.padding_with(item))
            self.longest = max(self.longest, item[0].length(item[1]))
            self.items.add(item)


class FormationMachine(RuleBasedStateMachine):
    @initialize(policy=policies, fixed_size=st.sampled_from([20, 100, 1, math.inf, None]))
    def begin(self, policy: BatchPolicy, fixed_size: float | None) -> None:
        self.policy = policy
        self.real = Scheduler(policy)
        self.real.capacity.cost.fixed_size = fixed_size
        self.calls: list[Call] = []  # all calls ever made
        self.queue: list[Call] = []  # calls with waiting items, in the order of arrival
        self.running: list[Batch] = []

    def shelf(self, calls: Sequence[Call]) -> list[Item]:
        """Return the items of the small calls next in line, longest first."""
        count = sum(len(call.waiting) for call in calls if call.small and call.shelved)
        for call in calls:
            if call.small and not call.shelved and count < LOOK_AHEAD * self.policy.batch_size:
                call.shelved = True
                count += len(call.waiting)
        shelved = [call for call in calls if call.small and call.shelved]
        items = [(call, position) for call in shelved for position in call.waiting]
        return sorted(items, key=lambda item: (-item[0].length(item[1]), item[0].number, item[1]))

    def chosen(self, leader: Call) -> Chosen:
        calls = [c for c in self.queue if c.request.group_key == leader.request.group_key]
        chosen = Chosen(self.real, longest=leader.length(leader.waiting[0]))
        chosen.add([(leader, position) for position in leader.waiting], nearest=False)
        chosen.add(self.shelf(calls))
        for call in calls:
            if not call.small and call is not leader:
                chosen.add([(call, position) for position in call.waiting])
        return chosen

    @rule(sizes=st.lists(lengths, min_size=1, max_size=20), group=groups)
    def submit(self, sizes: list[int], group: str) -> None:
        ordered = sorted(sizes, reverse=True)
        request = Request(list(sizes), len(sizes), group, lengths=ordered)
        small = request.size <= self.policy.small_batch_threshold
        call = Call(request, len(self.calls), small, list(range(request.size)))
        self.calls.append(call)
        self.queue.append(call)
        self.real.submit(request, 0.0)

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

    @rule()
    def take(self) -> None:
        batch = self.real.take(0.0)
        has_room = len(self.running) < self.policy.max_concurrent_batches
        assert (batch is not None) == bool(has_room and self.queue)
        if batch is None:
            return
        leader = next(call for call in self.queue if call.request is batch.slices[0][0])
        assert leader is next(call for call in self.queue if call.small == leader.small)
        expected = self.chosen(leader)
        spelled = [(each, at) for each, start, stop in batch.slices for at in range(start, stop)]
        assert len(spelled) == len(set(spelled)) == batch.size
        assert set(spelled) == {(call.request, position) for call, position in expected.items}
        assert batch.longest == expected.longest
        assert batch.size <= self.real.capacity.max_items(batch.longest)
        ends = {(request, stop) for request, _, stop in batch.slices}
        neighbours = [(request, start) for request, start, _ in batch.slices]
        assert ends.isdisjoint(neighbours), "neighbours are one slice"
        for call, position in expected.items:
            call.waiting.remove(position)
        self.queue = [call for call in self.queue if call.waiting]
        self.running.append(batch)

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        batch = self.running.pop(pick % len(self.running))
        self.real.finished(batch, 0.0)

    @rule(batches=st.integers(1, 20))
    def run(self, batches: int) -> None:
        """Run batches as a worker that is always there, so that deep queues come to their end."""
        for _ in range(batches):
            if len(self.running) == self.policy.max_concurrent_batches:
                self.finish(0)
            self.take()

    @invariant()
    def counts_agree(self) -> None:
        assert self.real.waiting == sum(len(call.waiting) for call in self.queue)
        assert self.real.in_flight == sum(batch.size for batch in self.running)
        assert set(self.real) == {call.request for call in self.queue}
        for call in self.queue:
            assert call.request.remaining == call.waiting
            assert call.request.dispatched == call.request.size - len(call.waiting)

    def teardown(self) -> None:
        while self.queue or self.running:
            self.run(20)
            if self.running:
                self.finish(0)
        self.counts_agree()


@pytest.mark.parametrize("histories", [12, pytest.param(120, marks=pytest.mark.slow)])
def test_batches_by_length_keep_the_rules_of_the_scheduler(histories: int) -> None:
    chosen = settings(
        max_examples=histories, stateful_step_count=40, derandomize=True, deadline=None
    )
    run_state_machine_as_test(FormationMachine, settings=chosen)
