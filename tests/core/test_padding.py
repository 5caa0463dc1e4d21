"""Padding of backlogs, and bounds on waiting under overload, with items of mixed lengths.

Cells are counted and time is virtual, so the figures are the same on every machine.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from batched._core.policy import BatchPolicy
from batched._core.scheduler import Batch, Request, Scheduler

pytestmark = pytest.mark.once

Backlog = list[list[int]]  # the lengths of the items of each call
SIZE = 32
SEEDS = range(20)


def call(lengths: list[int]) -> Request:
    return Request(
        list(lengths), len(lengths), "g", waker=None, lengths=sorted(lengths, reverse=True)
    )


def wasted(lengths: list[int]) -> int:
    """Return the padding if these items leave in this order, in full batches."""
    batches = [lengths[at : at + SIZE] for at in range(0, len(lengths), SIZE)]
    return sum(len(batch) * max(batch) - sum(batch) for batch in batches)


def padding(batch: Batch) -> int:
    lengths = [
        request.lengths[at]
        for request, start, stop in batch.slices
        if request.lengths
        for at in range(start, stop)
    ]
    assert len(lengths) == batch.size
    assert max(lengths) == batch.longest
    return batch.size * batch.longest - sum(lengths)


def left(backlog: Backlog) -> tuple[int, int]:
    """Return the padding and the number of batches of a backlog that leaves by the scheduler."""
    busy = Scheduler(BatchPolicy(batch_size=SIZE))
    for lengths in backlog:
        busy.submit(call(lengths), 0.0)
    waste = batches = 0
    while (batch := busy.take(0.0)) is not None:
        waste += padding(batch)
        batches += 1
        busy.finished(batch, 0.0)
    return waste, batches


def singles(rng: random.Random, items: int) -> Backlog:
    return [[rng.randint(5, 120)] for _ in range(items)]


def small_lists(rng: random.Random, items: int) -> Backlog:
    backlog: Backlog = []
    while items:
        size = min(items, rng.randint(1, 8))
        backlog.append([rng.randint(5, 120) for _ in range(size)])
        items -= size
    return backlog


def one_list(rng: random.Random, items: int) -> Backlog:
    return [[rng.randint(5, 120) for _ in range(items)]]


@pytest.mark.parametrize(
    ("kind", "items", "median", "worst"),
    [
        (singles, 256, 0.25, 0.35),
        (one_list, 256, 0.15, 0.2),
        (small_lists, 256, 0.3, 0.45),
        (singles, 1000, 0.1, 0.15),
        (small_lists, 1000, 0.15, 0.2),
        (singles, 5000, 0.05, 0.1),
    ],
)
def test_a_backlog_leaves_with_a_fraction_of_the_padding_of_arrival_order(
    kind: Callable[[random.Random, int], Backlog], items: int, median: float, worst: float
) -> None:
    ratios: list[float] = []
    for seed in SEEDS if items < 5000 else SEEDS[:5]:
        backlog = kind(random.Random(seed), items)
        waste, batches = left(backlog)
        ratios.append(waste / wasted([length for lengths in backlog for length in lengths]))
        assert batches == -(-items // SIZE), "no batch more than without"
    assert statistics.median(ratios) <= median
    assert max(ratios) <= worst


# ---------------------------------------------------------------- overload


@dataclass
class Waiting:
    """A small call that has not begun."""

    arrived: float
    older: int  # small calls that waited when it came
    batches: int = 0  # since it came
    led_by_small: int = 0  # of those


class Overload:
    """One worker, and calls that arrive as fast as it can run them, or faster.

    Each small call fits one batch.
    """

    def __init__(self, seed: int, load: float, **settings: Any) -> None:
        self.rng = random.Random(seed)
        self.load = load
        self.busy = Scheduler(
            BatchPolicy(batch_size=SIZE, small_batch_threshold=8, flush="eager", **settings)
        )
        self.small: dict[Request, Waiting] = {}  # small calls with waiting items
        self.heir: Request | None = None
        self.heir_owed = 0  # batches within which it must be finished
        self.slowest = 0.0  # batch (s)
        # of small calls until they have begun (s), each with `older`
        self.waits: list[tuple[float, int]] = []
        self.waste = 0  # padding
        self.lengths: list[int] = []  # of all items, in the order of arrival

    def arrive(self, now: float) -> int:
        """Submit one more call, and return the number of its items."""
        kind = self.rng.random()
        size = (
            1 if kind < 0.9 else self.rng.randint(2, 8) if kind < 0.98 else self.rng.randint(9, 100)
        )
        request = call([min(120, 1 + int(self.rng.lognormvariate(3.2, 0.7))) for _ in range(size)])
        self.lengths += request.items
        self.busy.submit(request, now)
        if size <= 8:
            self.small[request] = Waiting(now, older=len(self.small))
        return size

    def alone(self, request: Request) -> int:
        """Return the number of batches that the waiting items of a large call would need alone."""
        assert request.lengths is not None
        lengths = [
            request.lengths[at]
            for start, stop in request.remaining.spans
            for at in range(start, stop)
        ]
        at = batches = 0
        while at < len(lengths):
            at += self.busy.capacity.max_items(lengths[at])
            batches += 1
        return batches

    def leave(self, now: float) -> float:
        """Run the next batch, and return the moment of its end (s)."""
        heir = next((request for request in self.busy if request.size > 8), None)
        if heir is not self.heir:
            self.heir, self.heir_owed = heir, 0 if heir is None else 4 * self.alone(heir) + 1
        untouched = [request for request in self.small if not request.dispatched]
        batch = self.busy.take(now)
        assert batch is not None
        for request in untouched:
            call = self.small[request]
            call.batches += 1
            call.led_by_small += batch.slices[0][0].size <= 8
            assert call.led_by_small <= call.older + 1
            assert call.batches <= 3 * (call.older + 1)
            if request.dispatched:
                self.waits.append((now - call.arrived, call.older))
        self.small = {
            request: call
            for request, call in self.small.items()
            if request.dispatched < request.size
        }
        self.heir_owed -= 1
        assert self.heir is None or self.heir_owed >= (
            1 if self.heir.dispatched < self.heir.size else 0
        )
        took = 1e-3 + 1e-5 * batch.size * batch.longest
        self.slowest = max(self.slowest, took)
        self.waste += padding(batch)
        self.busy.finished(batch, now + took)
        return now + took

    def run(self, items: int) -> None:
        now = arrival = free = 0.0
        # an item of mean length, in full batches without padding (s)
        mean = 1e-3 / SIZE + 1e-5 * 31
        while items > 0 or self.busy.waiting:
            if items > 0 and (arrival <= free or not self.busy.waiting):
                now = arrival
                size = self.arrive(now)
                items -= size
                arrival = now + self.rng.expovariate(self.load / (size * mean))
            else:
                now = max(now, free)
                free = self.leave(now)


@pytest.mark.parametrize("load", [1.0, 1.2])
@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 1500}], ids=["items", "tokens"])
@pytest.mark.parametrize("seed", range(4))
def test_under_lasting_overload_every_wait_is_within_its_bound(
    load: float, settings: dict[str, Any], seed: int
) -> None:
    """A call behind k small calls has begun within 3 * (k + 1) batches, in any queue."""
    overload = Overload(seed, load, **settings)
    overload.run(6000)
    assert not overload.small
    assert all(wait <= 3 * (older + 1) * overload.slowest for wait, older in overload.waits)
    assert max(older for _, older in overload.waits) > 3 * SIZE, "it was an overload"
    assert overload.waste <= 0.45 * wasted(overload.lengths)
