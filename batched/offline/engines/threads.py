"""Workers in this process: the function in the thread that calls it, or on a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ..._runtime.timer_thread import daemon_thread
from .engine import Worker, WorkerClosed, time_limit_exceeded
from .function import build


class LocalWorker(Worker):
    """The function where it is called."""

    def start(self) -> None:
        """Build the function."""
        self._func = build(self.step)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the function."""
        return self._func(*args, **kwargs)

    def close(self) -> None:
        """Drop the function, with its model."""
        vars(self).pop("_func", None)


class LoopWorker(Worker):
    """A coroutine function on a loop of its own, which all threads of the engine share."""

    _loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Build the function on the loop."""
        if self._loop is None:
            loop = asyncio.new_event_loop()
            self._thread = daemon_thread(f"{self.step.name}-loop", self._serve, loop)
            self._taking = threading.Lock()  # no call is given to a loop that ends
            self._loop = loop  # last: `close` may come at any moment
            self._thread.start()

        async def make() -> Callable[..., Any]:
            return build(self.step)

        self._func = self._wait(make)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the function."""
        return self._wait(self._func, *args, **kwargs)

    def close(self) -> None:
        """Cancel running calls, and end the loop."""
        if self._loop is not None:
            with self._taking, suppress(RuntimeError):  # it is closed, or this is its thread
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(1.0)  # coroutines that were cancelled may need a moment

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop):  # which cancels all tasks in the end
            loop.run_forever()

    def _wait(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a coroutine function on the loop."""
        done = Future[Any]()
        limit = self.step.timeout_s if self.ready else None

        async def run() -> None:  # never raises: a loop does not survive all errors
            timeout = asyncio.timeout(limit)
            try:
                if self.closing.is_set():  # the loop cancels only tasks that have begun
                    raise WorkerClosed
                async with timeout:
                    done.set_result(await func(*args, **kwargs))
            except BaseException as error:
                done.set_exception(time_limit_exceeded(self.step) if timeout.expired() else error)

        assert self._loop
        with self._taking:
            if self.closing.is_set():
                raise WorkerClosed
            call = asyncio.run_coroutine_threadsafe(run(), self._loop)
        call.result()  # or cancelled before it ran
        return done.result()
