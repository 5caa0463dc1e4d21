"""Share of the capacity of a service that is used, in virtual time."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from batched._chat.limits import Limits, Outcome

pytestmark = pytest.mark.once

WAY = 0.01
"""Time of a request on its way to the service (s)."""


@dataclass
class Windowed:
    """A service that answers `most` requests in any `window` seconds."""

    most: int
    window: float
    whole_seconds: bool  # of Retry-After
    answered: deque[float] = field(default_factory=deque)

    def ask(self, now: float, _: int) -> tuple[bool, float | None]:
        while self.answered and self.answered[0] <= now - self.window:
            self.answered.popleft()
        if len(self.answered) < self.most:
            self.answered.append(now)
            return True, None
        pause = self.answered[0] + self.window - now
        return False, math.ceil(pause) if self.whole_seconds else pause


@dataclass
class Bucket:
    """A service with a bucket of `burst` tokens, which gets `rate` tokens a second."""

    rate: float
    burst: float
    named: bool = True  # whether refusals name a moment
    level: float = 0.0
    filled: float = 0.0

    def ask(self, now: float, _: int) -> tuple[bool, float | None]:
        self.level = min(self.burst, self.level + self.rate * (now - self.filled))
        self.filled = now
        if self.level >= 1:
            self.level -= 1
            return True, None
        return False, (1 - self.level) / self.rate if self.named else None


@dataclass
class Growing(Bucket):
    """A service whose rate is five times as high after a hundred seconds."""

    def ask(self, now: float, running: int) -> tuple[bool, float | None]:
        self.rate = 10.0 if now < 100.0 else 50.0
        return super().ask(now, running)


@dataclass
class Crowded:
    """A service that answers `most` requests at a time. Its refusals name no moment."""

    most: int

    def ask(self, _: float, running: int) -> tuple[bool, float | None]:
        return running < self.most, None


@dataclass
class Unlucky:
    """A service that refuses one of `one_in` requests at random, however many there are."""

    one_in: int
    chance: random.Random = field(default_factory=lambda: random.Random(7))

    def ask(self, _: float, __: int) -> tuple[bool, float | None]:
        return self.chance.random() * self.one_in >= 1, None


def simulate(
    service: Windowed | Bucket | Crowded | Unlucky,
    latency: tuple[float, float] = (0.1, 0.4),
    most: int = 30,
    stated: int | None = None,
    seconds: float = 600.0,
) -> tuple[float, int]:
    """Send requests as early as possible; return the answers per second, and the refusals.

    An answer takes a time in the range `latency` (s). `most` are the most requests at once, and
    `stated` the most in a minute; None: they are to be learned.
    """
    chance = random.Random(1)
    limits = Limits(random=chance.random)
    limits.allow(most, stated)
    now = 0.0
    ends: list[tuple[float, int, Outcome, float | None]] = []
    permits = {}
    number = answers = refusals = running = 0
    while now < seconds:
        while limits.ready_at(now, 0) <= now:
            permits[number] = limits.begin(now, 0)
            good, asked = service.ask(now + WAY, running)
            running += good
            end = now + WAY + (chance.uniform(*latency) if good else 0.0)
            heapq.heappush(ends, (end, number, "answer" if good else "refusal", asked))
            number += 1
        ready = limits.ready_at(now, 0)
        if not ends or ready <= ends[0][0]:
            now = ready
            continue
        now, ended, outcome, asked = heapq.heappop(ends)
        limits.end(permits.pop(ended), now, outcome, asked=asked)
        running -= outcome == "answer"
        answers += outcome == "answer"
        refusals += outcome == "refusal"
    return answers / seconds, refusals


@pytest.mark.parametrize(
    ("service", "mean", "allowed"),
    [
        (Windowed(100, 1.0, whole_seconds=False), 0.25, 100.0),
        (Windowed(3000, 60.0, whole_seconds=True), 0.25, 50.0),
        (Bucket(100, 10), 0.25, 100.0),
        (Crowded(20), 2.0, 20 / (2.0 + WAY)),
    ],
    ids=str,
)
def test_nine_tenths_of_the_allowed_rate_are_used(
    service: Windowed | Bucket | Crowded, mean: float, allowed: float
) -> None:
    rate, refusals = simulate(service, (0.5 * mean, 1.5 * mean), most=60)
    assert rate >= 0.9 * allowed
    assert refusals <= 0.25 * rate * 600


@pytest.mark.parametrize(("burst", "named"), [(1, True), (60, False)])
def test_a_rate_that_is_not_stated_is_learned(burst: int, named: bool) -> None:
    rate, refusals = simulate(Bucket(10.0, burst, named=named))
    assert rate >= 0.92 * 10.0
    assert refusals <= 0.12 * rate * 600


def test_refusals_at_random_do_not_space_requests_ever_wider() -> None:
    rate, _ = simulate(Unlucky(20))
    assert rate >= 25.0  # a lower limit of requests at once, without spacing, makes 33


def test_a_learned_spacing_narrows_quickly_when_the_service_allows_more() -> None:
    rate, _ = simulate(Growing(10.0, 1), seconds=200.0)
    assert 200 * rate >= 0.65 * (100 * 10 + 100 * 50)


@pytest.mark.parametrize("burst", [1, 60])
def test_a_stated_rate_is_used_whether_the_service_allows_a_burst_or_not(burst: int) -> None:
    rate, refusals = simulate(Bucket(10.0, burst), stated=600)
    assert rate >= 0.95 * 10.0
    assert refusals <= 0.01 * rate * 600
