"""Event-loop runtime: coroutine batch functions run on the loop of their callers.

Each loop has a runtime with its own scheduler, which exists as long as the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from .._core.scheduler import Batch, Scheduler
from . import observer
from .async_backend import current_loop, current_task, ends_task, is_gone
from .call_queue import AWAKE
from .runtime import Runtime
from .waits import enter_worker
from .wakers import AsyncWaker, async_waker, log_failure, wait, wake_all


class EventLoopRuntime(Runtime):
    """Runtime for the callers of one loop.

    Its workers are tasks of the loop, at most `max_concurrent_batches`. They end when no call
    waits.
    """

    workers_stay = False
    finishes_at_exit = False  # its loop has ended by then
    tick = 1e-3  # timers of loops end on full milliseconds (s)

    def _reset(self) -> None:
        super()._reset()
        # tasks of the workers: asyncio does not keep tasks alive
        self._tasks: set[asyncio.Task[None]] = set()

    def _new_parker(self) -> _Parker:
        return _Parker(self._scheduler)

    def _start_worker(self, parker: _Parker) -> None:
        loop = current_loop()
        # in an empty context: a worker serves many callers
        if isinstance(loop, asyncio.AbstractEventLoop):
            task = contextvars.Context().run(
                asyncio.Task, self._work(parker), loop=loop, name=f"batched-{self.name}"
            )
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._left, parker))
        else:
            sys.modules["trio"].lowlevel.spawn_system_task(
                self._work, parker, name=f"batched-{self.name}"
            )

    def _left(self, parker: _Parker, task: asyncio.Task[None]) -> None:
        """Drop the task of a worker that has ended. End all calls if the worker never began."""
        self._tasks.discard(task)
        failed = task.cancelled() or task.exception() is not None
        if failed and parker.scheduler is self._scheduler:
            self.abort("the task that was to run this call ended before it began")

    async def _work(self, parker: _Parker) -> None:
        task = None
        try:
            task = current_task()
            enter_worker(self.pool, thread=False)
            while True:
                parker.renew()
                found = self._take(parker)
                if isinstance(found, Batch):
                    probe = observer.probe
                    began = None if probe is None else probe.began(self.name, found)
                    outcomes = await self.execution.run_async(found, self)
                    if probe is not None and began is not None:
                        probe.ended(began, self.name, found, outcomes)
                    self.finish(found, outcomes)
                    self._alarm = AWAKE  # the worker looks once these callers have run
                    del outcomes  # an error in the outcomes holds this frame
                    # callers that call again at once can join the next batch
                    await parker.park_for(0)
                elif found is None:
                    return
                else:
                    await parker.park_for(max(found - time.perf_counter(), 0.0))
        except BaseException as error:
            # an error of this library; if a system task raised it, trio itself would end
            if not ends_task(error, task):
                log_failure("the worker of %s failed", self.name)
                self.abort(f"its worker failed with a {type(error).__name__}")
                if isinstance(error, Exception):
                    return
                raise
            self.abort("its event loop has ended, or cancelled the task that ran it")
            raise


class _Parker:
    """Place where a worker waits for work. Each wait has a new waker."""

    _waker: AsyncWaker

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler: Scheduler | None = scheduler  # scheduler of the worker's batches

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
        self.forget()
        _all_loops.add(self)

    def forget(self) -> None:
        """Begin without loops, also in the child of a fork, where no loop of the parent runs."""
        self._runtimes: weakref.WeakKeyDictionary[Any, EventLoopRuntime] = (
            weakref.WeakKeyDictionary()
        )
        # the loop and runtime found last, which saves a look-up
        self._latest: tuple[Callable[[], object], EventLoopRuntime | None] = (lambda: None), None

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
        latest, runtime = self._latest
        if runtime is None or latest() is not loop:
            runtime = self._runtimes.get(loop) or self._settle_on(loop)
            self._latest = weakref.ref(loop), runtime
        return runtime

    def _settle_on(self, loop: object) -> EventLoopRuntime:
        for other, runtime in self._all():
            if is_gone(other):
                runtime.abort("the event loop that was to run this call was closed")
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
        here = current_loop()
        own = self._runtimes.get(here) if here is not None else None
        if wait and own is not None and own.pending(running_only=cancel) and own.may_wait():
            raise RuntimeError(
                "waiting here would block the event loop that has to finish the calls of "
                f"{self._name}; "
                "use `await aclose()`, `async with`, or shutdown(wait=False)"
            )
        for loop, runtime in self._close(cancel):
            if wait and runtime is not own:
                runtime.drain(loop)

    async def aclose(self, *, cancel: bool) -> None:
        """Close, and return once every accepted call has ended."""
        for loop, runtime in self._close(cancel):
            await runtime.drain_async(loop)

    def _close(self, cancel: bool) -> list[tuple[object, EventLoopRuntime]]:
        self._closed = True
        runtimes = self._all()
        for _, runtime in runtimes:
            runtime.close(cancel)
        return runtimes

    def _all(self) -> list[tuple[object, EventLoopRuntime]]:
        loops = [loop for ref in self._runtimes.keyrefs() if (loop := ref()) is not None]
        # loops may come and go meanwhile
        return [
            (loop, runtime) for loop in loops if (runtime := self._runtimes.get(loop)) is not None
        ]


_all_loops: weakref.WeakSet[EventLoops] = weakref.WeakSet()


def _after_fork() -> None:
    for loops in list(_all_loops):
        loops.forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
