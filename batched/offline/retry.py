"""Retries of a call after a fault of its service, and the waits between them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .._core.checks import check_whole
from .._services.errors import is_service_error, retry_after
from .checks import check_amount


@dataclass(frozen=True)
class Retry:
    """Retries of a call after a fault of its service, and the waits between them.

    The wait after call n is `min(wait_max, wait_initial * 2 ** (n - 1) + jitter)` seconds, with a
    random jitter from 0 to `wait_jitter`. A time that the service asks for (`Retry-After`) replaces
    the growing part.
    """

    attempts: int = 3
    """Calls in all, the first one included; 1 means no retries, but for the search of a batch."""
    on: tuple[type[BaseException], ...] = ()
    """Further classes of exceptions that count as faults of the service."""
    wait_initial: float = 0.5
    """Wait before the second call (s)."""
    wait_max: float = 30.0
    """Longest wait (s), also if the service asks for more."""
    wait_jitter: float = 1.0
    """Longest random part of a wait (s), so that workers do not return all at once."""

    def __post_init__(self) -> None:
        check_whole("Retry: attempts", self.attempts)
        if not isinstance(self.on, tuple) or not all(
            isinstance(each, type) and issubclass(each, BaseException) for each in self.on
        ):
            raise TypeError(f"on must be a tuple of exception classes, got {self.on!r}")
        for name in ("wait_initial", "wait_max", "wait_jitter"):
            check_amount(f"Retry: {name}", getattr(self, name))

    def is_service_fault(self, error: BaseException) -> bool:
        """Return whether an error is a fault of the service: the same call may succeed later."""
        return is_service_error(error, self.on)

    def wait(self, attempt: int, error: BaseException) -> float:
        """Return the wait after call number `attempt`, which failed with `error` (s)."""
        asked = retry_after(error)
        # beyond 2 ** 60 every wait is longer than any `wait_max`
        grown = self.wait_initial * 2.0 ** min(attempt - 1, 60) if asked is None else asked
        return min(float(self.wait_max), grown + random.uniform(0, self.wait_jitter))
