"""Waits of code that a batch function runs, and the refusal of deadlocks.

A run is one batch on its way through the function. Code of a run may call batched functions. Each
wait for such a call is noted here while it lasts, and a wait that would complete a deadlock is
refused. A run is deadlocked in two cases:

1. It waits for a call that is in the batch of a deadlocked run.
2. It waits for a call that has not begun, and deadlocked runs occupy all workers of that function.

Code belongs to the run that its worker executes. Code that a run has started and that outlives the
run counts as part of the worker's next run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from .._core.scheduler import Batch, Request


@dataclass(eq=False)
class Pool:
    """Workers of one runtime. A run refers to its pool, and does not keep the runtime alive."""

    name: str  # of the batch function
    size: int  # most runs at once
    running: Iterable[Batch] = ()  # batches that were handed out and have not ended, begun or not
    # waits of the code of these runs; weak, so that a wait keeps no abandoned task alive
    waits: WeakSet[Wait] = field(default_factory=WeakSet)

    def has_begun(self, request: Request | None) -> bool:
        """Return whether every unanswered item of `request` is in a batch that has begun."""
        return (
            request is not None
            and sum([_items(request, batch) for batch in list(self.running) if batch.begun])
            >= request.size - request.answered
        )


@dataclass(eq=False)
class Run:
    """Present run of one worker.

    Each worker has one object for all its runs, as a variable of its context (`contextvars`), where
    the code of the run finds it. Tasks that a run starts inherit the variable, and so do threads in
    some builds of Python. With `callbacks` the object stands for the callbacks of futures and the
    observers that the worker's thread calls between two runs.
    """

    pool: Pool  # of the worker
    thread: threading.Thread | None  # of the worker; None: a task of an event loop
    callbacks: bool = False
    batch: Batch | None = None  # of the present run; None between runs
    runtime: Any = None  # runtime that `answer_early` uses; None if no call can be answered early

    @property
    def can_block_worker(self) -> bool:
        """Whether a wait of this code can block the worker. A task that outlives its run cannot."""
        return self.batch is not None or self.thread is threading.current_thread()

    def answer_early(self, item: object, result: Any) -> bool:
        """Answer the call of one item of the batch before the rest of the batch.

        The result that the function later returns for the item is not used. Return False if the
        item belongs to a list call, which is answered as a whole.
        """
        batch, runtime = self.batch, self.runtime
        if batch is not None and runtime is not None:
            for request, _, _ in batch.slices:
                if request.items is item and not request.listed:
                    runtime.answer(batch, request, result)
                    return True
        return False


@dataclass(eq=False)
class Wait:
    """Wait of a run for the end of `request`, a call of `pool`; None: of all calls of `pool`."""

    run: Run
    batch: Batch | None  # of the run; kept, because the wait may outlive the run of this batch
    pool: Pool  # the workers that run the request
    request: Request | None
    is_over: Callable[[], bool]  # returns whether the waiting code has been woken

    def end(self) -> None:
        """Remove the wait from the waits of its pool."""
        with _lock:
            self.run.pool.waits.discard(self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()

    def is_blocked(self, blocked: set[Run]) -> bool:
        """Return whether the wait cannot end unless a run of `blocked` ends."""
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
    """Note that this thread, or task, is a worker of `pool`. Return its `Run`, to be filled in."""
    run = Run(pool, threading.current_thread() if thread else None)
    _run.set(run)
    return run


@contextmanager
def between_runs() -> Iterator[None]:
    """Run callbacks. Callbacks that a worker calls between two runs belong to no run."""
    run = before = _run.get()
    if run is not None and run.batch is None and not run.callbacks:
        run = None if run.thread is None else Run(run.pool, run.thread, callbacks=True)
    _run.set(run)
    try:
        yield
    finally:
        _run.set(before)


def is_running() -> bool:
    """Return whether this code is part of a run that has not ended, or of a worker's callbacks."""
    run = _run.get()
    return run is not None and run.can_block_worker


# guards the waits of all pools; reentrant, because a signal handler or a finalizer may wait, too
_lock = threading.RLock()


def wait_for(pool: Pool, request: Request | None, is_over: Callable[[], bool]) -> Wait | None:
    """Note that this code is about to wait for `request` of `pool`. Return None outside any run.

    With `request` None the code waits for all calls. A task that a run has started must not wait
    for the run's own function, even after the run has ended. Otherwise, the refusal would depend on
    whether the task or the run is faster.

    Raises:
        RuntimeError: the code would wait for itself.
    """
    run = _run.get()
    if run is None or (run.callbacks and not run.can_block_worker):
        return None  # a thread or task that a callback has started
    if run.pool is pool and not pool.has_begun(request):
        raise RuntimeError(
            f"{pool.name} is called from within its own batch, and would wait for "
            f"itself; call {pool.name}.__wrapped__ (a task that a batch starts and does not wait "
            "for may call it in an empty contextvars.Context)"
        )
    if not run.can_block_worker:
        return None
    wait = Wait(run, run.batch, pool, request, is_over)
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

    The search begins with all waits on which `wait` may depend. Waits that can end are removed
    until the remaining waits block each other, or `wait` itself is removed.
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
    """Forget, in the child, the run of the parent process of which this code was part."""
    global _lock
    _lock = threading.RLock()
    _run.set(None)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
