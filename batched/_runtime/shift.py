"""Who waits for whom: how code that a batch function runs can tell so, and that a wait of it would
never end.

A run is a batch on its way through the function. While code of a run waits for a call, of whichever
batched function, that is noted. A wait that would leave runs stuck is refused: a run is stuck while
it waits for a call that a stuck run has in its batch, or for one that no run has yet and for which
stuck runs leave no worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextvars import Context, ContextVar
from typing import Any
from weakref import WeakSet

from .._core.scheduler import Batch, Request


class Badge:
    """What the runs of one runtime have in common."""

    __slots__ = ("__weakref__", "name", "running", "workers")

    def __init__(self, name: str, workers: int) -> None:
        self.name = name  # of the batch function
        self.workers = workers  # runs at once
        # the batches that were handed out and not answered, begun or not
        self.running: Iterable[Batch] = ()

    def has_begun(self, request: Request | None) -> bool:
        """Whether all that has not been answered of `request` is being run."""
        return (
            request is not None
            and sum([_items(request, batch) for batch in list(self.running) if batch.begun])
            >= request.pending
        )


class Shift:
    """One run of a batch function by the runtime with that badge, or (`thread`) all that a thread
    does which runs batches for it, besides running the function.
    """

    __slots__ = ("__weakref__", "_answer", "_before", "badge", "batch", "thread", "waits")

    def __init__(
        self, badge: Badge, batch: Batch, answer: Callable[[Request, Any], None] | None = None
    ) -> None:
        self.badge = badge
        self._answer = answer  # answers one call of the batch; None: that is not possible here
        self.batch: Batch | None = batch  # None once the run is over
        self.thread: threading.Thread | None = None  # the only one that can hold it up; None: any
        self.waits: dict[Badge, WeakSet[Wait]] = {}  # of its code, by whose answer is waited for
        self._before = _shift.get()
        batch.begun = True
        _shift.set(self)

    @property
    def on(self) -> bool:
        """Whether this code can hold it up: a task that it started may outlive a run."""
        return self.batch is not None or self.thread is threading.current_thread()

    def answer_early(self, item: object, result: Any) -> bool:
        """Answers the call of one item of the batch before the others: what the function returns
        for it is not used. False if it is one of a list, which is answered as a whole.
        """
        batch, answer = self.batch, self._answer
        if batch is not None and answer is not None:
            for request, _, _ in batch.slices:
                if request.items is item and not request.listed:
                    answer(request, result)
                    return True
        return False

    def answers(self) -> None:
        """The function has returned: what callbacks do, and what they have others do, is no part of
        the run.
        """
        _shift.set(self._before)

    def ends(self) -> None:
        # contexts live long, and results are to be kept by nobody
        self.batch = self._answer = None
        if self.waits:
            self.waits = {}


class Wait:
    """The wait of a run for the answer to `request` (None: for all calls), or only for room in the
    queue, noted until it ends.
    """

    __slots__ = ("__weakref__", "badge", "done", "request", "room", "shift")

    def __init__(
        self,
        shift: Shift,
        badge: Badge,
        request: Request | None,
        room: bool,
        done: Callable[[], bool] | None,
    ) -> None:
        self.shift = shift
        self.badge = badge  # of the runtime that is to answer
        self.request = request
        self.room = room
        # whether whoever waits has been told; None: it has when the request has ended
        self.done = done

    def ends(self) -> None:
        with _lock:
            waits = self.shift.waits.get(self.badge)
            if waits is not None:
                waits.discard(self)
                if not waits:
                    self.shift.waits.pop(self.badge, None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.ends()

    def is_blocked(self, stuck: list[Shift]) -> bool:
        """Whether it does not end as long as none of `stuck`, runs by those who are to answer,
        does.
        """
        request = self.request
        if request is None:
            return True
        if (request.waker is None if self.done is None else self.done()) or (
            self.room and (request.queued_in is not None or request.dispatched)
        ):
            return False  # it is ending
        if any(shift.batch is not None and _items(request, shift.batch) for shift in stuck):
            return True
        return len(stuck) >= self.badge.workers and not self.badge.has_begun(request)


_shift: ContextVar[Shift | None] = ContextVar("shift", default=None)
within_run = _shift.get
"""The run that this code is, or was, part of; None for most callers, who need not ask more."""


def daemon_thread(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """A thread, not started yet, that serves many callers: in a context of its own, where others
    inherit that of whoever starts them (`thread_inherit_context`, which free-threaded builds set).
    """
    return threading.Thread(
        target=Context().run, args=(target, *args), name=f"batched-{name}", daemon=True
    )


def enter_worker(badge: Badge) -> None:
    """Notes that this thread runs batches for the runtime with that badge: callbacks and finalizers
    in it must not wait for one either.
    """
    worker = Shift.__new__(Shift)
    worker.badge, worker.batch, worker.waits = badge, None, {}
    worker._answer = None
    worker.thread = threading.current_thread()
    _shift.set(worker)


def is_running() -> bool:
    """Whether this code is part of a run that is not over, or of its callbacks."""
    shift = _shift.get()
    return shift is not None and shift.on


# guards the next, and the waits of shifts; a signal handler or a finalizer may come in anywhere
_lock = threading.RLock()
# runs that have waited for something. Nothing here keeps what was abandoned alive
_waiting: WeakSet[Shift] = WeakSet()


def wait_for(
    badge: Badge,
    request: Request | None,
    *,
    room: bool = False,
    done: Callable[[], bool] | None = None,
) -> Wait | None:
    """Notes that this code is about to wait for `request` (None: for all calls) of the runtime with
    that badge; None outside any run.

    What a run has started must not wait for its function after the run either, so that the answer
    does not depend on which of the two is faster.

    Raises:
        RuntimeError: it would wait for itself.
    """
    shift = _shift.get()
    if shift is None or (shift.thread is not None and not shift.on):
        return None  # the latter is what callbacks have others do
    if shift.badge is badge and not badge.has_begun(request):
        raise RuntimeError(
            f"{badge.name} is called from within its own batch, and would wait for "
            f"itself; call {badge.name}.__wrapped__ (what a batch starts and does not wait for may "
            "call it in an empty contextvars.Context)"
        )
    if not shift.on:
        return None
    wait = Wait(shift, badge, request, room, done)
    with _lock:
        shift.waits.setdefault(badge, WeakSet()).add(wait)
        _waiting.add(shift)
        if not _is_stuck(shift):
            return wait
        wait.ends()
    raise RuntimeError(
        f"{badge.name} is called from within a batch of {shift.badge.name} for which its own batch "
        "waits, and would wait for itself; "
        f"call {badge.name}.__wrapped__"
    )


def _is_stuck(shift: Shift) -> bool:
    """Whether `shift` would wait for ever: the others are looked at until those that are left hold
    up each other.
    """
    stuck = {each for each in list(_waiting) if each.waits}
    while shift in stuck:
        still = {each for each in stuck if _holds_up(each, stuck)}
        if len(still) == len(stuck):
            return True
        stuck = still
    return False


def _holds_up(shift: Shift, stuck: set[Shift]) -> bool:
    """Whether one of the waits of `shift` does not end as long as none of `stuck` does."""
    for badge, waits in list(shift.waits.items()):
        blockers = [each for each in stuck if each.badge is badge]
        if blockers and any(wait.is_blocked(blockers) for wait in list(waits)):
            return True
    return False


def _items(request: Request, batch: Batch) -> int:
    """Items of `request` in `batch`."""
    return sum([stop - start for each, start, stop in batch.slices if each is request])


def _after_fork() -> None:
    """Forgets what runs and waits in the parent only, and that this code may have been run by a
    batch function there.
    """
    global _lock
    _lock = threading.RLock()
    _waiting.clear()
    _shift.set(None)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
