"""Function in this process: in threads, on an event loop, or in the thread of the caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..._execution.exceptions import trim_traceback
from ..._execution.memory import drop_locals
from ..._runtime.async_backend import ends_current_task
from ..failures import is_memory_error
from ..step import Step
from .engine import (
    KILL_TIME,
    BatchRun,
    Engine,
    Outcome,
    Task,
    Worker,
    WorkerClosed,
    time_limit_exceeded,
)
from .function import build


class LocalWorker(Worker):
    """The function in the thread that calls it."""

    def start(self) -> bool:
        """Build the function."""
        self._func = build(self.step)
        return True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the function."""
        return self._func(*args, **kwargs)

    def close(self) -> None:
        """Drop the function, with its model."""
        vars(self).pop("_func", None)


class LoopWorker(LocalWorker):
    """A coroutine function on an event loop, which has a thread of its own.

    All threads of the engine share the worker, with as many instances of a routed class as all of
    them may have.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(replace(step, max_models=step.max_models * (step.workers or 1)))
        self._loop: asyncio.AbstractEventLoop
        self._ended = asyncio.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> bool:
        """Start the loop, and build the function there, because a constructor may need the loop."""
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._serve, name=f"batched-{self.step.name}", daemon=True
            )
            self._thread.start()

        async def start() -> bool:
            return super(LoopWorker, self).start()

        return bool(self._run(start))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the coroutine function."""

        async def call() -> Any:
            limit = asyncio.timeout(self.step.timeout_s)
            try:
                async with limit:
                    return await self._func(*args, **kwargs)
            except BaseException as error:
                if limit.expired() and isinstance(error, TimeoutError):
                    raise time_limit_exceeded(self.step) from error
                if is_memory_error(error):  # the frames of the function hold the memory
                    drop_locals(trim_traceback(error))
                raise

        return self._run(call)

    def kill(self) -> bool:
        """Cancel the calls that run."""
        self.close()
        return True

    def close(self) -> None:
        """End the loop, and cancel its calls."""
        if self._thread is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(KILL_TIME)
        super().close()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._ended.wait())

    def _run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of `work`, which is awaited on the loop.

        Raises:
            WorkerClosed: the loop has ended.
            BaseException: the error of `work`.
        """

        async def run() -> tuple[Any, BaseException | None]:
            try:
                return await work(), None
            except BaseException as error:
                if ends_current_task(error):
                    raise
                return None, error  # raised on the loop, SystemExit would end the loop

        try:
            result, error = asyncio.run_coroutine_threadsafe(run(), self._loop).result()
        except CancelledError:
            raise WorkerClosed from None
        if error is not None:
            raise error
        return result


class CallerEngine(Engine):
    """Engine without threads: `submit` runs the batch, and returns after the report.

    `start` and `submit` raise the error of a class that cannot be built, and KeyboardInterrupt.
    """

    def __init__(self, step: Step, report: Callable[[Outcome], None]) -> None:
        super().__init__(report, [LoopWorker(step) if step.is_coroutine else LocalWorker(step)])

    def start(self) -> None:
        """Build the function."""
        self._workers[0].make_ready()

    def _put(self, task: Task) -> None:
        self._report(BatchRun(self._workers[0], task).run())
