"""Waits of code that a batch function runs, and the refusal of a wait that would never end.

A run is one batch on its way through the function. While code of a run waits for a call, of any
batched function, the wait is noted. A wait that would leave runs stuck is refused. A run is stuck
while it waits for a call that a stuck run has in its batch, or for a call that no run has yet and
for which stuck runs leave no worker.

Code belongs to the run that its worker executes. Code that a run has started and that outlives it
counts as part of the worker's next run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any
from weakref import WeakSet

from .._core.scheduler import Batch, Request


class Badge:
    """Mark of one runtime, which its runs carry instead of a reference to it."""

    __slots__ = ("__weakref__", "name", "running", "workers")

    def __init__(self, name: str, workers: int) -> None:
        self.name = name  # of the batch function
        self.workers = workers  # runs at once
        # the batches that were handed out and not answered, begun or not
        self.running: Iterable[Batch] = ()

    def has_begun(self, request: Request | None) -> bool:
        """Return whether every unanswered item of `request` is being run."""
        return (
            request is not None
            and sum([_items(request, batch) for batch in list(self.running) if batch.begun])
            >= request.pending
        )


class Shift:
    """The present run of one worker, as the code of the run sees it.

    The context of the worker holds one for all its runs. Threads and tasks that a run starts
    inherit it. With `callbacks` it stands for the callbacks that the worker's thread runs between
    two runs.
    """

    __slots__ = ("__weakref__", "badge", "batch", "callbacks", "runtime", "thread", "waits")

    def __init__(
        self, badge: Badge, thread: threading.Thread | None, *, callbacks: bool = False
    ) -> None:
        self.badge = badge  # of the runtime that the worker serves
        self.thread = thread  # of the worker; None: a task of an event loop
        self.callbacks = callbacks
        self.batch: Batch | None = None  # the present run's; None between runs
        self.runtime: Any = None  # answers calls of a run early; None: none can
        # waits of code of the present run, by the runtime that is to answer
        self.waits: dict[Badge, WeakSet[Wait]] = {}

    @property
    def on(self) -> bool:
        """Whether this code can hold the worker up: a task may outlive the run that started it."""
        return self.batch is not None or self.thread is threading.current_thread()

    def answer_early(self, item: object, result: Any) -> bool:
        """Answer the call of one item of the batch before the rest of the batch.

        The result that the function returns for the item is not used. Return False if the item is
        one of a list, which is answered as a whole.
        """
        batch, runtime = self.batch, self.runtime
        if batch is not None and runtime is not None:
            for request, _, _ in batch.slices:
                if request.items is item and not request.listed:
                    runtime.answer(batch, request, result)
                    return True
        return False


class Wait:
    """A wait of a run: for the answer to `request` (None: to all calls), or for room in the queue
    alone. The wait is noted until it ends.
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
        # returns whether the waiting code has been woken; None: at the end of the request
        self.done = done

    def ends(self) -> None:
        """Remove the note."""
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
        """Return whether the wait lasts as long as no run of `stuck` ends. These are runs of the
        runtime that is to answer.
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
"""Return the run that this code is, or was, part of; None for most callers."""


def daemon_thread(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Return a thread, not started yet, that serves many callers.

    It runs in an empty context. Free-threaded builds would have it inherit the context of the
    thread that starts it (`thread_inherit_context`).
    """
    return threading.Thread(
        target=Context().run, args=(target, *args), name=f"batched-{name}", daemon=True
    )


def enter_worker(badge: Badge, *, thread: bool) -> Shift:
    """Note that this thread, or task, runs batches for the runtime with that badge, and return
    where it notes them.
    """
    shift = Shift(badge, threading.current_thread() if thread else None)
    _shift.set(shift)
    return shift


@contextmanager
def between_runs() -> Iterator[None]:
    """Run callbacks: in a worker between two runs they belong to neither."""
    shift = before = _shift.get()
    if shift is not None and shift.batch is None and not shift.callbacks:
        thread = shift.thread
        shift = None if thread is None else Shift(shift.badge, thread, callbacks=True)
    _shift.set(shift)
    try:
        yield
    finally:
        _shift.set(before)


def is_running() -> bool:
    """Return whether this code is part of a run that is not over, or of its callbacks."""
    shift = _shift.get()
    return shift is not None and shift.on


# guards `_waiting` and the waits of runs; reentrant, for a signal handler or a finalizer
_lock = threading.RLock()
# workers whose runs have waited, weakly: an abandoned worker is not kept alive
_waiting: WeakSet[Shift] = WeakSet()


def wait_for(
    badge: Badge,
    request: Request | None,
    *,
    room: bool = False,
    done: Callable[[], bool] | None = None,
) -> Wait | None:
    """Note that this code is about to wait for `request` (None: for all calls) of the runtime with
    that badge. Return None outside any run.

    A task that a run has started must not wait for its function after the run either. So the
    answer does not depend on which of the two is faster.

    Raises:
        RuntimeError: it would wait for itself.
    """
    shift = _shift.get()
    if shift is None or (shift.callbacks and not shift.on):
        return None  # another thread, which a callback has started
    if shift.badge is badge and not badge.has_begun(request):
        raise RuntimeError(
            f"{badge.name} is called from within its own batch, and would wait for "
            f"itself; call {badge.name}.__wrapped__ (a task that a batch starts and does not wait "
            "for may call it in an empty contextvars.Context)"
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
    """Return whether `shift` would wait for ever. Runs that can go on are taken out, until the
    runs that are left hold up each other.
    """
    stuck = {each for each in list(_waiting) if each.waits}
    while shift in stuck:
        still = {each for each in stuck if _holds_up(each, stuck)}
        if len(still) == len(stuck):
            return True
        stuck = still
    return False


def _holds_up(shift: Shift, stuck: set[Shift]) -> bool:
    """Return whether one of the waits of `shift` lasts as long as no run of `stuck` ends."""
    for badge, waits in list(shift.waits.items()):
        blockers = [each for each in stuck if each.badge is badge]
        if blockers and any(wait.is_blocked(blockers) for wait in list(waits)):
            return True
    return False


def _items(request: Request, batch: Batch) -> int:
    """Return the number of items of `request` in `batch`."""
    return sum([stop - start for each, start, stop in batch.slices if each is request])


def _after_fork() -> None:
    """Forget runs and waits, which exist in the parent only, and that a batch function may have
    run this code there.
    """
    global _lock
    _lock = threading.RLock()
    _waiting.clear()
    _shift.set(None)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
