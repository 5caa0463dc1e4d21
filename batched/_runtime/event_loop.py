"""Event-loop runtime: coroutine batch functions run on the loop of their callers.

Each loop has a runtime with its own scheduler, which exists as long as the loop.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
import weakref
from collections.abc import Callable
from contextvars import Context
from typing import Any

from .._core.scheduler import Batch
from . import observer
from .async_backend import current_loop, current_task, ends_task, is_gone
from .call_queue import AWAKE
from .runtime import Runtime
from .waits import enter_worker
from .wakers import AsyncWaker, async_waker, wait, wake_all


class EventLoopRuntime(Runtime):
    """Runtime for the callers of one loop.

    Its workers are tasks of the loop, at most `max_concurrent_batches`. They end when no call
    waits.
    """

    workers_stay = False
    finishes_at_exit = False  # its loop has ended by then
    tick = 1e-3  # timers of loops end on full milliseconds (s)

    def _new_parker(self) -> _Parker:
        return _Parker()

    def _start_worker(self, parker: _Parker) -> None:
        loop = current_loop()
        # in an empty context: a worker serves many callers
        if isinstance(loop, asyncio.AbstractEventLoop):
            parker.task = asyncio.Task(
                self._work(parker), loop=loop, name=f"batched-{self.name}", context=Context()
            )
            parker.task.add_done_callback(functools.partial(self._left, parker))
        else:
            sys.modules["trio"].lowlevel.spawn_system_task(
                self._work, parker, name=f"batched-{self.name}"
            )

    def _left(self, parker: _Parker, task: asyncio.Task[None]) -> None:
        """End all calls if a worker's task, which has ended, never began."""
        if (task.cancelled() or task.exception()) and parker in self._workers:
            self.abort("the task that was to run this call ended before it began")

    async def _work(self, parker: _Parker) -> None:
        task = current_task()
        try:
            enter_worker(self.pool, thread=False)
            while True:
                parker.renew()
                found = self._take(parker)
                if isinstance(found, Batch):
                    outcomes = await (observer.probe or self.execution).run_async(found, self)
                    self.finish(found, outcomes)
                    if parker in self._workers:  # else the queue was reset, and this worker ends
                        self._alarm = AWAKE  # the worker looks once these callers have run
                    del outcomes  # an error in the outcomes holds this frame
                    # callers that call again at once can join the next batch
                    await parker.park_for(0)
                elif found is None:
                    return
                else:
                    await parker.park_for(max(found - time.perf_counter(), 0.0))
        except BaseException as error:
            if ends_task(error, task):
                self.abort("its event loop has ended, or cancelled the task that ran it")
                raise
            self.fail(error)
            if not isinstance(error, Exception):
                raise  # an error of this library does not end trio, which runs this task


class _Parker:
    """Place where a worker waits for work. Each wait has a new waker."""

    _waker: AsyncWaker
    task: asyncio.Task[None]  # of the worker: asyncio does not keep tasks alive

    def renew(self) -> None:
        """Prepare to be parked again."""
        self._waker = async_waker(current_loop())

    def unpark(self, _: object) -> None:
        """Wake the worker."""
        wake_all([self._waker])

    async def park_for(self, seconds: float) -> None:
        """Wait for `unpark`, at most for `seconds`.

        For 0 seconds, let every other task that is ready run once.
        """
        if seconds:
            await wait(self._waker, seconds)
        elif isinstance(self._waker.get_loop(), asyncio.AbstractEventLoop):
            await asyncio.sleep(0)
        else:
            await sys.modules["trio"].lowlevel.checkpoint()


class EventLoops:
    """Runtimes of one function: an `EventLoopRuntime` for each loop that calls it."""

    def __init__(self, make: Callable[[], EventLoopRuntime], name: str) -> None:
        self._make = make
        self._name = name  # name of the batch function, for messages
        self._closed = False
        self._runtimes = weakref.WeakKeyDictionary[Any, EventLoopRuntime]()

    def here(self, loop: object) -> EventLoopRuntime:
        """Return the runtime of `loop`, which runs this code.

        Raises:
            RuntimeError: `loop` is None.
        """
        if loop is None:
            raise RuntimeError(
                f"{self._name} is a coroutine function and runs on the event loop of its callers, "
                "but none is running here; "
                "use asyncio.run, or asyncio.run_coroutine_threadsafe with a loop of another thread"
            )
        runtime = self._runtimes.get(loop)
        if runtime is None:
            for other, idle in self._all():
                if is_gone(other):
                    idle.abort("the event loop that was to run this call was closed")
                    self._runtimes.pop(other, None)
            runtime = self._runtimes[loop] = self._make()
            if self._closed:
                runtime.close(cancel=False)
        return runtime

    def load(self) -> tuple[int, int, int]:
        """Return the sums of `CallQueue.load` over all loops."""
        loads = [runtime.load() for _, runtime in self._all()]
        return tuple(map(sum, zip((0, 0, 0), *loads, strict=True)))  # type: ignore[return-value]  # three

    def open(self) -> None:
        """Accept calls again."""
        self._closed = False
        for _, runtime in self._all():
            runtime.open()

    def shutdown(self, *, wait: bool, cancel: bool) -> None:
        """Close. With `wait`, return once every accepted call has ended.

        Raises:
            RuntimeError: waiting would block the loop that must finish the calls.
        """
        own = dict(self._all()).get(current_loop())
        if wait and own is not None and any(own.load()[2 * cancel :]) and own.may_wait():
            raise RuntimeError(
                "waiting here would block the event loop that has to finish the calls of "
                f"{self._name}; "
                "use `await aclose()`, `async with`, or shutdown(wait=False)"
            )
        self._closed = True
        runtimes = self._all()
        for _, runtime in runtimes:
            runtime.close(cancel)
        for loop, runtime in runtimes:
            if wait and runtime is not own:
                runtime.drain(loop)

    async def drain_async(self) -> None:
        """Wait until all loops have ended every call."""
        for loop, runtime in self._all():
            await runtime.drain_async(loop)

    def _all(self) -> list[tuple[object, EventLoopRuntime]]:
        loops = [loop for ref in self._runtimes.keyrefs() if (loop := ref()) is not None]
        # loops may come and go meanwhile
        return [(loop, found) for loop in loops if (found := self._runtimes.get(loop)) is not None]
