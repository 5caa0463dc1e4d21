"""Log records of events that operators look for, a few of each kind only."""

from __future__ import annotations

import time
from contextlib import ContextDecorator
from typing import Final

from .wakers import log_failure, logger

INTERVAL: Final = 10.0
"""Shortest time between two records of one kind about one function (s)."""


class Notices:
    """Notices about one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._kinds: dict[str, tuple[float, int]] = {}
        """For each kind: the moment of its latest record (s), and events since then."""

    def add(self, kind: str, message: str) -> None:
        """Log a warning, unless a record of its kind was logged lately."""
        now = time.perf_counter()
        latest, events = self._kinds.get(kind, (-INTERVAL, 0))
        if now - latest < INTERVAL:
            self._kinds[kind] = latest, events + 1
            return
        self._kinds[kind] = now, 0
        more = f" (and {events:,} times since the last record)" if events else ""
        logger.warning("%s: %s%s", self._name, message, more)


class LogOnce(ContextDecorator):
    """Context that ends every exception, and logs the first."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._failed = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> bool:
        if kind is not None and not self._failed:
            self._failed = True
            log_failure(f"{self._message}; further failures of it are not logged")
        return True
