"""Ended calls, kept until their callers have been woken.

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


class Answers:
    """Ended calls of one runtime. Their key is the batch, or another object, that ended them."""

    def __init__(self) -> None:
        # calls that the thread which ended them is about to answer
        self.open: dict[object, Ended] = {}
        # calls that an exception left unanswered: the next thread answers them
        self.left: dict[object, Ended] = {}

    @property
    def of_batches(self) -> bool:
        """Whether callers of a batch that has ended are being woken."""
        return any(isinstance(key, Batch) for key in list(self.open))

    def end(self, key: object, ended: list[Request]) -> None:
        """Take the wakers of `ended`, under the lock of the runtime.

        No other thread can end these calls from now on.
        """
        self.open[key] = ended, [request.waker for request in ended]
        for request in ended:
            request.waker = None

    def tell(self, key: object) -> None:
        """Wake the callers of the calls that were ended under `key`."""
        _, wakers = self.open[key]
        wake_all(wakers)
        self.open.pop(key, None)

    def leave(self, key: object) -> None:
        """Leave the calls under `key`, of which some may not be answered, to the next thread."""
        if key in self.open:
            self.left[key] = self.open[key]
            self.open.pop(key, None)

    def tell_left(self) -> None:
        """Wake the callers that were left."""
        for key, (_, wakers) in list(self.left.items()):
            wake_all(wakers)
            self.left.pop(key, None)

    def take_all(self) -> Iterator[tuple[Request, Any]]:
        """Remove and yield all calls that may be unanswered, in a forked process.

        The thread that was about to answer them is gone.
        """
        for pending in (self.open, self.left):
            for requests, wakers in list(pending.values()):
                yield from zip(requests, wakers, strict=True)
            pending.clear()
