"""How long a batch that is not full is held back, in the hope that more items join it.

A rule sees the moment its group's oldest item arrived and says when the group may leave; the scheduler
asks it only while nothing else (a full batch, a drain, a call already begun) settles the matter.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

from .policy import BatchPolicy

FlushReason = Literal["full", "settled", "timeout", "eager", "drain"]

AT_ONCE = -math.inf
NEVER = math.inf


class Linger(Protocol):
    """When a group may leave although its batch is not full."""

    reason: FlushReason

    def until(self, oldest: float, /) -> float:
        """The moment, in seconds on the scheduler's clock, from which a group whose oldest item arrived at `oldest` may leave."""
        ...


class Eager:
    """Holds nothing: whatever waits leaves as soon as a worker is free."""

    reason: FlushReason = "eager"

    def until(self, _: float, /) -> float:
        return AT_ONCE


class Window:
    """Holds a group until its oldest item is `timeout` seconds old; time spent behind a busy worker counts."""

    reason: FlushReason = "timeout"

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def until(self, oldest: float, /) -> float:
        return oldest + self._timeout


def linger(policy: BatchPolicy) -> Linger:
    """The rule that `policy.flush` selects; `"auto"` holds nothing."""
    return Window(policy.timeout) if policy.flush == "window" else Eager()
