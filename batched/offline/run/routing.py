"""Routing: rows of a step with one model for each key wait outside the scheduler, key by key."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ..._core.scheduler import Request, Scheduler


class Routing:
    """Rows of a routed step that wait outside the scheduler, by key.

    Only rows of active keys enter the scheduler. A key becomes active when the scheduler has no
    full batch left: so a worker keeps its model while there are rows for it.
    """

    def __init__(self, most: int) -> None:
        self._most = most  # keys that are active at once: the models that the workers keep
        self._parked: dict[Any, deque[Request]] = {}
        self._active: dict[Any, None] = {}  # oldest first
        self.waiting = 0  # rows that are parked

    def park(self, requests: Sequence[Request]) -> None:
        """Take requests that arrive."""
        for request in requests:
            self._parked.setdefault(request.group_key, deque()).append(request)
        self.waiting += len(requests)

    def feed(self, scheduler: Scheduler, now: float) -> None:
        """Move the requests of active keys to `scheduler`."""
        for key in self._active:
            self._move(key, scheduler, now)

    def activate(self, scheduler: Scheduler, now: float, *, drain: bool) -> bool:
        """Make one more key active, the one with most rows; return False if none has enough.

        A key has enough rows if they fill a batch or, with `drain`, if it has any.
        """
        key = max(self._parked, key=lambda each: len(self._parked[each]), default=None)
        if key is None:
            return False
        if not drain and len(self._parked[key]) < scheduler.capacity.batch_size:
            return False
        self._active[key] = None
        if len(self._active) > self._most:
            del self._active[next(iter(self._active))]
        self._move(key, scheduler, now)
        return True

    def _move(self, key: Any, scheduler: Scheduler, now: float) -> None:
        parked = self._parked.pop(key, ())
        self.waiting -= len(parked)
        for request in parked:
            scheduler.submit(request, now)
