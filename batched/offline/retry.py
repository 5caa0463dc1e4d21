"""Retries of a call after a fault of its service, and the waits between them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import isfinite

from .._services.errors import is_service_error, retry_after


@dataclass(frozen=True)
class Retry:
    """Retries of a call after a fault of its service, and the waits between them.

    The wait after call n is `min(wait_max, wait_initial * 2 ** (n - 1) + jitter)` seconds, with a
    random jitter from 0 to `wait_jitter`. A time that the service asks for (`Retry-After`) replaces
    the growing part.
    """

    attempts: int = 3
    """Calls in all, the first one included; 1 means no retries."""
    on: tuple[type[BaseException], ...] = ()
    """Further classes of exceptions that count as faults of the service."""
    wait_initial: float = 0.5
    """Wait before the second call (s)."""
    wait_max: float = 30.0
    """Longest wait (s), also if the service asks for more."""
    wait_jitter: float = 1.0
    """Longest random part of a wait (s), so that workers do not return all at once."""

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int):
            raise TypeError(f"attempts must be a whole number, got {self.attempts!r}")
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {self.attempts}")
        if not isinstance(self.on, tuple) or not all(
            isinstance(each, type) and issubclass(each, BaseException) for each in self.on
        ):
            raise TypeError(f"on must be a tuple of exception classes, got {self.on!r}")
        for name in ("wait_initial", "wait_max", "wait_jitter"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number of seconds, got {value!r}")
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be at least 0 seconds, got {value!r}")

    def is_due(self, error: BaseException) -> bool:
        """Return whether an error is a fault of the service: the same call may succeed later."""
        return is_service_error(error, self.on)

    def wait(self, attempt: int, error: BaseException) -> float:
        """Return the wait after call number `attempt`, which failed with `error` (s)."""
        asked = retry_after(error)
        # beyond 2 ** 60 every wait is longer than any `wait_max`
        grown = self.wait_initial * 2.0 ** min(attempt - 1, 60) if asked is None else asked
        return min(float(self.wait_max), grown + random.uniform(0, self.wait_jitter))
