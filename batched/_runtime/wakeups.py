"""Wake-ups of the callers of ended calls, kept until they are done.

No caller is forgotten at a fork, or if an exception from a signal handler or a full stack
interrupts. A waker may be woken twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._core.scheduler import Batch, Request
from .wakers import wake_all

Ended = tuple[list[Request], list[Any]]
"""Calls that have ended, and their wakers."""


class Wakeups:
    """Wake-ups of one runtime. Their key is the batch, or another object, that ended the calls."""

    def __init__(self) -> None:
        self.pending: dict[object, Ended] = {}
        # keys of wake-ups that an exception interrupted: the next thread does them
        self.left: dict[object, None] = {}

    @property
    def of_batches(self) -> bool:
        """Whether a thread is waking callers of a batch that has ended."""
        return any(isinstance(key, Batch) and key not in self.left for key in list(self.pending))

    def add(self, key: object, ended: list[Request]) -> None:
        """Take the wakers of `ended`, under the lock of the runtime.

        No other thread can end these calls from now on.
        """
        self.pending[key] = ended, [request.waker for request in ended]
        for request in ended:
            request.waker = None

    def wake(self, key: object) -> None:
        """Wake the callers of the calls that were ended under `key`."""
        if (ended := self.pending.get(key)) is not None:
            wake_all(ended[1])
            self.pending.pop(key, None)

    def leave(self, key: object) -> None:
        """Leave the wake-ups under `key`, of which some may not be done, to the next thread."""
        self.left[key] = None

    def wake_left(self) -> None:
        """Wake the callers that were left."""
        for key in list(self.left):
            self.wake(key)
            self.left.pop(key, None)

    def take_all(self) -> Iterator[tuple[Request, Any]]:
        """Remove and yield all calls with callers that may not be woken, in a forked process.

        The thread that was about to wake them is gone.
        """
        for requests, wakers in list(self.pending.values()):
            yield from zip(requests, wakers, strict=True)
        self.pending.clear()
        self.left.clear()
