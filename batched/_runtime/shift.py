"""Who waits for whom: how code that a batch function runs can tell so, and that a wait of it would never end.

A run is one batch on its way through the function. Code of a run that waits for a call, of whichever batched function, is noted
while it waits; a wait that would close a circle is refused. A run is stuck if one of its waits is for a call that a stuck run
has in its batch, or for one that is queued where stuck runs occupy every worker.
"""

from __future__ import annotations

import os
import threading
from contextvars import ContextVar

from .._core.scheduler import Batch, Request


class Badge:
    """What the runs of one runtime have in common."""

    __slots__ = ("name", "workers")

    def __init__(self, name: str, workers: int) -> None:
        self.name = name  # of the batch function
        self.workers = workers  # runs at once


class Shift:
    """One run of a batch function by the runtime with that badge, begun here, and over once `on` is False."""

    __slots__ = ("badge", "on", "slices")

    def __init__(self, badge: Badge, batch: Batch) -> None:
        self.badge = badge
        self.slices = batch.slices
        self.on = True  # a task that the function started may outlive the run
        _shift.set(self)

    def serves(self, request: Request) -> bool:
        """Whether items of `request` are in its batch."""
        return any(each is request for each, _, _ in self.slices)

    def ends(self) -> None:
        self.on = False
        self.slices = []  # contexts live long, and results are to be kept by nobody


class Wait:
    """The wait of a run for the answer to `request` (None: for all calls) of another runtime, noted until it `ends`."""

    __slots__ = ("badge", "request", "shift")

    def __init__(self, shift: Shift, badge: Badge, request: Request | None) -> None:
        self.shift = shift
        self.badge = badge  # of the runtime that is to answer
        self.request = request

    def ends(self) -> None:
        with _lock:
            _waits.pop(self, None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.ends()


_shift: ContextVar[Shift | None] = ContextVar("shift", default=None)
_lock = threading.RLock()  # guards the next; a signal handler may come in anywhere
_waits: dict[Wait, None] = {}  # of all runs of this process


def wait_for(badge: Badge, request: Request | None) -> Wait | None:
    """Notes that this code is about to wait for `request` (None: for all calls) of the runtime with that badge; None outside any run.

    Raises:
        RuntimeError: it would wait for itself.
    """
    shift = _shift.get()
    if shift is None or not shift.on:
        return None
    wait = Wait(shift, badge, request)
    with _lock:
        own = any(each.badge is badge for each in _above(shift))
        if not own:
            _waits[wait] = None
            own = shift in _stuck()
            if own:
                del _waits[wait]
    if own:
        path = "its own batch" if shift.badge is badge else f"a batch of {shift.badge.name} for which its own batch waits"
        raise RuntimeError(f"{badge.name} is called from within {path}, and would wait for itself; call {badge.name}.__wrapped__")
    return wait


def _above(shift: Shift) -> list[Shift]:
    """`shift` and the runs that wait for calls in its batch, and those that wait for these, and so on."""
    found = [shift]
    for below in found:
        found += [
            wait.shift
            for wait in _waits
            if wait.shift.on and wait.shift not in found and wait.request is not None and below.serves(wait.request)
        ]
    return found


def _stuck() -> set[Shift]:
    """The runs that would wait for ever."""
    stuck = {wait.shift for wait in _waits if wait.shift.on}
    while True:
        still = {wait.shift for wait in _waits if wait.shift in stuck and _blocked(wait, stuck)}
        if len(still) == len(stuck):
            return stuck
        stuck = still


def _blocked(wait: Wait, stuck: set[Shift]) -> bool:
    """Whether `wait` does not end as long as none of the runs `stuck` does."""
    request = wait.request
    blockers = [shift for shift in stuck if shift.badge is wait.badge]
    if request is None:
        return bool(blockers)
    queued = request.taken < request.size
    return (queued and len(blockers) >= wait.badge.workers) or any(shift.serves(request) for shift in blockers)


def renew_lock() -> None:
    """Forgets the waits of other threads, in a forked process, where they are gone."""
    global _lock
    _lock = threading.RLock()
    _waits.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=renew_lock)
