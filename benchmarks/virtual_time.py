"""Runs the scheduler in virtual time: nobody sleeps, no clock is read, and the same seed gives the
same figures.

As many workers as the policy says run one batch each at a time; with `prefetch` one thread more
collates batches ahead of them. Callers are a closed loop (each calls again after its answer), an
open one (calls come when they come), or crowds of both. A batch that ends frees its worker before
its callers hear of it. Models, gaps, think times and latencies are in milliseconds, throughput and
rates in calls per millisecond; the scheduler and the moments handed to `batches` are in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator
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
    """How long a batch takes: `fixed + per_item * n` milliseconds, of n items beyond the first
    `flat`, and `collation` before that.
    """

    fixed: float
    per_item: float
    jitter: float = 0.05
    """Standard deviation, as a part of the whole."""
    flat: int = 0
    collation: float = 0.0
    """Time in which a batch is made ready (ms)."""

    def capacity(self, batch_size: int) -> float:
        """Most calls per millisecond of one worker: full batches, one right after another."""
        return batch_size / self.duration(batch_size, 0.0)

    def duration(self, size: int, deviation: float) -> float:
        """How long the function takes for a batch of that size, in milliseconds, where it is off by
        that many standard deviations.
        """
        usual = self.fixed + self.per_item * max(0, size - self.flat)
        return usual * (1 + self.jitter * deviation)


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
    begun = itertools.count()
    now = 0.0
    # threads that may call the function, each with the moment from which it was free
    free = deque([0.0] * policy.max_concurrent_batches)
    running: list[tuple[float, int, Batch]] = []  # a heap, by when they end
    ready: deque[Batch] = deque()  # collated ahead, for lack of a free thread
    collating: Batch | None = None  # by the thread that collates ahead
    ready_at = math.inf  # when that batch will be ready

    def run(batch: Batch, collation: float) -> None:
        batch.started = max(batch.started, free.popleft())
        ends = now + (collation + model.duration(batch.size, next(deviation))) / 1e3
        heapq.heappush(running, (ends, next(begun), batch))

    while True:
        while collating is None and (batch := scheduler.take(now)) is not None:
            if policy.prefetch:
                collating, ready_at = batch, now + model.collation / 1e3
            else:
                run(batch, model.collation)
        arrives = calls[0][0] if calls else math.inf
        ends = min(running[0][0] if running else math.inf, ready_at)
        leaves = math.inf if collating else scheduler.next_deadline()
        now = max(now, min(arrives, ends, leaves))
        if now == math.inf:
            return
        if arrives < ends and arrives <= leaves:
            moment, caller = heapq.heappop(calls)
            scheduler.submit(Request([caller], 1, "g", waker=None), moment)
        elif collating is not None and ready_at <= now:
            ready.append(collating)
            collating, ready_at = None, math.inf
        elif running and running[0][0] <= now:
            _, _, batch = heapq.heappop(running)
            free.append(now)
            scheduler.finished(batch, now)
            yield batch
        while free and ready:
            run(ready.popleft(), 0.0)


@dataclass(frozen=True)
class Crowd:
    """Callers of one kind."""

    callers: int
    """Number of those who call again after their answers."""
    way: Way
    """Their way of coming back."""
    calls_at_random: float = 0.0
    """Calls per millisecond that come besides, whether others have been answered or not."""


@dataclass(frozen=True)
class Run:
    """Throughput and latencies over the second half of a run."""

    throughput: float
    """Calls per millisecond, all callers together."""
    latencies: tuple[list[float], ...]
    """Of the calls of each crowd: from the arrival to the end of the batch, in milliseconds."""


def crowds(
    policy: BatchPolicy, model: Model, kinds: tuple[Crowd, ...], seed: int, calls: int
) -> Run:
    """A run of that many calls, all crowds together.

    Each caller has dice of its own, so its n-th think time is the same under every policy.
    """
    kind_of = [kind for kind, crowd in enumerate(kinds) for _ in range(crowd.callers)]
    dice = [Random(f"caller {caller} of {seed}") for caller in range(len(kind_of))]
    coming: list[Call] = []
    for kind, crowd in enumerate(kinds):
        if crowd.calls_at_random:
            moments = at_random(crowd.calls_at_random, calls, Random(f"arrivals of {seed}"))
            coming += [(moment, -1 - kind) for moment in moments]
    heapq.heapify(coming)

    def come_back(order: list[int], now: float) -> None:
        for caller in order:
            way = kinds[kind_of[caller]].way
            now += way.gap / 1e3 * dice[caller].uniform(1 - way.spread, 1 + way.spread)
            think = dice[caller].expovariate(1 / way.think) / 1e3 if way.think else 0.0
            heapq.heappush(coming, (now + think, caller))

    come_back(list(range(len(kind_of))), 0.0)
    latencies: tuple[list[float], ...] = tuple([] for _ in kinds)
    done, counted, since = 0, 0, math.inf
    for batch in batches(policy, model, coming, seed):
        done += batch.size
        who = [request.items[0] for request, _, _ in batch.slices]
        if since < math.inf:
            counted += batch.size
            for caller, (request, _, _) in zip(who, batch.slices, strict=True):
                kind = kind_of[caller] if caller >= 0 else -1 - caller
                latencies[kind].append((batch.ended - request.arrived) * 1e3)
        elif done >= calls / 2:
            since = batch.ended
        if done >= calls:
            return Run(counted / (batch.ended - since) / 1e3, latencies)
        come_back([caller for caller in who if caller >= 0], batch.ended)
    raise AssertionError("a closed loop never runs dry")


def closed_loop(
    policy: BatchPolicy, model: Model, callers: int, way: Way, seed: int, calls: int
) -> float:
    """Throughput of callers who call again after their answers, in calls per millisecond, over the
    second half of a run of that many calls.
    """
    return crowds(policy, model, (Crowd(callers, way),), seed, calls).throughput


def open_loop(
    policy: BatchPolicy,
    model: Model,
    arrivals: Arrivals,
    load: float,
    seed: int,
    calls: int,
    burst: int = BURST,
) -> list[float]:
    """The latency of each call, from its arrival to the end of its batch, in milliseconds and in
    order of arrival.

    `load` is a part of the model's capacity. All policies see the same arrivals.
    """
    rate = load * model.capacity(policy.batch_size) * policy.max_concurrent_batches
    dice = Random(f"arrivals of {seed}")
    moments = (
        at_random(rate, calls, dice)
        if arrivals == "at random"
        else in_bursts(rate, calls, dice, burst)
    )
    return latencies(policy, model, moments, seed)


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


def in_bursts(rate: float, calls: int, dice: Random, burst: int = BURST) -> list[float]:
    """Return moments in bursts that begin at random (s)."""
    moments: list[float] = []
    for moment in at_random(rate / burst, math.ceil(calls / burst), dice):
        for _ in range(burst):
            moments.append(moment)
            moment += BURST_GAP / 1e3 * dice.uniform(1 - SPREAD, 1 + SPREAD)
    return sorted(moments)[:calls]
