"""Waits of code that a batch function runs, and the refusal of deadlocks.

A run is one batch on its way through the function. Code of a run may call batched functions. Each
wait for one of these calls is noted here while it lasts, and a wait that would complete a deadlock
is refused. Runs are deadlocked if each of them waits, and only the end of one of them can end the
wait. There are three waits of this kind:

1. for a call with items in the batch of a deadlocked run;
2. for a call that has not begun, of a function whose workers are all occupied by deadlocked runs;
3. for all calls of the function that a deadlocked run executes (`CallQueue.drain`).

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
from typing import Protocol
from weakref import WeakSet

from .._core.scheduler import Batch, Request, Slice


class Run(Protocol):
    """A batch, or all rows of a function that works in steps."""

    @property
    def slices(self) -> list[Slice]:
        """Items that wait for the run."""
        ...


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
class WorkerContext:
    """Pool and present run of one worker, as the code of the run sees them.

    The object is a variable of the worker's context (`contextvars`). Tasks that a run starts
    inherit the variable, and so do threads in some builds of Python. With `callbacks` the object
    stands for the callbacks of futures and the observers that the worker's thread calls between two
    runs.
    """

    pool: Pool  # of the worker
    thread: threading.Thread | None  # of the worker; None: a task of an event loop
    callbacks: bool = False
    batch: Run | None = None  # of the present run; None between runs

    @property
    def can_block_worker(self) -> bool:
        """Whether a wait of this code can block the worker. A task that outlives its run cannot."""
        return self.batch is not None or self.thread is threading.current_thread()


@dataclass(eq=False)
class Wait:
    """Wait of a run for the end of `request`, a call of `pool`; None: of all calls of `pool`."""

    worker: WorkerContext  # of the waiting code
    batch: Run | None  # of the run; kept, because the wait may outlive the run of this batch
    pool: Pool  # the workers that run the request
    request: Request | None
    is_over: Callable[[], bool]  # returns whether the waiting code has been woken

    def end(self) -> None:
        """Remove the wait from the waits of its pool."""
        with _lock:
            self.worker.pool.waits.discard(self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()

    def is_blocked(self, blocked: set[WorkerContext]) -> bool:
        """Return whether the wait cannot end unless the run of a worker of `blocked` ends."""
        request, workers = self.request, [each for each in blocked if each.pool is self.pool]
        if request is None or not workers:
            return bool(workers)
        if self.is_over():
            return False
        if any(each.batch is not None and _items(request, each.batch) for each in workers):
            return True
        return len(workers) >= self.pool.size and not self.pool.has_begun(request)


_worker: ContextVar[WorkerContext | None] = ContextVar("worker", default=None)
current_worker = _worker.get
"""Return the worker whose run this code is, or was, part of; None for most callers."""


def enter_worker(pool: Pool, *, thread: bool) -> WorkerContext:
    """Note that this thread, or task, is a worker of `pool`. Return its context, without a run."""
    worker = WorkerContext(pool, threading.current_thread() if thread else None)
    _worker.set(worker)
    return worker


@contextmanager
def between_runs() -> Iterator[None]:
    """Mark the code of the `with` block as callbacks, if a worker calls it between two runs.

    Callbacks that the code of a run calls stay part of the run.
    """
    worker = before = _worker.get()
    if worker is not None and worker.batch is None and not worker.callbacks:
        thread = worker.thread
        worker = None if thread is None else WorkerContext(worker.pool, thread, callbacks=True)
    _worker.set(worker)
    try:
        yield
    finally:
        _worker.set(before)


def is_running() -> bool:
    """Return whether this code is part of a run that has not ended, or of a worker's callbacks."""
    worker = _worker.get()
    return worker is not None and worker.can_block_worker


# guards the waits of all pools; reentrant, because a signal handler or a finalizer may wait, too
_lock = threading.RLock()


def note_wait(pool: Pool, request: Request | None, is_over: Callable[[], bool]) -> Wait | None:
    """Note that this code is about to wait for `request` of `pool`. Return None outside any run.

    With `request` None the code waits for all calls. A task that a run has started must not wait
    for the run's own function, even after the run has ended. Otherwise, the refusal would depend on
    whether the task or the run is faster.

    Raises:
        RuntimeError: the code would wait for itself.
    """
    worker = _worker.get()
    if worker is None or (worker.callbacks and not worker.can_block_worker):
        return None  # a thread or task that a callback has started
    if worker.pool is pool and not pool.has_begun(request):
        raise RuntimeError(
            f"{pool.name} is called from within its own batch, and would wait for itself; call "
            f"{pool.name}.__wrapped__ with a list (a task for which the batch does not wait may "
            f"call {pool.name} in an empty contextvars.Context)"
        )
    if not worker.can_block_worker:
        return None
    wait = Wait(worker, worker.batch, pool, request, is_over)
    with _lock:
        if not _is_deadlocked(wait):
            worker.pool.waits.add(wait)
            return wait
    raise RuntimeError(
        f"{pool.name} is called from within a batch of {worker.pool.name}, and would wait for "
        f"itself, because its own batch waits for {worker.pool.name}; call {pool.name}.__wrapped__"
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
        found = {each for pool in pools for each in pool.waits if each.batch is each.worker.batch}
        found -= blocked
    while wait in blocked:
        workers = {each.worker for each in blocked}
        still = {each for each in blocked if each.is_blocked(workers)}
        if len(still) == len(blocked):
            return True
        blocked = still
    return False


def _items(request: Request, batch: Run) -> int:
    """Return the number of items of `request` in `batch`."""
    return sum([stop - start for each, start, stop in batch.slices if each is request])


def _after_fork() -> None:
    """Forget, in the child, the run of the parent process of which this code was part."""
    global _lock
    _lock = threading.RLock()
    _worker.set(None)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
