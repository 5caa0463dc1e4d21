"""Waits of code that a batch function runs, and the refusal of deadlocks.

A run is one batch on its way through the function. While code of a run waits for a call, of any
batched function, the wait is noted. A wait that would be part of a deadlock is refused. A run is
deadlocked while it waits for a call that a deadlocked run has in its batch, or for a call that no
run has yet and for which deadlocked runs leave no worker.

Code belongs to the run that its worker executes. Code that a run has started and that outlives it
counts as part of the worker's next run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

from .._core.scheduler import Batch, Request


class Pool:
    """Workers of one runtime. Runs refer to it, because they must not keep the runtime alive."""

    __slots__ = ("name", "running", "size", "waits")

    def __init__(self, name: str, size: int) -> None:
        self.name = name  # of the batch function
        self.size = size  # runs at once
        # the batches that were handed out and not answered, begun or not
        self.running: Iterable[Batch] = ()
        # waits of code of its runs; weak, because an abandoned task must not be kept alive
        self.waits: WeakSet[Wait] = WeakSet()

    def has_begun(self, request: Request | None) -> bool:
        """Return whether every unanswered item of `request` is being run."""
        return (
            request is not None
            and sum([_items(request, batch) for batch in list(self.running) if batch.begun])
            >= request.pending
        )


class Run:
    """Present run of one worker, as the code of the run sees it.

    The context of the worker holds one for all its runs. Threads and tasks that a run starts
    inherit it. With `callbacks` it stands for the callbacks that the worker's thread calls between
    two runs.
    """

    __slots__ = ("batch", "callbacks", "pool", "runtime", "thread")

    def __init__(
        self, pool: Pool, thread: threading.Thread | None, *, callbacks: bool = False
    ) -> None:
        self.pool = pool  # of the worker
        self.thread = thread  # of the worker; None: a task of an event loop
        self.callbacks = callbacks
        self.batch: Batch | None = None  # the present run's; None between runs
        self.runtime: Any = None  # answers calls of a run early; None: none can

    @property
    def goes_on(self) -> bool:
        """Whether this code can block the worker: a task may outlive the run that started it."""
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
    """Wait of a run for the answer to `request` of another pool, or, if None, to all its calls."""

    __slots__ = ("__weakref__", "batch", "is_over", "pool", "request", "run")

    def __init__(
        self, run: Run, pool: Pool, request: Request | None, is_over: Callable[[], bool]
    ) -> None:
        self.run = run
        self.batch = run.batch  # the wait may outlive it
        self.pool = pool  # runs the request
        self.request = request
        self.is_over = is_over  # returns whether the waiting code has been woken

    def ends(self) -> None:
        """Remove the note."""
        with _lock:
            self.run.pool.waits.discard(self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.ends()

    def is_blocked(self, blocked: set[Run]) -> bool:
        """Return whether the wait lasts as long as no run of `blocked` ends."""
        request, runs = self.request, [run for run in blocked if run.pool is self.pool]
        if request is None or not runs:
            return bool(runs)
        if self.is_over():
            return False
        if any(run.batch is not None and _items(request, run.batch) for run in runs):
            return True
        return len(runs) >= self.pool.size and not self.pool.has_begun(request)


_run: ContextVar[Run | None] = ContextVar("run", default=None)
current_run = _run.get
"""Return the run that this code is, or was, part of; None for most callers."""


def enter_worker(pool: Pool, *, thread: bool) -> Run:
    """Note that this thread, or task, is a worker of `pool`. Return where it notes its runs."""
    run = Run(pool, threading.current_thread() if thread else None)
    _run.set(run)
    return run


@contextmanager
def between_runs() -> Iterator[None]:
    """Run callbacks: in a worker between two runs they belong to neither."""
    run = before = _run.get()
    if run is not None and run.batch is None and not run.callbacks:
        run = None if run.thread is None else Run(run.pool, run.thread, callbacks=True)
    _run.set(run)
    try:
        yield
    finally:
        _run.set(before)


def is_running() -> bool:
    """Return whether this code is part of a run that goes on, or of callbacks of a worker."""
    run = _run.get()
    return run is not None and run.goes_on


# guards the waits of all pools; reentrant, for a signal handler or a finalizer
_lock = threading.RLock()


def wait_for(pool: Pool, request: Request | None, is_over: Callable[[], bool]) -> Wait | None:
    """Note that this code is about to wait for `request` of `pool`. Return None outside any run.

    With `request` None the code waits for all calls. A task that a run has started must not wait
    for its function after the run either: so the answer does not depend on which of the two is
    faster.

    Raises:
        RuntimeError: the code would wait for itself.
    """
    run = _run.get()
    if run is None or (run.callbacks and not run.goes_on):
        return None  # another thread, which a callback has started
    if run.pool is pool and not pool.has_begun(request):
        raise RuntimeError(
            f"{pool.name} is called from within its own batch, and would wait for "
            f"itself; call {pool.name}.__wrapped__ (a task that a batch starts and does not wait "
            "for may call it in an empty contextvars.Context)"
        )
    if not run.goes_on:
        return None
    wait = Wait(run, pool, request, is_over)
    with _lock:
        if not _is_deadlocked(wait):
            run.pool.waits.add(wait)
            return wait
    raise RuntimeError(
        f"{pool.name} is called from within a batch of {run.pool.name} for which its own batch "
        f"waits, and would wait for itself; call {pool.name}.__wrapped__"
    )


def _is_deadlocked(wait: Wait) -> bool:
    """Return whether `wait` would never end.

    Of all waits on which `wait` may depend, waits that can end are removed, until the waits that
    are left block each other.
    """
    blocked: set[Wait] = set()
    found = {wait}
    while found:
        blocked |= found
        pools = {each.pool for each in found}
        found = {each for pool in pools for each in pool.waits if each.batch is each.run.batch}
        found -= blocked
    while wait in blocked:
        runs = {each.run for each in blocked}
        still = {each for each in blocked if each.is_blocked(runs)}
        if len(still) == len(blocked):
            return True
        blocked = still
    return False


def _items(request: Request, batch: Batch) -> int:
    """Return the number of items of `request` in `batch`."""
    return sum([stop - start for each, start, stop in batch.slices if each is request])


def _after_fork() -> None:
    """Leave the run of the parent that this code may be part of."""
    global _lock
    _lock = threading.RLock()
    _run.set(None)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
