"""How long a batch that is not full is held back, in the hope that more items join it.

The scheduler asks only while nothing else (a full batch, a drain, a call already begun) settles the
matter. `Hindsight` is the rule of `flush="auto"`. Each moment when a batch might leave though it is
not full is a chance: n items are ready, and for as long as that batch would run, what arrives does
not depend on whether it has left. So what it would have been worth to wait is known afterwards,
without a try. Let K items arrive, and k of them within a wait of at most d, the last one that was
hoped for after e <= d. Then

    gain(d) = k * (p * (1 - e / s) - max(0, e - p) - i * n * b) - DOUBT * n * e        where p = a *
    k / K

A batch takes s, of which a does not depend on its size and b is what an item adds. Whoever joins
saves a batch in so far as none is needed for the rest, less the later it starts, and loses what the
wait took longer than it saved. Whoever was ready waits, and where the worker would be idle
afterwards (for the share i of time that it is) waits for the items that joined, too; where it is
not, that comes back in the next batch. Averages of this for a few d say how long to wait: for the
best of them if it is positive, and not longer than until everyone is there: the most items that
were waiting or running at once lately.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable
from typing import Final, Literal

from .cost import Cost
from .policy import BatchPolicy

FlushReason = Literal["full", "settled", "timeout", "eager", "drain"]

AT_ONCE = -math.inf
NEVER = math.inf

WAITS: Final = [20e-6 * 2**step for step in range(10)]
"""The waits that are considered (s): from what it costs to wake a thread to 10 ms."""
WEIGHT: Final = 0.1
"""Of a new gain in the average."""
DOUBT: Final = 1.2
"""How much the wait of those who are ready counts: a gain that is nearly even with it is often none
(1.1 to 1.3 serve as well).
"""
TOGETHER: Final = 4
"""Chances that are looked back at together, once there have been some: between sleeps, each first
step finds cold caches.
"""
EPOCHS: Final = 8
"""Batches over which the most items at once are taken for everyone there is."""


class Eager:
    """Holds nothing: whatever waits leaves as soon as a worker is free."""

    reason: FlushReason = "eager"
    holds = False
    everyone = math.inf

    def until(self, oldest: float, ready: float, /) -> float:  # noqa: ARG002
        return AT_ONCE


class Window:
    """Holds a group until its oldest item is `timeout` seconds old; time spent behind a busy worker
    counts.
    """

    reason: FlushReason = "timeout"
    holds = True
    everyone = math.inf

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def until(self, oldest: float, ready: float, /) -> float:  # noqa: ARG002
        return oldest + self._timeout


class Chance:
    """A moment when a batch might have left though it was not full, and who came then."""

    __slots__ = ("coming", "group", "moments", "ready", "seconds", "since")

    def __init__(self, group: Hashable, ready: int, now: float) -> None:
        self.group = hash(group)  # not the group, which is not to be kept alive
        self.ready = ready  # items
        self.since = now  # when it was (s)
        self.moments: list[float] = []  # after it, when more of the group arrived (s)
        self.coming: list[int] = []  # items that had arrived by each of these
        self.seconds = 0.0  # until the next chance, once that has come


class Hindsight:
    """Holds a group as long as that has paid so far, and until everyone who has been there lately
    is back.
    """

    def __init__(self, timeout: float, batch_size: int, tick: float = 0.0) -> None:
        self._batch_size = batch_size
        # that are considered (s)
        self._waits = sorted({min(max(wait, tick), timeout) for wait in WAITS})
        # average of what each would have gained (item seconds)
        self._gains = [0.0] * len(self._waits)
        self._cost = Cost()
        self._linger = 0.0  # the best of them; 0.0 if none would have gained anything (s)
        # most items waiting or running at once since the end of each of the last batches
        self._peaks = deque([0], maxlen=EPOCHS + 1)
        self.everyone = 0  # items that are likely to come: the most of these
        self.holds = False  # whether there is a wait that pays
        self.reason: FlushReason = "eager"  # why a batch leaves when its time is over
        self._pace = 0.0  # mean time from one chance to the next (s)
        self._chance: Chance | None = None  # the latest
        # those before at which nobody has looked back yet
        self._past: deque[Chance] = deque(maxlen=EPOCHS)
        self._young = EPOCHS  # chances that are still to be looked back at one by one
        # items of which the arrival matters still: a full batch less those that have come
        self.expected = 0

    def until(self, oldest: float, ready: float, /) -> float:
        """When a group may leave whose oldest item arrived at `oldest`, if a worker is free since
        `ready`.
        """
        return max(oldest, ready) + self._linger if self._linger else AT_ONCE

    def present(self, items: int) -> None:
        """Notes how many items wait or run; to be told whenever there are about to be fewer, and at
        each chance.
        """
        if items > self._peaks[-1]:
            self._peaks[-1] = items
            if items > self.everyone:
                self.everyone = items

    def chance(self, group: Hashable, items: int, now: float) -> None:
        """Notes that a batch of `items` of `group` might leave now, though it is not full."""
        past, self._chance = self._chance, Chance(group, items, now)
        if past is not None:
            past.seconds = now - past.since
            self._past.append(past)
        self.expected = self._batch_size

    def arrived(self, group: Hashable, items: int, now: float) -> None:
        """Notes that `items` have come to `group`."""
        chance = self._chance
        assert chance is not None  # or nothing would be expected
        if hash(group) == chance.group:
            self.expected -= items
            chance.moments.append(now - chance.since)
            chance.coming.append(self._batch_size - self.expected)

    def finished(self, size: int, seconds: float, left: int) -> None:
        """Notes that a batch has ended, and that so many items wait or run now."""
        self._cost.add(size, seconds)
        self._peaks.append(left)

    def look_back(self) -> None:
        """Takes stock of the batches that have ended, and works out what waiting would have gained
        at chances that are over.
        """
        self.everyone = max(self._peaks)
        if len(self._past) >= (1 if self._young else TOGETHER):
            batch, fixed, each = self._cost.estimate()
            for chance in self._past if batch else ():
                self._look_back_at(chance, batch, fixed, each)
                self._young = max(self._young - 1, 0)
            self._past.clear()

    def _look_back_at(self, chance: Chance, batch: float, fixed: float, each: float) -> None:
        """Counts what waiting would have gained at `chance`, given the time of a batch, its fixed
        part, and that of an item (s).
        """
        self._pace += (chance.seconds - self._pace) * (WEIGHT if self._pace else 1.0)
        idle = max(0.0, 1 - batch / self._pace) if self._pace else 0.0
        seen = min(chance.seconds, batch)
        ready, moments, coming = chance.ready, chance.moments, chance.coming
        room = self._batch_size - ready
        hoped = min(room, max(self.everyone - ready, 0))
        there = 0.0  # when all were there that could be
        if hoped:
            place = bisect_left(coming, hoped)
            there = moments[place] if place < len(moments) else NEVER
        last = max(there, moments[-1]) if moments else there
        until = bisect_right(moments, seen)
        came = min(coming[until - 1], self._batch_size) if until else 0
        waits, gains = self._waits, self._gains
        gain, changes = 0.0, True
        for number, wait in enumerate(waits):
            if wait > seen:
                break
            if changes:
                held = min(wait, there)
                gain = -DOUBT * ready * held
                joined = bisect_right(moments, wait)
                if joined:
                    more = min(coming[joined - 1], room)
                    saved = fixed * more / came
                    gain += more * (
                        saved * (1 - held / batch) - max(0.0, held - saved) - idle * ready * each
                    )
                changes = wait < last
            gains[number] += WEIGHT * (gain - gains[number])
        best = max(gains[: bisect_right(waits, batch)], default=0.0)
        self._linger = waits[gains.index(best)] if best > 0 else 0.0
        self.holds = bool(self._linger)
        self.reason = "settled" if self._linger else "eager"


Rule = Eager | Window | Hindsight


def linger(policy: BatchPolicy, tick: float = 0.0) -> Rule:
    """The rule that `policy.flush` selects, where no wait is shorter than `tick` (s)."""
    if policy.flush == "auto" and policy.timeout:
        return Hindsight(policy.timeout, policy.batch_size, tick)
    return Window(policy.timeout) if policy.flush == "window" else Eager()
