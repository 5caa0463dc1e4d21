"""Linger rules: how long a batch that is not full is held, in the hope that more items join it.

The scheduler asks only while nothing else (a full batch, a drain, a call already begun) settles
the matter. `Hindsight` is the rule of `flush="auto"`. A decision point is a moment when a batch
might leave though it is not full. For as long as that batch would run, what arrives does not
depend on whether it has left: so what a wait of d would have been worth is known afterwards,
without ever trying it on live calls:

    gain(d) = k * (p * (1 - e / s) - max(0, e - p)) - i * n * g - WAIT_WEIGHT * n * e

    d   the wait considered (s)
    n   items ready at the decision point
    k   items that arrived within d of it, as far as they fit the batch
    m   items that arrived while the batch would have run, as far as they fit one batch
    e   min(d, when all had arrived that could be hoped for) (s)
    s   mean time of a batch (s)
    g   T(n + k) - T(n), what the batch takes longer (s), where T is the time by size
    p   (T(k) - g - f) * k / m, what each item that joins saves (s); below 0 if it costs
    f   what another worker would have been free sooner than after s (s); 0 if none was running
    i   share of time in which the worker is idle

Whoever joins saves p, less the later the batch starts, and loses what the wait took beyond that.
Whoever was ready waits for e, and where the worker would be idle afterwards, for the items that
joined, too; where it is not, that comes back in the next batch. Only what would take the last free
worker is held: else whoever comes next has a worker anyway. Averages of the gain for a few d
say how long to wait: for the best of them if it is positive, and not longer than until everyone
expected is there: the most items that were waiting or running at once lately.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable
from typing import Final, Literal

from .cost import LAST, Curve, TimeBySize
from .policy import BatchPolicy

FlushReason = Literal["full", "settled", "timeout", "eager", "drain"]

AT_ONCE = -math.inf
NEVER = math.inf

WAITS: Final = [20e-6 * 2**step for step in range(10)]
"""Waits that are considered (s): from what it costs to wake a thread to 10 ms."""
WEIGHT: Final = 0.1
"""Weight of a new gain in the average."""
WAIT_WEIGHT: Final = 1.2
"""Weight of the wait of those who are ready: a gain nearly even with it is often none (1.1 to 1.3
serve as well).
"""
EVALUATE_EVERY: Final = 4
"""Decision points evaluated together, once there have been some: between sleeps caches are cold."""
EPOCHS: Final = 8
"""Batches over which the most items at once are taken for everyone there is."""
LEAST_GAIN: Final = 1.15
"""Least gain in throughput, as a multiple of the growth of the longest latency, for which a batch is
held although not all expected items fit.
"""


class Eager:
    """Rule that holds nothing and learns nothing: a batch leaves as soon as a worker is free."""

    reason: FlushReason = "eager"  # why a batch leaves that was not full
    holds = False  # whether any batch is held
    most_free = math.inf  # workers that may be free while one is held

    def is_here(self, outstanding: int, waiting: int) -> bool:  # noqa: ARG002  of other rules
        """Return whether a group of `waiting` items has nothing to wait for, while `outstanding`
        items of all groups wait or run.
        """
        return False

    def until(self, oldest: float, free_since: float) -> float:  # noqa: ARG002  of other rules
        """When a group may leave whose oldest item arrived at `oldest` (s)."""
        return AT_ONCE

    def arrived(self, group: Hashable, items: int, now: float) -> None:
        """Notes that `items` have come to `group`."""

    def note_outstanding(self, items: int) -> None:
        """Notes how many wait or run; to be told before they get fewer, and at decision points."""

    def decide(self, group: Hashable, items: int, outstanding: int, now: float) -> None:
        """Notes a decision point: a batch of `items` of `group` might leave, though not full."""

    def finished(self, size: int, seconds: float, now: float, outstanding: int, left: int) -> None:
        """Note that a batch of `size` items has ended after `seconds`: of `outstanding` items
        that waited or ran, `left` still do.
        """

    def evaluate(self) -> None:
        """Learns from what has been noted."""


class Window(Eager):
    """Rule that holds a group until its oldest item is `timeout` seconds old; time spent behind a
    busy worker counts.
    """

    reason: FlushReason = "timeout"
    holds = True

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def until(self, oldest: float, free_since: float) -> float:  # noqa: ARG002  of other rules
        return oldest + self._timeout


class DecisionPoint:
    """Moment when a batch might have left though it was not full, and who came then."""

    __slots__ = ("arrived", "freed", "group", "moments", "n", "outstanding", "seconds", "since")

    def __init__(self, group: Hashable, n: int, outstanding: int, now: float) -> None:
        self.group = hash(group)  # not the group, which is not to be kept alive
        self.n = n
        self.outstanding = outstanding  # items that waited or ran
        self.since = now  # when it was (s)
        self.moments: list[float] = []  # after it, when more of the group arrived (s)
        self.arrived: list[int] = []  # items that had arrived by each of these
        self.seconds = 0.0  # until the next decision point, once that has come
        self.freed = NEVER  # until another worker was free, which was not then (s)


class Hindsight(Eager):
    """Rule that holds a group as long as that has paid so far, and until everyone who has been
    there lately is back.
    """

    most_free = 1  # who joins what another worker could run would not have waited

    def __init__(
        self, timeout: float, batch_size: int, tick: float = 0.0, workers: int = 1
    ) -> None:
        self._batch_size = batch_size
        self._workers = workers
        # considered (s)
        self._waits = sorted({min(max(wait, tick), timeout) for wait in WAITS})
        self._gains = [0.0] * len(self._waits)  # mean gain of each wait (item seconds)
        self._cost = TimeBySize()
        # size and time of each batch since the last evaluation (s)
        self._ended: deque[tuple[int, float]] = deque(maxlen=LAST)
        self._linger = 0.0  # wait with the best mean gain; 0.0 if none gains anything (s)
        # most items that waited or ran at once since the end of each of the last batches
        self._peaks = deque([0], maxlen=EPOCHS + 1)
        self._full_pays = False  # whether to hold though the expected items overfill the batches
        self._pace = 0.0  # mean time from one decision point to the next (s)
        self._latest: DecisionPoint | None = None
        # earlier decision points that have not been evaluated
        self._past: deque[DecisionPoint] = deque(maxlen=EPOCHS)
        self._early = EPOCHS  # decision points that are still to be evaluated one by one
        self._room = 0  # items that could still join the batch of the latest decision point

    @property
    def expected(self) -> int:
        """Most items that waited or ran at once lately."""
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
        return max(oldest, free_since) + self._linger if self._linger else AT_ONCE

    def arrived(self, group: Hashable, items: int, now: float) -> None:
        point = self._latest
        if self._room > 0 and point is not None and hash(group) == point.group:
            self._room -= items
            point.moments.append(now - point.since)
            point.arrived.append(self._batch_size - self._room)

    def note_outstanding(self, items: int) -> None:
        if items > self._peaks[-1]:
            self._peaks[-1] = items

    def decide(self, group: Hashable, items: int, outstanding: int, now: float) -> None:
        self.note_outstanding(outstanding)
        point = self._latest
        if point is not None:
            point.seconds = now - point.since
            self._pace += (point.seconds - self._pace) * (WEIGHT if self._pace else 1.0)
            # A point at which all expected items were there, and none followed, teaches nothing.
            if point.moments or point.outstanding < self.expected:
                self._past.append(point)
        self._latest = DecisionPoint(group, items, outstanding, now)
        self._room = self._batch_size

    def finished(self, size: int, seconds: float, now: float, outstanding: int, left: int) -> None:
        self.note_outstanding(outstanding)
        self._peaks.append(left)
        self._ended.append((size, seconds))
        point = self._latest
        if point is not None and now - seconds < point.since:
            point.freed = min(point.freed, now - point.since)

    def evaluate(self) -> None:
        if len(self._past) < (1 if self._early else EVALUATE_EVERY):
            return
        for size, seconds in self._ended:
            self._cost.add(size, seconds)
        self._ended.clear()
        times = self._cost.curve()
        if times:
            for point in self._past:
                self._evaluate(point, self._cost.mean, times)
            self._early = max(self._early - len(self._past), 0)
            share = self.expected / self._workers
            if share > self._batch_size:
                full, rest = times.time(self._batch_size), times.time(share - self._batch_size)
                # throughput times B (F + R) / (N F), longest latency times 2 F / (F + R)
                gain = self._batch_size * (full + rest) ** 2
                self._full_pays = gain >= LEAST_GAIN * 2 * share * full**2
        self._past.clear()

    def _evaluate(self, point: DecisionPoint, s: float, times: Curve) -> None:
        """Counts the gain of each wait at `point`; letters as at the head of this file."""
        i = max(0.0, 1 - s / self._pace) if self._pace else 0.0
        seen = min(point.seconds, point.freed, s)
        n, moments, arrived = point.n, point.moments, point.arrived
        room = self._batch_size - n
        hoped = min(room, max(self.expected - point.outstanding, 0))  # items to be hoped for
        there = 0.0  # when these had arrived (s)
        if hoped:
            place = bisect_left(arrived, hoped)
            there = moments[place] if place < len(moments) else NEVER
        last = max(there, moments[-1]) if moments else there
        within = bisect_right(moments, seen)
        m = min(arrived[within - 1], self._batch_size) if within else 0
        waits, gains = self._waits, self._gains
        gain, changes = 0.0, True
        alone = times.time(n)
        f = max(0.0, s - point.freed)
        for number, d in enumerate(waits):
            if d > seen:
                break
            if changes:
                e = min(d, there)
                gain = -WAIT_WEIGHT * n * e
                joined = bisect_right(moments, d)
                if joined:
                    k = min(arrived[joined - 1], room)
                    g = times.time(n + k) - alone
                    p = (times.time(k) - g - f) * k / m
                    gain += k * (p * (1 - e / s) - max(0.0, e - p)) - i * n * g
                changes = d < last
            gains[number] += WEIGHT * (gain - gains[number])
        best = max(gains[: bisect_right(waits, s)], default=0.0)
        self._linger = waits[gains.index(best)] if best > 0 else 0.0
        self.holds = bool(self._linger)
        self.reason = "settled" if self._linger else "eager"


def linger_rule(policy: BatchPolicy, tick: float = 0.0) -> Eager:
    """The rule that `policy.flush` selects, where no wait is shorter than `tick` (s)."""
    if policy.flush == "auto" and policy.timeout:
        return Hindsight(policy.timeout, policy.batch_size, tick, policy.max_concurrent_batches)
    return Window(policy.timeout) if policy.flush == "window" else Eager()
