"""Runs the scheduler in virtual time: nobody sleeps, no clock is read, and the same seed gives the
same figures.

One worker runs one batch at a time. Callers are either a closed loop (each calls again after its
answer) or an open one (calls come when they come). A batch that ends frees its worker before its
callers hear of it. Models, gaps, think times and latencies are in milliseconds, throughput and
rates in calls per millisecond; the scheduler and the moments handed to `batches` are in seconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from batched._core.policy import BatchPolicy
from batched._core.scheduler import Batch, Request, Scheduler

BURST = 10
"""Calls in a burst."""
BURST_GAP = 0.015
"""Time between two calls of a burst (ms), give or take `SPREAD`: what a thread or a task needs to
come forward.
"""
SPREAD = 0.5
"""Part by which a gap is longer or shorter at most."""
TRUNCATED = 3.0
"""Standard deviations beyond which jitter is cut off."""

Call = tuple[float, int]
"""When it arrives (s), and who calls. A list of them is a heap."""
Arrivals = Literal["at random", "in bursts"]


@dataclass(frozen=True)
class Model:
    """How long a batch takes: `fixed + per_item * n` milliseconds."""

    fixed: float
    per_item: float
    jitter: float = 0.05
    """Standard deviation, as a part of the whole."""

    def capacity(self, batch_size: int) -> float:
        """Most calls per millisecond: full batches, one right after another."""
        return batch_size / (self.fixed + self.per_item * batch_size)

    def duration(self, size: int, deviation: float) -> float:
        """How long a batch of that size takes, in milliseconds, where it is off by that many
        standard deviations.
        """
        return (self.fixed + self.per_item * size) * (1 + self.jitter * deviation)


@dataclass(frozen=True)
class Way:
    """How callers come back after a batch: one after another in the order of the batch, each after
    its think time.
    """

    gap: float
    """Time between one and the next (ms)."""
    think: float = 0.0
    """Mean of the time each lets pass then (ms), exponentially distributed."""
    spread: float = SPREAD
    """Part by which a gap is longer or shorter at most."""


def deviations(seed: int) -> Iterator[float]:
    """How far one batch after another is off, in standard deviations: normal and truncated.

    They come in pairs that cancel out. So near full load, where a queue remembers all that was ever
    late, luck does not decide between two policies: it did by 5 %, and does by 1 %.
    """
    dice = Random(f"batches of {seed}")
    while True:
        deviation = min(max(dice.gauss(0.0, 1.0), -TRUNCATED), TRUNCATED)
        yield deviation
        yield -deviation


def batches(policy: BatchPolicy, model: Model, calls: list[Call], seed: int) -> Iterator[Batch]:
    """Every batch at the moment it ends, until no call is left; who iterates may push calls on
    `calls` meanwhile.

    A call that arrives at the very moment a batch ends comes after its end; one that arrives at the
    very moment a held batch may leave is in that batch.
    """
    scheduler = Scheduler(policy)
    deviation = deviations(seed)
    now = 0.0

    def arrival() -> None:
        moment, caller = heapq.heappop(calls)
        scheduler.submit(Request([caller], 1, "g", waker=None), moment)

    while True:
        while (batch := scheduler.take(now)) is None:
            arrives = calls[0][0] if calls else math.inf
            now = min(arrives, scheduler.next_deadline())
            if now == math.inf:
                return
            if arrives <= now:
                arrival()
        now += model.duration(batch.size, next(deviation)) / 1e3
        while calls and calls[0][0] < now:
            arrival()
        scheduler.finished(batch, now)
        yield batch


def closed_loop(
    policy: BatchPolicy, model: Model, callers: int, way: Way, seed: int, calls: int
) -> float:
    """Throughput over the second half of a run of that many calls, all callers together, in calls
    per millisecond.

    Each caller has dice of its own, so its n-th think time is the same under every policy.
    """
    dice = [Random(f"caller {caller} of {seed}") for caller in range(callers)]
    coming: list[Call] = []

    def come_back(order: Iterable[int], now: float) -> None:
        for caller in order:
            now += way.gap / 1e3 * dice[caller].uniform(1 - way.spread, 1 + way.spread)
            think = dice[caller].expovariate(1 / way.think) / 1e3 if way.think else 0.0
            heapq.heappush(coming, (now + think, caller))

    come_back(range(callers), 0.0)
    done, counted, since = 0, 0, math.inf
    for batch in batches(policy, model, coming, seed):
        done += batch.size
        if done >= calls:
            return (counted + batch.size) / (batch.ended - since) / 1e3
        if since < math.inf:
            counted += batch.size
        elif done >= calls / 2:
            since = batch.ended
        come_back((request.items[0] for request, _, _ in batch.slices), batch.ended)
    raise AssertionError("a closed loop never runs dry")


def open_loop(
    policy: BatchPolicy, model: Model, arrivals: Arrivals, load: float, seed: int, calls: int
) -> list[float]:
    """The latency of each call, from its arrival to the end of its batch, in milliseconds and in
    order of arrival.

    `load` is a part of the model's capacity. All policies see the same arrivals.
    """
    rate = load * model.capacity(policy.batch_size)
    dice = Random(f"arrivals of {seed}")
    return latencies(
        policy,
        model,
        at_random(rate, calls, dice) if arrivals == "at random" else in_bursts(rate, calls, dice),
        seed,
    )


def latencies(policy: BatchPolicy, model: Model, moments: list[float], seed: int) -> list[float]:
    """The latency in milliseconds of each call that arrives at one of these moments, which are in
    seconds and in order.
    """
    coming = [(moment, number) for number, moment in enumerate(moments)]
    found = [0.0] * len(moments)
    for batch in batches(policy, model, coming, seed):
        for request, _, _ in batch.slices:
            found[request.items[0]] = (batch.ended - request.arrived) * 1e3
    return found


def at_random(rate: float, calls: int, dice: Random) -> list[float]:
    """Moments of a Poisson process, in seconds."""
    moment = 0.0
    return [moment := moment + dice.expovariate(rate) / 1e3 for _ in range(calls)]


def in_bursts(rate: float, calls: int, dice: Random) -> list[float]:
    """Moments in bursts that begin at random, in seconds."""
    moments: list[float] = []
    for moment in at_random(rate / BURST, math.ceil(calls / BURST), dice):
        for _ in range(BURST):
            moments.append(moment)
            moment += BURST_GAP / 1e3 * dice.uniform(1 - SPREAD, 1 + SPREAD)
    return sorted(moments)[:calls]
