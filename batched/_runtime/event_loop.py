"""The event-loop runtime: coroutine batch functions run on the loop of their callers, one scheduler
per loop, gone with it.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .._core.scheduler import Batch, Scheduler
from .async_backend import current_loop, current_task, ends_task, is_gone, is_over, post
from .reception import AWAKE
from .runtime import Runtime
from .shift import enter_worker
from .wakers import (
    POLL_INTERVAL,
    AsyncWaker,
    async_waker,
    blocking_waker,
    glance,
    log_failure,
    wait,
    wake_all,
)


class EventLoopRuntime(Runtime):
    """Serves the callers of one loop. Its workers are tasks there, at most
    `max_concurrent_batches`, and end when nothing waits.
    """

    workers_stay = False
    tick = 1e-3  # timers of loops end on full milliseconds

    def _reset(self) -> None:
        super()._reset()
        # those of the workers: asyncio does not keep them alive
        self._tasks: set[asyncio.Task[None]] = set()

    def _new_bell(self) -> _Bell:
        return _Bell(self._scheduler)

    def _start_worker(self, bell: _Bell) -> None:
        loop = current_loop()
        # in a context of its own: a worker serves many callers
        if isinstance(loop, asyncio.AbstractEventLoop):
            task = contextvars.Context().run(
                asyncio.Task, self._work(bell), loop=loop, name=f"batched-{self.name}"
            )
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._left, bell))
        else:
            sys.modules["trio"].lowlevel.spawn_system_task(
                self._work, bell, name=f"batched-{self.name}"
            )

    def _left(self, bell: _Bell, task: asyncio.Task[None]) -> None:
        """Forgets the task of a worker that has ended."""
        self._tasks.discard(task)
        if bell.scheduler is self._scheduler and (task.cancelled() or task.exception() is not None):
            self.forsake("the task that was to run it ended before it began")

    def _soon(self, act: Callable[[], object]) -> None:
        loop = current_loop()
        if loop is None:
            super()._soon(act)
        else:  # calls are taken there only
            post(loop, act)

    async def _work(self, bell: _Bell) -> None:
        task = None
        try:
            task = current_task()
            shift = enter_worker(self.badge, thread=False)
            while True:
                bell.hang()
                found = self._take(bell)
                if isinstance(found, Batch):
                    shift.batch = found
                    found.begun = True
                    try:
                        outcomes = await self.execution.run_async(found)
                    finally:
                        shift.ends()
                    self._finish(found, outcomes)
                    self._alarm = AWAKE  # it looks as soon as these callers have had their turn
                    del outcomes  # an error among them holds this frame
                    await bell.nap(0)  # callers who come straight back are to join the next batch
                elif found is None:
                    return
                else:
                    await bell.nap(max(found - time.perf_counter(), 0.0))
        except BaseException as error:
            # ours; let out of a system task, it would end trio itself
            if not ends_task(error, task):
                log_failure("the worker of %s failed", self.name)
                self.forsake(f"its worker failed with a {type(error).__name__}")
                if isinstance(error, Exception):
                    return
                raise
            self.forsake("its event loop has ended, or cancelled the task that ran it")
            raise


class _Bell:
    """What a worker rests on, renewed for each rest."""

    _waker: AsyncWaker

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler: Scheduler | None = scheduler  # whose batches the worker runs

    def hang(self) -> None:
        self._waker = async_waker(current_loop())

    def ring(self, _: object) -> None:
        """Wake the worker."""
        wake_all([self._waker])

    async def nap(self, seconds: float) -> None:
        """Rests until rung, but not longer than `seconds`; for 0 seconds, lets every other task
        that is ready run once.
        """
        if seconds:
            await wait(self._waker, seconds)
        elif isinstance(self._waker.get_loop(), asyncio.AbstractEventLoop):
            await asyncio.sleep(0)
        else:
            await sys.modules["trio"].lowlevel.checkpoint()


class EventLoops:
    """One `EventLoopRuntime` for each loop that calls the function."""

    def __init__(self, make: Callable[[], EventLoopRuntime], name: str) -> None:
        self._make = make
        self._name = name  # of the batch function, for messages
        self._runtimes: weakref.WeakKeyDictionary[Any, EventLoopRuntime] = (
            weakref.WeakKeyDictionary()
        )
        # the last one found: a look-up less
        self._latest: tuple[Callable[[], object], EventLoopRuntime | None] = (lambda: None), None
        self._closed = False

    def here(self, loop: object) -> EventLoopRuntime:
        """The runtime of `loop`, which runs this code.

        Raises:
            RuntimeError: there is none.
        """
        if loop is None:
            raise RuntimeError(
                f"{self._name} is a coroutine function and runs on the event loop of its callers, "
                "but none is running here; "
                "use asyncio.run, or asyncio.run_coroutine_threadsafe with a loop of another thread"
            )
        latest, runtime = self._latest
        if runtime is None or latest() is not loop:
            runtime = self._runtimes.get(loop) or self._settle_on(loop)
            self._latest = weakref.ref(loop), runtime
        return runtime

    def _settle_on(self, loop: object) -> EventLoopRuntime:
        for other, runtime in self._all():
            if is_gone(other):
                runtime.forsake("the event loop that was to run it was closed")
                self._runtimes.pop(other, None)
        runtime = self._runtimes[loop] = self._make()
        if self._closed:
            runtime.close(cancel=False)
        return runtime

    @property
    def queue_size(self) -> int:
        """Items that wait, on all loops."""
        return sum(runtime.queue_size for _, runtime in self._all())

    @property
    def blocked(self) -> int:
        """Calls that wait for room in the queue, on all loops."""
        return sum(runtime.blocked for _, runtime in self._all())

    @property
    def in_flight(self) -> int:
        """Items in batches that are running, on all loops."""
        return sum(runtime.in_flight for _, runtime in self._all())

    def open(self) -> None:
        """Takes calls again."""
        self._closed = False
        for _, runtime in self._all():
            runtime.open()

    def shutdown(self, *, wait: bool, cancel: bool) -> None:
        """Closes; with `wait`, returns once every accepted call has ended.

        Raises:
            RuntimeError: waiting would block the very loop that has calls to finish.
        """
        here = current_loop()
        own = self._runtimes.get(here) if here is not None else None
        if wait and own is not None and own.pending(running_only=cancel) and not own.within:
            raise RuntimeError(
                "waiting here would block the event loop that has to finish the calls of "
                f"{self._name}; "
                "use `await aclose()`, `async with`, or shutdown(wait=False)"
            )
        for loop, runtime in self._close(cancel):
            if (
                wait
                and runtime is not own
                and (waiting := self._waiting_for(loop, runtime)) is not None
            ):
                with waiting:
                    drained = blocking_waker()
                    runtime.when_drained(drained)
                    while not drained.acquire(timeout=POLL_INTERVAL):
                        if is_over(loop):
                            runtime.forsake("the event loop that was to run it has stopped")

    async def aclose(self, *, cancel: bool) -> None:
        """Closes, and returns once every accepted call has ended."""
        for loop, runtime in self._close(cancel):
            if (waiting := self._waiting_for(loop, runtime)) is not None:
                with waiting:
                    drained = async_waker(current_loop())
                    runtime.when_drained(drained)
                    while not await glance(drained):
                        if is_over(loop):
                            runtime.forsake("the event loop that was to run it has stopped")

    def _close(self, cancel: bool) -> list[tuple[object, EventLoopRuntime]]:
        self._closed = True
        runtimes = self._all()
        for _, runtime in runtimes:
            runtime.close(cancel)
        return runtimes

    def _waiting_for(
        self, loop: object, runtime: EventLoopRuntime
    ) -> AbstractContextManager[None] | None:
        """As `runtime.waiting_for` all calls; None also if it has no calls to finish, or lives on a
        loop that has stopped.
        """
        if is_over(loop):
            runtime.forsake("the event loop that was to run it has stopped")
        return runtime.waiting_for(None) if runtime.busy else None

    def _all(self) -> list[tuple[object, EventLoopRuntime]]:
        loops = [loop for ref in self._runtimes.keyrefs() if (loop := ref()) is not None]
        # others come and go meanwhile
        return [
            (loop, runtime) for loop in loops if (runtime := self._runtimes.get(loop)) is not None
        ]
