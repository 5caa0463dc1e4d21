"""Simulation of the scheduler in virtual time. No thread sleeps, no clock is read, and the same
seed gives the same figures.

Each worker of the policy runs one batch at a time. Callers are a closed loop (each calls again
after its answer), an open loop (arrivals do not depend on answers), or crowds of both. The end of a
batch frees its worker before its callers are answered.

Models, gaps, think times and latencies are in milliseconds. Throughput and rates are in calls per
millisecond. The scheduler and the moments passed to `batches` are in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from batched._core.policy import BatchPolicy
from batched._core.scheduler import Batch, Request, Scheduler
from traffic import SPREAD, arrivals

TRUNCATED = 3.0
"""Standard deviations beyond which jitter is cut off."""

Call = tuple[float, int]
"""Arrival (s) and number of the caller. A list of calls is a heap."""


@dataclass(frozen=True)
class Model:
    """Time of a batch: `fixed + per_item * n` milliseconds for n items beyond the first `flat`."""

    fixed: float
    per_item: float
    jitter: float = 0.05
    """Standard deviation, as a share of the time."""
    flat: int = 0

    def capacity(self, batch_size: int) -> float:
        """Return the most calls per millisecond of one worker: full batches, back to back."""
        return batch_size / self.duration(batch_size, 0.0)

    def duration(self, size: int, deviation: float) -> float:
        """Return the time of the function for a batch of that size (ms), off by that many standard
        deviations.
        """
        usual = self.fixed + self.per_item * max(0, size - self.flat)
        return usual * (1 + self.jitter * deviation)


@dataclass(frozen=True)
class Way:
    """Way in which callers come back after a batch: one after another in the order of the batch,
    each after its think time and its time away.
    """

    gap: float
    """Time between two callers (ms)."""
    think: float = 0.0
    """Mean think time of a caller (ms), exponentially distributed."""
    away: tuple[float, float] = (0.0, 0.0)
    """Shortest and longest time away of a caller (ms)."""


def deviations(seed: int) -> Iterator[float]:
    """Yield the deviation of each batch, in standard deviations: normal and truncated.

    Deviations come in pairs that cancel out. Near full load a queue remembers every late batch, so
    luck decided between policies by up to 5 %. With pairs luck decides by 1 %.
    """
    dice = Random(f"batches of {seed}")
    while True:
        deviation = min(max(dice.gauss(0.0, 1.0), -TRUNCATED), TRUNCATED)
        yield deviation
        yield -deviation


def batches(scheduler: Scheduler, model: Model, calls: list[Call], seed: int) -> Iterator[Batch]:
    """Yield every batch at the moment it ends, until no call is left. The consumer may push calls
    on `calls` meanwhile.

    A call that arrives at the moment a batch ends comes after its end. A call that arrives at the
    moment a held batch may leave is in that batch.
    """
    deviation = deviations(seed)
    begun = itertools.count()
    now = 0.0
    running: list[tuple[float, int, Batch]] = []  # heap of ends (s)
    while True:
        while (batch := scheduler.take(now)) is not None:
            ends = now + model.duration(batch.size, next(deviation)) / 1e3
            heapq.heappush(running, (ends, next(begun), batch))
        arrives = calls[0][0] if calls else math.inf
        ends = running[0][0] if running else math.inf
        leaves = scheduler.next_deadline()
        now = max(now, min(arrives, ends, leaves))
        if now == math.inf:
            return
        if arrives < ends and arrives <= leaves:
            moment, caller = heapq.heappop(calls)
            scheduler.submit(Request([caller], 1, "g", waker=None), moment)
        elif running and running[0][0] <= now:
            _, _, batch = heapq.heappop(running)
            scheduler.finished(batch, now)
            yield batch


@dataclass(frozen=True)
class Crowd:
    callers: int
    """Number of callers who call again after their answers."""
    way: Way
    """Their way of coming back."""
    calls_at_random: float = 0.0
    """Further calls per millisecond, which do not wait for answers."""
    burst: int = 1
    """Calls that come together in a burst at random."""


@dataclass(frozen=True)
class Run:
    """Throughput and latencies over the second half of a run."""

    throughput: float
    """Calls per millisecond, all callers together."""
    latencies: tuple[list[float], ...]
    """Latencies of the calls of each crowd, from the arrival to the end of the batch (ms)."""


def crowds(
    policy: BatchPolicy, model: Model, kinds: tuple[Crowd, ...], seed: int, calls: int
) -> Run:
    """Run that many calls of all crowds together.

    Each caller has its own dice, so its n-th think time is the same under every policy.
    """
    kind_of = [kind for kind, crowd in enumerate(kinds) for _ in range(crowd.callers)]
    dice = [Random(f"caller {caller} of {seed}") for caller in range(len(kind_of))]
    coming: list[Call] = []
    for kind, crowd in enumerate(kinds):
        if crowd.calls_at_random:
            dice_of_arrivals = Random(f"arrivals of {seed}")
            moments = arrivals(crowd.calls_at_random, calls, dice_of_arrivals, crowd.burst)
            coming += [(moment, -1 - kind) for moment in moments]
    heapq.heapify(coming)

    def come_back(order: list[int], now: float) -> None:
        for caller in order:
            way = kinds[kind_of[caller]].way
            now += way.gap / 1e3 * dice[caller].uniform(1 - SPREAD, 1 + SPREAD)
            think = dice[caller].expovariate(1 / way.think) / 1e3 if way.think else 0.0
            away = dice[caller].uniform(*way.away) / 1e3 if way.away[1] else 0.0
            heapq.heappush(coming, (now + think + away, caller))

    come_back(list(range(len(kind_of))), 0.0)
    latencies: tuple[list[float], ...] = tuple([] for _ in kinds)
    done, counted, since = 0, 0, math.inf
    for batch in batches(Scheduler(policy), model, coming, seed):
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
    raise AssertionError("fewer calls came than were to be counted")
