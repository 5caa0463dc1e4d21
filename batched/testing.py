"""Help for tests of code that calls batched functions: calls at once, and batches as wanted.

    with batched.testing.inline():                  # each call runs at once, alone
        assert embed("text") == 4

    with batched.testing.hold(embed) as held:       # calls wait until the test lets them go
        futures = [embed.submit(text) for text in "abc"]
        held.release()                              # one batch
        assert [future.result() for future in futures] == [1, 1, 1]

`pytest_plugins = ["batched.testing"]` in the `conftest.py` at the top of a project gives its tests
the fixture `batched_inline`. (PYTEST_DONT_REWRITE: this module may be imported before.)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, Final

from ._function.batched import BatchedCallable
from ._function.preparation import Preparers
from ._runtime.async_backend import current_loop
from ._runtime.event_loop import EventLoops
from ._runtime.thread import ThreadRuntime
from ._runtime.waits import enter_worker
from ._runtime.wakers import async_waker, wait

__all__ = ["Held", "hold", "inline"]

PATIENCE: Final = 10.0
"""Default of the longest wait for calls (s)."""
POLL_INTERVAL: Final = 1e-3
"""Interval at which a waiting test counts the calls (s)."""

_FINDERS: Final[dict[Any, Any]] = {kind: kind.here for kind in (ThreadRuntime, EventLoops)}
"""Method that returns the runtime of a call, for each class of the runtimes of a function."""

_PREPARING: Final = {name: getattr(Preparers, name) for name in ("start", "map", "run")}
"""Methods that prepare calls in threads."""

_inline: list[None] = []  # an entry for each open context of `inline`


@contextmanager
def inline() -> Iterator[None]:
    """Run each call at once, where it is made, as a batch of its own items.

    This holds for calls of every kind, of all batched functions that this process runs and from all
    of its threads, until the last open context ends. No call waits for another call, and no thread
    is started. A plain function runs in the thread of the caller, also if an event loop runs there;
    several threads may run it at once. A coroutine function runs on the loop of the caller, each
    call in a task of its own. Results, errors, padding, repeated attempts and statistics are as
    always; a list longer than `batch_size` runs in several batches. Clients of services and
    connected functions (`batched.connect`) are not changed.
    """
    _inline.append(None)
    for kind, find in _FINDERS.items():
        kind.here = lambda self, loop, find=find: _alone(find(self, loop), queue_timeout_ms=None)
    for name, method in _PREPARING_HERE.items():
        setattr(Preparers, name, method)
    try:
        yield
    finally:
        _inline.pop()
        if not _inline:
            for kind, find in _FINDERS.items():
                kind.here = find
            for name, method in _PREPARING.items():
                setattr(Preparers, name, method)


def _alone(runtime: Any, **settings: Any) -> Any:
    """Return a runtime without threads for some calls, with the statistics of `runtime`."""
    settings |= {"flush": "eager", "max_concurrent_batches": 1}
    alone: Any = type(runtime)(
        replace(runtime.policy, **settings),
        runtime.execution,
        runtime.recorder,
        runtime.observer,
        runtime.name,
    )
    alone.pool, alone._closed, alone.workers_stay = runtime.pool, runtime._closed, False
    if isinstance(runtime, ThreadRuntime):
        alone._start_worker = partial(_work_here, alone)
    return alone


def _work_here(runtime: ThreadRuntime, parker: Any) -> None:
    """Let this thread be a worker of `runtime` until no call waits."""
    Context().run(_serve, runtime, parker)


def _serve(runtime: ThreadRuntime, parker: Any) -> None:
    enter_worker(runtime.pool, thread=True)
    runtime.serve(parker)


def _start_here(_: Preparers, act: Any, *args: Any) -> None:
    act(*args)


def _map_here(_: Preparers, act: Any, items: list[Any]) -> list[Any]:
    return list(map(act, items))


async def _run_here(_: Preparers, act: Any, *args: Any) -> Any:
    return act(*args)


_PREPARING_HERE: Final = {"start": _start_here, "map": _map_here, "run": _run_here}


class Held:
    """Calls of one function that wait in its queue until the test lets them go."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._hold()

    def _hold(self) -> None:
        self._queue = _alone(self._runtime)
        self._queue._call_worker = lambda: None

    def _find(self, _: object) -> Any:
        self._queue._closed = self._runtime._closed  # may have changed since
        return self._queue

    def wait_for(self, items: int, timeout: float = PATIENCE) -> None:
        """Block this thread until at least `items` items wait.

        A call that waits for room in the queue (`max_queue_size`) counts as one item.

        Raises:
            TimeoutError: fewer items wait after `timeout` seconds.
        """
        for seconds in self._pauses(items, timeout):
            time.sleep(seconds)

    async def until(self, items: int, timeout: float = PATIENCE) -> None:
        """Wait on the event loop until at least `items` items wait, as `wait_for` does."""
        for seconds in self._pauses(items, timeout):
            await wait(async_waker(current_loop()), seconds)

    def release(self) -> None:
        """Run all items that wait now, in as few batches as possible. Later calls wait.

        A batch has at most `batch_size` items, with equal extra arguments. A plain function runs in
        this thread, and its callers are answered on return. A coroutine function runs in a task of
        the event loop.
        """
        queue = self._queue
        self._hold()
        del queue._call_worker
        if any(queue.load()):
            queue._call_worker()

    def _pauses(self, items: int, timeout: float) -> Iterator[float]:
        deadline = time.perf_counter() + timeout
        while (waiting := sum(self._queue.load()[:2])) < items:
            if time.perf_counter() > deadline:
                raise TimeoutError(
                    f"{waiting} of {items} items wait in the queue of {self._runtime.name} after "
                    f"{timeout:g} s; start all callers first, and in a coroutine use "
                    f"`await held.until({items})`"
                )
            yield POLL_INTERVAL


@contextmanager
def hold(function: BatchedCallable[Any, Any, Any], /) -> Iterator[Held]:
    """Let calls of `function` wait in its queue, until the test lets them go.

    `release()` runs the calls that wait at that moment, and so does the end of the context. So a
    test decides which calls share a batch. Full batches wait, too. Begin calls by `submit`, by
    `acall` in a task, or in other threads: a plain call waits until another thread releases it.

    A bound method is held for its instance, and a coroutine function on the running event loop.
    Calls of a held function wait within `inline()`, too. `function.stats` counts no waiting items.

    Raises:
        TypeError: this process does not run `function`, or it is no batched function.
        RuntimeError: `function` is a coroutine function, and no event loop is running.
    """
    runtimes: Any = getattr(getattr(function, "_batcher", None), "runtime", None)
    find = next((find for kind, find in _FINDERS.items() if isinstance(runtimes, kind)), None)
    if find is None:
        raise TypeError(
            "hold takes a batched function of this process, or a batched method of an instance, "
            f"got {function!r}"
        )
    held = Held(find(runtimes, current_loop()))
    outer = vars(runtimes).get("here")  # of a hold around this one
    runtimes.here = held._find  # also within `inline`
    try:
        yield held
    finally:
        del runtimes.here
        if outer is not None:
            runtimes.here = outer
        held.release()


if "pytest" in sys.modules:
    import pytest

    @pytest.fixture(name="batched_inline")
    def _batched_inline() -> Iterator[None]:
        """Run each call of a batched function at once: see `batched.testing.inline`."""
        with inline():
            yield
