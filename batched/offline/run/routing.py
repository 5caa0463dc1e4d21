"""Routing: rows of a step with one model for each key wait outside the scheduler, key by key."""

from __future__ import annotations

from collections import Counter, defaultdict
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
        self._parked: defaultdict[Any, list[Request]] = defaultdict(list)
        self._rows: Counter[Any] = Counter()  # that are parked, by key
        self._active: dict[Any, None] = {}  # oldest first

    @property
    def waiting(self) -> int:
        """Rows that are parked."""
        return self._rows.total()

    def park(self, requests: Sequence[Request]) -> None:
        """Take requests that arrive."""
        for request in requests:
            self._parked[request.group_key].append(request)
            self._rows[request.group_key] += request.size

    def feed(self, scheduler: Scheduler, now: float) -> None:
        """Move the requests of active keys to `scheduler`."""
        for key in self._active:
            self._move(key, scheduler, now)

    def activate(self, scheduler: Scheduler, now: float, *, drain: bool) -> bool:
        """Make one more key active, the one with most rows; return False if none has enough.

        A key has enough rows if they fill a batch or, with `drain`, if it has any.
        """
        key = max(self._rows, key=self._rows.__getitem__, default=None)
        least = 1 if drain else scheduler.capacity.batch_size
        if key is None or self._rows[key] < least:
            return False
        self._active[key] = None
        if len(self._active) > self._most:
            del self._active[next(iter(self._active))]
        self._move(key, scheduler, now)
        return True

    def _move(self, key: Any, scheduler: Scheduler, now: float) -> None:
        self._rows.pop(key, None)
        for request in self._parked.pop(key, ()):
            scheduler.submit(request, now)
