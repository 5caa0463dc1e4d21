"""Waits of code that a batch function runs, and the refusal of waits in a circle.

A function whose run waits for a call of another function depends on that function. Dependencies are
noted when a wait begins, and are never forgotten while both functions exist. A wait that would
close a circle of dependencies is refused, as checkers of lock order do: whether a wait is refused
depends on the program, not on its timing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from weakref import WeakSet


@dataclass(eq=False)
class Pool:
    """Workers of one runtime. A run refers to its pool, and does not keep the runtime alive."""

    name: str  # of the batch function
    size: int  # most runs at once
    depends_on: WeakSet[Pool] = field(
        default_factory=WeakSet
    )  # pools for which its runs have waited

    def reaches(self, other: Pool) -> bool:
        """Return whether this pool is `other`, or depends on it directly or through others."""
        new: list[Pool] = [self]
        found = {*new}
        while new:
            new = [each for pool in new for each in list(pool.depends_on) if each not in found]
            found.update(new)
        return other in found


@dataclass(eq=False)
class Worker:
    """A worker, as a variable of its context (`contextvars`), which tasks of a run inherit."""

    pool: Pool
    thread: threading.Thread | None  # None: a task of an event loop
    calls_back: bool = False  # whether callbacks of futures run, which may start tasks elsewhere


_order = threading.RLock()
"""Guards `depends_on` of all pools: of two waits that close a circle, one comes second."""

_worker = ContextVar[Worker | None]("worker", default=None)
current_worker = _worker.get
"""Return the worker whose run this code is, or was, part of; None for most callers."""


def enter_worker(pool: Pool, *, thread: bool) -> None:
    """Note that this thread, or task, is a worker of `pool`."""
    _worker.set(Worker(pool, threading.current_thread() if thread else None))


@contextmanager
def between_runs() -> Iterator[None]:
    """Mark the code of the `with` block as callbacks, which block the worker's thread at most."""
    before = _worker.get()
    if before is not None:
        here = before.thread is threading.current_thread()
        _worker.set(replace(before, calls_back=True) if here else None)
    try:
        yield
    finally:
        _worker.set(before)


def check_wait(pool: Pool) -> None:
    """Note that this code is about to wait for a call of `pool`.

    Raises:
        RuntimeError: the code might wait for itself, directly or in a circle of functions.
    """
    worker = _worker.get()
    if worker is None:
        return
    if worker.calls_back and worker.thread is not threading.current_thread():
        return  # a task that a callback has started
    with _order:
        refused = pool.reaches(worker.pool)
        if not refused:
            worker.pool.depends_on.add(pool)
    if refused:
        batch = "its own batch" if pool is worker.pool else f"a batch of {worker.pool.name}"
        raise RuntimeError(
            f"{pool.name} is called from within {batch}, and would wait for itself; call "
            f"{pool.name}.__wrapped__ with a list (a task for which the batch does not wait may "
            f"call {pool.name} in an empty contextvars.Context)"
        )


def renew() -> None:
    """Begin anew in a forked process: another thread may hold the lock, and no run is its own."""
    global _order
    _order = threading.RLock()
    _worker.set(None)
