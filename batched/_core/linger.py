"""Linger rules: how long a batch that is not full is held so that more items can join it.

The scheduler asks the rule only while nothing else decides: a full batch, a drain or a call that
has begun leaves at once. `Hindsight` is the rule of `flush="auto"`. A decision point is a moment at
which a batch could leave although it is not full. The arrivals of the next s seconds do not depend
on whether the batch has left. So the gain of every wait d is computed afterwards, and no wait is
tried on live calls:

    gain(d) = k * (p * (1 - e / s) - max(0, e - p)) - i * n * g - WAIT_WEIGHT * n * e

    d   the wait considered (s)
    n   items ready at the decision point
    k   items that arrived within d after the point and fit the batch
    m   items that arrived while the batch would have run and fit one batch
    e   the part of d until the last item that could be expected has arrived (s)
    s   mean time of a batch (s)
    g   T(n + k) - T(n), growth of the batch's time (s), where T is the time by size
    p   (T(k) - g) * k / m, time that each joining item saves (s); negative if joining costs
    i   share of time in which the worker is idle

Each joining item saves p, less the delay of the batch, and loses the part of the wait beyond p.
Each ready item waits for e. If the worker would be idle afterwards, each ready item also waits for
g. A busy worker gives that time back in the next batch. Only the last free worker is held, because
a new item can use any other free worker. The rule holds for the wait with the best mean gain, if
that gain is positive.

A batch leaves earlier if all expected items wait or run, or if it has a worker's share of them.
Expected is the largest number of items that lately waited or ran at once. A share N of W workers is
expected / W items. If N exceeds the batch size B, N - B items are left behind a full batch. Then
the batch is held only if throughput gains enough for the growth of the longest latency:

    B * (F + R) / (N * F) >= LEAST_GAIN * 2 * F / (F + R)    where F = T(B), R = T(N - B)

Without holding, a full batch and a batch of the rest take turns, and every item waits for both.
With holding, all batches are full, and an item that is left behind waits for two of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable
from typing import Final, Literal

from .cost import LAST, TimeBySize
from .policy import BatchPolicy

FlushReason = Literal["full", "settled", "timeout", "eager", "drain"]

AT_ONCE = -math.inf
NEVER = math.inf

WAITS: Final = [20e-6 * 2**step for step in range(10)]
"""Waits that are considered (s): from what it costs to wake a thread to 10 ms."""
WEIGHT: Final = 0.1
"""Weight of a new gain in the average."""
WAIT_WEIGHT: Final = 1.2
"""Weight of the wait of ready items. A gain that barely covers the wait is often noise. Values from
1.1 to 1.3 work equally well.
"""
EVALUATE_EVERY: Final = 4
"""Decision points that are evaluated together after the first `EPOCHS`, because CPU caches are cold
after each sleep.
"""
EPOCHS: Final = 8
"""Batches over which the number of expected items is remembered."""
LEAST_GAIN: Final = 1.05
"""Least growth of throughput, as a multiple of the growth of the longest latency, for which a full
batch is awaited while items are left behind.
"""


class Eager:
    """Rule that holds nothing and learns nothing: a batch leaves as soon as a worker is free."""

    reason: FlushReason = "eager"  # why a batch that was held leaves
    holds = False  # whether batches are held
    most_free = math.inf  # most free workers while a batch is held

    def is_here(self, outstanding: int, waiting: int) -> bool:  # noqa: ARG002  of other rules
        """Return whether a group of `waiting` items has no more items to wait for.

        `outstanding` items of all groups wait or run.
        """
        return False

    def until(self, oldest: float, free_since: float) -> float:  # noqa: ARG002  of other rules
        """Return when a group may leave (s); its oldest item arrived at `oldest`."""
        return AT_ONCE

    def arrived(self, group: Hashable, items: int, now: float) -> None:
        """Record the arrival of `items` in `group`."""

    def note_outstanding(self, items: int) -> None:
        """Record how many items wait or run: before the number falls, and at decision points."""

    def decide(self, group: Hashable, items: int, outstanding: int, now: float) -> None:
        """Record a decision point: a batch of `items` of `group` could leave although not full."""

    def finished(self, size: int, seconds: float, outstanding: int, left: int) -> None:
        """Record the end of a batch of `size` items that took `seconds`.

        Of `outstanding` items that waited or ran, `left` items still do.
        """

    def evaluate(self) -> None:
        """Learn from the recorded events."""


class Window(Eager):
    """Rule that holds a group until its oldest item is `timeout` seconds old.

    Time behind a busy worker counts.
    """

    reason: FlushReason = "timeout"
    holds = True

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def until(self, oldest: float, free_since: float) -> float:  # noqa: ARG002  of other rules
        return oldest + self._timeout


class DecisionPoint:
    """Moment at which a batch could leave although it was not full, and the arrivals after it."""

    __slots__ = ("arrived", "group", "moments", "n", "outstanding", "seconds", "since")

    def __init__(self, group: Hashable, n: int, outstanding: int, now: float) -> None:
        self.group = hash(group)  # the hash only: a rule keeps no group key alive
        self.n = n  # items of the group
        self.outstanding = outstanding  # items that waited or ran
        self.since = now  # the moment (s)
        self.moments: list[float] = []  # of each later arrival in the group, from `since` on (s)
        self.arrived: list[int] = []  # items that had arrived by each of these moments
        self.seconds = 0.0  # until the next decision point (s)


class Hindsight(Eager):
    """Rule that holds a group as long as holding has paid, and until all expected items arrive."""

    reason: FlushReason = "settled"
    most_free = 1  # a new item can use any other free worker at once

    def __init__(
        self, timeout: float, batch_size: int, tick: float = 0.0, workers: int = 1
    ) -> None:
        self._batch_size = batch_size
        self._workers = workers
        # waits that are considered (s)
        self._waits = sorted({min(max(wait, tick), timeout) for wait in WAITS})
        self._gains = [0.0] * len(self._waits)  # mean gain of each wait (item seconds)
        self._cost = TimeBySize()
        # size and time of each batch since the last evaluation (s)
        self._ended: deque[tuple[int, float]] = deque(maxlen=LAST)
        self._linger = 0.0  # wait with the best mean gain; 0.0 if none gains anything (s)
        # most items that waited or ran at once, in the periods between the last batches' ends
        self._peaks = deque([0], maxlen=EPOCHS + 1)
        self._full_pays = False  # whether full batches are awaited while items are left behind
        self._pace = 0.0  # mean time from one decision point to the next (s)
        self._latest: DecisionPoint | None = None
        # earlier decision points that have not been evaluated
        self._past: deque[DecisionPoint] = deque(maxlen=EPOCHS)
        self._early = EPOCHS  # decision points that are still to be evaluated one by one
        self._room = 0  # items that could still join the batch of the latest decision point

    @property
    def expected(self) -> int:
        """Largest number of items that lately waited or ran at once."""
        return max(self._peaks)

    def is_here(self, outstanding: int, waiting: int) -> bool:
        expected = self.expected
        share = expected / self._workers
        return (
            outstanding >= expected
            or waiting >= share
            or (share > self._batch_size and not self._full_pays)
        )

    def until(self, oldest: float, free_since: float) -> float:
        return max(oldest, free_since) + self._linger

    def arrived(self, group: Hashable, items: int, now: float) -> None:
        point = self._latest
        if self._room > 0 and point is not None and hash(group) == point.group:
            self._room -= items
            # in this order: an exception that interrupts leaves no moment without its items
            point.arrived.append(self._batch_size - self._room)
            point.moments.append(now - point.since)

    def note_outstanding(self, items: int) -> None:
        if items > self._peaks[-1]:
            self._peaks[-1] = items

    def decide(self, group: Hashable, items: int, outstanding: int, now: float) -> None:
        if outstanding > self._peaks[-1]:  # as `note_outstanding`, without a call
            self._peaks[-1] = outstanding
        point = self._latest
        if point is not None:
            point.seconds = now - point.since
            self._pace += (point.seconds - self._pace) * (WEIGHT if self._pace else 1.0)
            # If all expected items were there and none followed, no wait could gain anything.
            if point.moments or point.outstanding < self.expected:
                self._past.append(point)
        self._latest = DecisionPoint(group, items, outstanding, now)
        self._room = self._batch_size

    def finished(self, size: int, seconds: float, outstanding: int, left: int) -> None:
        if outstanding > self._peaks[-1]:
            self._peaks[-1] = outstanding
        self._peaks.append(left)
        self._ended.append((size, seconds))

    def evaluate(self) -> None:
        if len(self._past) < (1 if self._early else EVALUATE_EVERY):
            return
        for size, seconds in self._ended:
            self._cost.add(size, seconds)
        self._ended.clear()
        time = self._cost.time
        if self._cost.mean:
            for point in self._past:
                self._evaluate(point, self._cost.mean)
            self._early = max(self._early - len(self._past), 0)
            share = self.expected / self._workers
            if share > self._batch_size:
                full, rest = time(self._batch_size), time(share - self._batch_size)
                gain = self._batch_size * (full + rest) ** 2
                self._full_pays = gain >= LEAST_GAIN * 2 * share * full**2
        self._past.clear()

    def _evaluate(self, point: DecisionPoint, s: float) -> None:
        """Add the gain of each wait at `point` to the means. The module explains the letters."""
        i = max(0.0, 1 - s / self._pace) if self._pace else 0.0
        seen = min(point.seconds, s)
        n, moments, arrived = point.n, point.moments, point.arrived
        room = self._batch_size - n
        hoped = min(room, max(self.expected - point.outstanding, 0))  # items that could be expected
        there = 0.0  # arrival of the last of them (s)
        if hoped:
            place = bisect_left(arrived, hoped)
            there = moments[place] if place < len(moments) else NEVER
        last = max(there, moments[-1]) if moments else there
        within = bisect_right(moments, seen)
        m = min(arrived[within - 1], self._batch_size) if within else 0
        waits, gains, time = self._waits, self._gains, self._cost.time
        gain, changes = 0.0, True
        alone = time(n)
        for number, d in enumerate(waits):
            if d > seen:
                break
            if changes:
                e = min(d, there)
                gain = -WAIT_WEIGHT * n * e
                joined = bisect_right(moments, d)
                if joined:
                    k = min(arrived[joined - 1], room)
                    g = time(n + k) - alone
                    p = (time(k) - g) * k / m
                    gain += k * (p * (1 - e / s) - max(0.0, e - p)) - i * n * g
                changes = d < last
            gains[number] += WEIGHT * (gain - gains[number])
        best = max(gains[: bisect_right(waits, s)], default=0.0)
        self._linger = waits[gains.index(best)] if best > 0 else 0.0
        self.holds = bool(self._linger)


def linger_rule(policy: BatchPolicy, tick: float = 0.0) -> Eager:
    """Return the rule that `policy.flush` selects. No wait is shorter than `tick` (s)."""
    if policy.flush == "auto" and policy.timeout:
        return Hindsight(policy.timeout, policy.batch_size, tick, policy.max_concurrent_batches)
    return Window(policy.timeout) if policy.flush == "window" else Eager()
