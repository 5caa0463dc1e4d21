"""Function in this process: in threads, on a loop, or in the thread of the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..step import Step
from .engine import BatchRun, Engine, Outcome, Task, Worker, WorkerClosed
from .function import build


class LocalWorker(Worker):
    """The function in the thread that calls it."""

    def start(self) -> bool:
        """Build the function."""
        self._func = build(self.step)
        return True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the function, or for a coroutine function an awaitable of it."""
        return self._func(*args, **kwargs)

    def close(self) -> None:
        """Drop the function, with its model."""
        vars(self).pop("_func", None)


class LoopEngine(Engine):
    """A loop in the one thread of the engine, on which each batch is a task.

    The tasks share one worker, with as many instances of a routed class as all workers may have.
    """

    def __init__(self, step: Step, report: Callable[[Outcome], None]) -> None:
        workers = step.workers or 1
        step = replace(step, max_models=step.max_models * workers)
        super().__init__(report, [LocalWorker(step)])
        self.slots = workers
        self._free = workers  # batches that may begin
        self._loop: asyncio.AbstractEventLoop | None = None
        self._group: asyncio.TaskGroup
        self._ended = asyncio.Event()

    def stop(self) -> None:
        """Let no further call begin, and end the loop after its calls."""
        super().stop()
        self._post(self._ended.set)

    def _kill(self) -> bool:
        self._post(self._cancel)
        return True

    def _put(self, task: Task) -> None:
        super()._put(task)
        self._post(self._dispatch)

    def _serve(self, worker: Worker) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._run(worker))

    async def _run(self, worker: Worker) -> None:
        self._loop = asyncio.get_running_loop()
        worker.make_ready()  # on the loop, which a constructor may need
        async with asyncio.TaskGroup() as self._group:
            self._dispatch()
            await self._ended.wait()

    def _dispatch(self) -> None:
        while self._free and (task := self._take(self._workers[0], wait=False)) is not None:
            self._free -= 1
            self._group.create_task(self._compute(task))

    async def _compute(self, task: Task) -> None:
        with suppress(WorkerClosed):
            self._report(await BatchRun(self._workers[0], task).run_async())
        self._free += 1
        self._dispatch()

    def _cancel(self) -> None:
        for task in asyncio.all_tasks():
            task.cancel()

    def _post(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function)


class CallerEngine(Engine):
    """Engine without threads: `submit` runs the batch, and returns after the report.

    `start` and `submit` raise the error of a class that cannot be built, and KeyboardInterrupt.
    """

    def __init__(self, step: Step, report: Callable[[Outcome], None]) -> None:
        super().__init__(report, [LocalWorker(step)])
        self._runner = asyncio.Runner() if step.is_coroutine else None

    def start(self) -> None:
        """Build the function."""
        self._workers[0].make_ready()

    def close(self, deadline: float) -> None:
        """End the worker and its loop."""
        super().close(deadline)
        if self._runner is not None:
            self._runner.close()

    def _put(self, task: Task) -> None:
        run = BatchRun(self._workers[0], task)
        self._report(run.run() if self._runner is None else self._runner.run(run.run_async()))
