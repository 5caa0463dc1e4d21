"""Flush rules: how long a batch that is not full is held so that more items can join it.

The scheduler asks the rule only about batches that may be held. Full batches, all batches of a
drain, and the rest of a call that has begun leave at once. `Hindsight` is the rule of
`flush="auto"`. A decision point is a moment at which a batch could leave although it is not full.
The arrivals of the next s seconds are the same whether the batch leaves or is held. So the gain of
each wait d is computed afterwards, and no wait is tried on live calls:

    gain(d) = k * (p * (1 - e / s) - max(0, e - p)) - i * n * g - WAIT_WEIGHT * n * e

    d   the wait considered (s)
    n   items ready at the decision point
    k   items that arrived within d after the point and fit the batch
    m   items that arrived within s after the point, before the next one; at most a full batch
    e   the part of d until the last item that could be expected has arrived (s)
    s   mean time of a batch (s)
    g   T(n + k) - T(n), growth of the batch's time (s), where T is the time by size
    p   (T(k) - g) * k / m, time that each joining item saves (s); negative if joining costs
    i   share of time in which the worker is idle

Each joining item saves p * (1 - e / s), because its batch is delayed by e, and loses the part of e
that exceeds p. Each ready item waits for e. If the worker would be idle afterwards, each ready item
also waits for g. A busy worker does not lose g, because its next batch is smaller. A batch is held
only if one worker is free, because a new item can use any other free worker. The linger is the wait
with the best mean gain, or zero if no mean gain is positive. With a `timeout` the waits end there
or at s. Without one they end at `HOLD` or, if longer, at `HOLD_SHARE` of s.

A held batch leaves before the linger is over if all expected items wait or run, or if the batch has
one worker's share of them. The expected number of items is the largest number that lately waited or
ran at once. With W workers, the share N is expected / W items. If N exceeds the batch size B, then
N - B items are left behind by a full batch. The batch is then held only if the growth of throughput
(left) is at least `LEAST_GAIN` times the growth of the longest latency (right):

    B * (F + R) / (N * F) >= LEAST_GAIN * 2 * F / (F + R)    where F = T(B), R = T(N - B)

If batches are not held, a full batch and a batch of the rest take turns, and every item waits for
both. If they are held, all batches are full, and an item that is left behind waits for two of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Literal

from .cost import LAST, TimeBySize
from .policy import BatchPolicy

FlushReason = Literal["full", "settled", "timeout", "eager", "drain"]
"""Reason why a batch left.

"full": the batch or the queue was full. "settled": `Hindsight` held and released it. "timeout":
`Window` held and released it. "eager": it was not held. "drain": the scheduler drains.
"""

AT_ONCE = -math.inf
"""Moment before any other (s)."""
NEVER = math.inf
"""Moment after any other (s)."""

HOLD: Final = 0.005
"""Longest wait without a `timeout` (s), unless `HOLD_SHARE` of a batch's time is longer."""
HOLD_SHARE: Final = 0.5
"""Longest wait without a `timeout`, as a share of the mean time of a batch. Callers who come back
late need it. A quarter gives less throughput, and a whole gives no more.
"""
WAITS: Final = [20e-6 * 2**step for step in range(8)] + [HOLD * 2**step for step in range(7)]
"""Waits that are considered (s), from 20 us, in which a thread can be woken. The longest allowed
wait follows.
"""
LONGEST: Final = 0.6
"""Longest wait that is considered without a `timeout` (s)."""
WEIGHT: Final = 0.1
"""Weight of a new value in a moving average."""
WAIT_WEIGHT: Final = 1.2
"""Weight of the wait of ready items. A gain that barely covers the wait is often noise. Values from
1.1 to 1.3 work equally well.
"""
EVALUATE_EVERY: Final = 4
"""Decision points that are evaluated together: CPU caches are cold after a sleep, so one evaluation
of four points costs less than four evaluations. The first `RECENT` points are evaluated one by one.
"""
RECENT: Final = 8
"""Batches that count for the expected number of items. Also the number of decision points that are
evaluated one by one at first, and the most that wait for their evaluation.
"""
LEAST_GAIN: Final = 1.05
"""Least growth of throughput, as a multiple of the growth of the longest latency, for which a full
batch is awaited while items are left behind.
"""


class Eager:
    """Rule that holds nothing: a batch leaves as soon as a worker is free."""

    reason: FlushReason = "eager"  # why a batch that was held leaves
    holds = False  # whether batches are held
    max_free = math.inf  # most free workers while a batch is held
    batch_size = 0  # items of a full batch, for rules that ask

    def __init__(self, linger: float = 0.0) -> None:
        self.linger = linger  # time for which a batch is held (s)
        self._cost = TimeBySize()
        # size and time of each batch that `_cost` does not have yet (s)
        self._ended: deque[tuple[int, float]] = deque(maxlen=LAST)

    def time(self, items: int) -> float:
        """Return the expected time of a batch of `items` (s); 0 before the first batch."""
        self._add_ended()
        return self._cost.time(items)

    def _add_ended(self) -> None:
        for size, seconds in self._ended:
            self._cost.add(size, seconds)
        self._ended.clear()

    def is_complete(self, outstanding: int, waiting: int) -> bool:  # noqa: ARG002  of other rules
        """Return whether a group of `waiting` items need not wait for more items.

        `outstanding` is the number of items of all groups that wait or run.
        """
        return False

    def since(self, oldest: float, free_since: float) -> float:
        """Return the moment at which the linger of a group begins (s).

        `oldest` is the arrival of its oldest item, `free_since` the moment since which a worker is
        free (s).
        """
        return max(oldest, free_since)

    def arrived(self, group: Hashable, items: int, now: float) -> None:
        """Record the arrival of `items` in `group`."""

    def decide(self, group: Hashable, items: int, outstanding: int, now: float) -> None:
        """Record a decision point: a batch of `items` of `group` could leave although not full."""

    def finished(self, size: int, seconds: float, outstanding: int, left: int) -> None:  # noqa: ARG002
        """Record the end of a batch of `size` items that took `seconds`.

        `outstanding` items waited or ran before the end, and `left` items do so after it.
        """
        self._ended.append((size, seconds))

    def evaluate(self) -> None:
        """Learn from the recorded events."""


class Window(Eager):
    """Rule that holds a group until its oldest item is `linger` seconds old.

    The time for which the item waited for a busy worker counts.
    """

    reason: FlushReason = "timeout"
    holds = True

    def since(self, oldest: float, free_since: float) -> float:  # noqa: ARG002  of other rules
        return oldest


@dataclass(eq=False)
class DecisionPoint:
    """Moment at which a batch could leave although it was not full, and the arrivals after it."""

    group: int  # hash of the key of the group: a rule keeps no key alive
    n: int  # items of the group
    outstanding: int  # items that waited or ran
    since: float  # the moment (s)
    # each later arrival in the group: the time after `since` (s)
    moments: list[float] = field(default_factory=list)
    # items that arrived after `since`, up to each of `moments`
    arrived: list[int] = field(default_factory=list)
    seconds: float = 0.0  # time until the next decision point (s)


class Hindsight(Eager):
    """Rule that holds a group until all expected items have arrived, and no longer than has paid.

    A wait has paid if its mean gain is positive: see the module.
    """

    reason: FlushReason = "settled"
    max_free = 1  # if more workers are free, a new item can run at once

    def __init__(
        self, timeout: float | None, batch_size: int, tick: float = 0.0, workers: int = 1
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._workers = workers
        end = LONGEST if timeout is None else timeout
        self._hold_share = HOLD_SHARE if timeout is None else 1.0  # of a batch's time
        # waits that are considered (s)
        self._waits = sorted({min(max(wait, tick), end) for wait in (*WAITS, end)})
        self._gains = [0.0] * len(self._waits)  # mean gain of each wait (item seconds)
        # for each period between the ends of two batches, the most items that waited or ran
        # at once; the largest of these numbers is the expected one
        self._peaks = deque([0], maxlen=RECENT + 1)
        # whether a group is held until it fills a batch, although it leaves items behind
        self._full_pays = False
        self._pace = 0.0  # mean time from one decision point to the next (s)
        self._latest: DecisionPoint | None = None
        # earlier decision points that have not been evaluated
        self._past: deque[DecisionPoint] = deque(maxlen=RECENT)
        self._singly = RECENT  # number of decision points still to be evaluated one by one
        self._unrecorded = 0  # later arrivals that the latest decision point still records (items)

    def is_complete(self, outstanding: int, waiting: int) -> bool:
        expected = max(self._peaks)
        share = expected / self._workers
        return (
            outstanding >= expected
            or waiting >= share
            or (share > self.batch_size and not self._full_pays)
        )

    def arrived(self, group: Hashable, items: int, now: float) -> None:
        point = self._latest
        if self._unrecorded > 0 and point is not None and hash(group) == point.group:
            self._unrecorded -= items
            point.arrived.append(self.batch_size - self._unrecorded)
            point.moments.append(now - point.since)

    def note_outstanding(self, items: int) -> None:
        """Record the number of items that wait or run. Called before that number falls."""
        if items > self._peaks[-1]:
            self._peaks[-1] = items

    def decide(self, group: Hashable, items: int, outstanding: int, now: float) -> None:
        if outstanding > self._peaks[-1]:  # as `note_outstanding`, without a call
            self._peaks[-1] = outstanding
        point = self._latest
        if point is not None:
            point.seconds = now - point.since
            self._pace += (point.seconds - self._pace) * (WEIGHT if self._pace else 1.0)
            # else all expected items were there and none followed: no wait could gain anything
            if point.moments or point.outstanding < max(self._peaks):
                self._past.append(point)
        self._latest = DecisionPoint(hash(group), items, outstanding, now)
        self._unrecorded = self.batch_size

    def finished(self, size: int, seconds: float, outstanding: int, left: int) -> None:
        self.note_outstanding(outstanding)
        self._peaks.append(left)
        self._ended.append((size, seconds))

    def evaluate(self) -> None:
        if len(self._past) < (1 if self._singly else EVALUATE_EVERY):
            return
        self._add_ended()
        time = self._cost.time
        if self._cost.mean:
            for point in self._past:
                self._evaluate(point, self._cost.mean)
            self._singly = max(self._singly - len(self._past), 0)
            # the last formula of the module, without divisions
            share = max(self._peaks) / self._workers
            if share > self.batch_size:
                full, rest = time(self.batch_size), time(share - self.batch_size)
                left_side = self.batch_size * (full + rest) ** 2
                self._full_pays = left_side >= LEAST_GAIN * 2 * share * full**2
        self._past.clear()

    def _evaluate(self, point: DecisionPoint, s: float) -> None:
        """Add the gain of each wait at `point` to the means. The module explains the letters."""
        i = max(0.0, 1 - s / self._pace) if self._pace else 0.0
        seen = min(point.seconds, s)  # time after the point for which arrivals are known (s)
        n, moments, arrived = point.n, point.moments, point.arrived
        room = self.batch_size - n
        missing = min(room, max(max(self._peaks) - point.outstanding, 0))  # items that could join
        complete = 0.0  # arrival of the last of them (s)
        if missing:
            place = bisect_left(arrived, missing)
            complete = moments[place] if place < len(moments) else NEVER
        last = max(complete, moments[-1]) if moments else complete  # longer waits gain the same
        within = bisect_right(moments, seen)
        m = min(arrived[within - 1], self.batch_size) if within else 0
        waits, gains, time = self._waits, self._gains, self._cost.time
        gain, changes = 0.0, True
        alone = time(n)
        longest = max(min(s, HOLD), s * self._hold_share)  # wait that may be chosen (s)
        for number, d in enumerate(waits):
            if d > seen or d > longest:
                break
            if changes:
                e = min(d, complete)
                gain = -WAIT_WEIGHT * n * e
                joined = bisect_right(moments, d)
                if joined:
                    k = min(arrived[joined - 1], room)
                    g = time(n + k) - alone
                    p = (time(k) - g) * k / m
                    gain += k * (p * (1 - e / s) - max(0.0, e - p)) - i * n * g
                changes = d < last
            gains[number] += WEIGHT * (gain - gains[number])
        best = max(gains[: bisect_right(waits, longest)], default=0.0)
        self.linger = waits[gains.index(best)] if best > 0 else 0.0
        self.holds = bool(self.linger)


def flush_rule(policy: BatchPolicy, tick: float = 0.0) -> Eager:
    """Return the rule that `policy.flush` selects. No wait is shorter than `tick` (s)."""
    timeout = policy.timeout_ms and policy.timeout_ms / 1e3  # seconds; None, if it is None
    if policy.flush == "auto" and timeout != 0:
        return Hindsight(timeout, policy.batch_size, tick, policy.max_concurrent_batches)
    return Window(HOLD if timeout is None else timeout) if policy.flush == "window" else Eager()
