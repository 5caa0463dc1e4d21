"""Calls that have ended, until their callers have been woken: none is forgotten whatever breaks in,
a signal, a full stack or a fork.

Wakers may be woken twice, and do not mind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._core.scheduler import Batch, Request
from .async_backend import current_loop
from .wakers import wake_all

Ended = tuple[list[Request], list[Any]]
"""Calls that have ended, and their wakers."""


class Answers:
    """Those of one runtime, by a key that whoever ends calls makes up: the batch, if it was one
    that ended them.
    """

    def __init__(self) -> None:
        # while whoever ended them is about to wake their wakers
        self.open: dict[object, Ended] = {}
        # the same, if something broke in on that: left to whoever comes next
        self.left: dict[object, Ended] = {}

    @property
    def of_batches(self) -> bool:
        """Whether callers of a batch that has ended are being told so."""
        return any(isinstance(key, Batch) for key in list(self.open))

    def end(self, key: object, ended: list[Request]) -> None:
        """Takes the wakers of `ended`, whom nobody else can end from now on; to be called under the
        lock of the runtime.
        """
        wakers: list[Any] = []
        self.open[key] = ended, wakers
        for request in ended:
            wakers.append(request.waker)
            request.waker = None

    def tell(self, key: object) -> None:
        """Wakes the callers of what was ended under `key`."""
        _, wakers = self.open[key]
        wake_all(wakers, current_loop())
        self.open.pop(key, None)

    def leave(self, key: object) -> None:
        """Has whoever comes next tell what was ended under `key` and may not have been told."""
        if key in self.open:
            self.left[key] = self.open[key]
            self.open.pop(key, None)

    def tell_left(self) -> None:
        """Wakes those who were left."""
        for key, (_, wakers) in list(self.left.items()):
            wake_all(wakers, current_loop())
            self.left.pop(key, None)

    def take_all(self) -> Iterator[tuple[Request, Any]]:
        """All that were not told, in a forked process, where whoever was about to tell them is
        gone.
        """
        for pending in (self.open, self.left):
            for requests, wakers in list(pending.values()):
                yield from zip(requests, wakers, strict=True)
            pending.clear()
