"""How much of what a service allows is used, in virtual time."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from batched._chat.limits import Limits, Outcome

WAY = 0.01
"""Time of a request on its way to the service (s)."""


@dataclass
class Windowed:
    """A service that answers `most` requests in any `window` seconds."""

    most: int
    window: float
    whole_seconds: bool = True  # of Retry-After
    answered: deque[float] = field(default_factory=deque)

    def ask(self, now: float, _: int) -> tuple[bool, float | None]:
        """Whether a request is answered; else the pause that is asked for."""
        while self.answered and self.answered[0] <= now - self.window:
            self.answered.popleft()
        if len(self.answered) < self.most:
            self.answered.append(now)
            return True, None
        pause = self.answered[0] + self.window - now
        return False, math.ceil(pause) if self.whole_seconds else pause

    @property
    def rate(self) -> float:
        return self.most / self.window


@dataclass
class Bucket:
    """One that has a bucket of `burst` tokens, into which come `rate` a second."""

    rate: float
    burst: float
    level: float = 0.0
    filled: float = 0.0

    def ask(self, now: float, _: int) -> tuple[bool, float | None]:
        self.level = min(self.burst, self.level + self.rate * (now - self.filled))
        self.filled = now
        if self.level >= 1:
            self.level -= 1
            return True, None
        return False, (1 - self.level) / self.rate


@dataclass
class Crowded:
    """One that answers `most` requests at a time, and names no moment."""

    most: int
    latency: float

    def ask(self, _: float, under_way: int) -> tuple[bool, float | None]:
        return under_way < self.most, None

    @property
    def rate(self) -> float:
        return self.most / (self.latency + WAY)


Service = Windowed | Bucket | Crowded


def simulate(
    limits: Limits, service: Service, latency: Callable[[], float], seconds: float
) -> tuple[float, int]:
    """Answers a second of a service that is asked whenever it may be, and refusals."""
    now = 0.0
    ends: list[tuple[float, int, Outcome, float | None]] = []
    permits = {}
    number = answers = refusals = under_way = 0
    while now < seconds:
        while limits.ready_at(now, 0) <= now:
            permits[number] = limits.begin(now, 0)
            good, asked = service.ask(now + WAY, under_way)
            under_way += good
            end = now + WAY + (latency() if good else 0.0)
            heapq.heappush(ends, (end, number, "answer" if good else "refusal", asked))
            number += 1
        ready = limits.ready_at(now, 0)
        if not ends or ready <= ends[0][0]:
            now = ready
            continue
        now, which, outcome, asked = heapq.heappop(ends)
        limits.end(permits.pop(which), now, outcome, asked=asked)
        under_way -= outcome == "answer"
        answers += outcome == "answer"
        refusals += outcome == "refusal"
    return answers / seconds, refusals


SERVICES: list[Callable[[], Service]] = [
    lambda: Windowed(100, 1.0, whole_seconds=False),
    lambda: Windowed(600, 10.0, whole_seconds=False),
    lambda: Windowed(600, 60.0),
    lambda: Windowed(3000, 60.0),
    lambda: Bucket(20, 20),
    lambda: Bucket(100, 10),
    lambda: Crowded(8, 0.5),
    lambda: Crowded(20, 2.0),
]


@pytest.mark.parametrize("make", SERVICES, ids=lambda make: str(make()))
def test_nine_tenths_of_what_a_service_allows_are_used(make: Callable[[], Service]) -> None:
    service, chance = make(), random.Random(1)
    mean = service.latency if isinstance(service, Crowded) else 0.25
    limits = Limits(60, random=chance.random)
    rate, refusals = simulate(limits, service, lambda: chance.uniform(0.5, 1.5) * mean, 600.0)
    assert rate >= 0.9 * service.rate
    assert refusals <= 0.25 * rate * 600


def test_a_service_that_bears_everything_gets_as_much_as_there_may_be() -> None:
    """However long answers are: their lengths differ by far more than a slow service's would."""
    chance = random.Random(1)
    limits = Limits(30, random=chance.random)
    service = Windowed(1_000_000, 1.0)
    rate, _ = simulate(limits, service, lambda: chance.lognormvariate(0, 1), 600.0)
    mean = math.exp(0.5) + WAY
    assert rate >= 0.9 * 30 / mean
