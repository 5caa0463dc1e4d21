"""Workers of a step: they take its batches, and put what became of them into a queue.

Each worker is a thread with a place for the function (`_places.py`, `_ray.py`); the batches of a
coroutine function run as tasks of one loop. Rules:

1. A worker runs a batch as the online runtimes do, by `Execution`. Its calls pass through
   `BatchRun`, which knows what is special here; drivers in this module make them.
2. What cannot be built ends the workers; that is reported once.
3. `close` ends waits at once. No call begins after it; one that runs has some seconds. A batch that
   this breaks off is not reported, and neither are those that had not begun.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Final

from .._core.exceptions import trim_traceback
from .._core.request import Batch
from .._execution.attempts import CallOutcome, Outcomes
from .._execution.execution import Execution
from .._runtime.async_backend import ends_current_task
from ..errors import TimeLimitExceeded
from ._batch_run import BatchRun, Done, WorkerSpec
from ._places import BuildError, Here, InProcess, Place, PlaceClosed
from ._ray import Actors

_KILL_TIME: Final = 10.0
"""Time for a worker to end once its process was killed, or its task cancelled (s)."""


class Workers(ABC):
    """Workers of one step; made by `workers_of`."""

    def __init__(self, spec: WorkerSpec, outbox: SimpleQueue[Done]) -> None:
        self._spec = spec
        self._outbox = outbox
        self._closing = threading.Event()
        self._reporting = threading.Lock()  # held while the next one changes
        self._has_failed = False

    def reserve(self) -> None:  # noqa: B027  # most need no room of a cluster
        """Has room kept for one worker at least, before other steps take all there is."""

    @abstractmethod
    def start(self) -> None:
        """Starts the workers, which build what they need first."""

    @abstractmethod
    def submit(self, batch: Batch, *, thoroughly: bool = False) -> None:
        """Has a worker run `batch` as soon as one is free; with `thoroughly` it is not given up as
        long as a row of it has not been tried. Never blocks.
        """

    @abstractmethod
    def close(self, wait: float) -> None:
        """Ends the workers, their processes and their loop. Calls that run may end by themselves in
        `wait` seconds; what is not a process or a coroutine cannot be ended by others, and is left
        to a daemon thread.
        """

    def _report(self, error: BaseException) -> None:
        """Reports why no worker can go on, unless that is as it should be, or was reported."""
        with self._reporting:
            if not self._has_failed and not isinstance(error, PlaceClosed):
                self._has_failed = True
                self._outbox.put(Done(self._spec.step, None, fatal=error))

    def _finish(self, run: BatchRun, outcomes: Outcomes, start: float) -> bool:
        """Reports what became of a batch, and tells whether the worker goes on."""
        if run.stopped is not None:
            self._report(run.stopped)
            return False
        self._outbox.put(run.done(outcomes, perf_counter() - start))
        return True

    def _execution(self, run: BatchRun, call: Callable[..., Any]) -> Execution:
        return Execution(
            call,
            self._spec.collator,
            splits=run.splits,
            isolates=run.isolates,
            ends_task=ends_current_task,
        )


def _places_of(spec: WorkerSpec) -> list[Place]:
    """The place of each worker; on Ray they share one."""
    function, workers = spec.function, range(spec.workers)
    if spec.engine is None and not spec.processes:
        return [Here(function) for _ in workers]
    payload = function.pickled(spec.retry.on)
    if spec.engine is not None:
        count = spec.workers // spec.engine.max_in_flight
        return [Actors(spec.engine, spec.name, payload, count, spec.timeout_s)] * spec.workers
    return [InProcess(spec.name, payload, spec.timeout_s) for _ in workers]


class ThreadWorkers(Workers):
    """Threads, each with a place of its own."""

    def __init__(self, spec: WorkerSpec, outbox: SimpleQueue[Done]) -> None:
        super().__init__(spec, outbox)
        self._inbox: SimpleQueue[tuple[Batch, bool] | None] = SimpleQueue()
        self._places = _places_of(spec)
        self._threads: list[threading.Thread] = []

    def reserve(self) -> None:
        if self._spec.engine is not None:
            self._spec.engine.join()
        for place in self._places:
            if isinstance(place, Actors):
                place.reserve()

    def start(self) -> None:
        self.reserve()
        self._threads = [
            threading.Thread(
                target=self._work, args=(place,), name=f"batched-{self._spec.name}", daemon=True
            )
            for place in self._places
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, batch: Batch, *, thoroughly: bool = False) -> None:
        self._inbox.put((batch, thoroughly))

    def close(self, wait: float) -> None:
        self._closing.set()
        for _ in self._threads:
            self._inbox.put(None)
        for place in self._places:
            place.retire()
        try:
            _join(self._threads, wait)
        finally:  # also if Ctrl-C ends the wait
            for place in self._places:
                place.kill()
        elsewhere = self._spec.processes or self._spec.engine is not None
        _join(self._threads, _KILL_TIME if elsewhere else 0)

    def _work(self, place: Place) -> None:
        try:
            place.start()
            while (task := self._inbox.get()) is not None and not self._closing.is_set():
                batch, thoroughly = task
                run = BatchRun(self._spec, batch, thoroughly, self._closing.is_set)
                start = perf_counter()
                call = driver(run, place.call, self._closing.wait)
                outcomes = self._execution(run, call).run(batch)
                if not self._finish(run, outcomes, start):
                    return
                del task, batch, run, call, outcomes  # results may be large, the next wait long
        except BuildError as error:
            self._report(error.error)
        except BaseException as error:
            self._report(error)
        finally:
            place.close()


class LoopWorkers(Workers):
    """Tasks of one loop, which has a thread of its own."""

    def __init__(self, spec: WorkerSpec, outbox: SimpleQueue[Done]) -> None:
        super().__init__(spec, outbox)
        self._inbox: asyncio.Queue[tuple[Batch, bool] | None] = asyncio.Queue()
        self._closed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, name=f"batched-{self._spec.name}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def submit(self, batch: Batch, *, thoroughly: bool = False) -> None:
        self._post(lambda: self._inbox.put_nowait((batch, thoroughly)))

    def close(self, wait: float) -> None:
        self._closing.set()
        if self._thread.ident is None:
            self._loop.close()
            return
        self._post(self._end)
        self._thread.join(wait)
        self._post(self._cancel)
        self._thread.join(_KILL_TIME)

    def _post(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is there any more
            self._loop.call_soon_threadsafe(function)

    def _end(self) -> None:
        self._closed.set()
        for _ in range(self._spec.workers):
            self._inbox.put_nowait(None)

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        try:
            with (
                asyncio.Runner(loop_factory=lambda: self._loop) as runner,
                suppress(asyncio.CancelledError),
            ):
                runner.run(self._serve())
        except BaseException as error:
            self._report(error)

    async def _serve(self) -> None:
        call = self._spec.function.build()
        async with asyncio.TaskGroup() as group:
            for _ in range(self._spec.workers):
                group.create_task(self._work(call))

    async def _work(self, call: Callable[..., Any]) -> None:
        while (task := await self._inbox.get()) is not None and not self._closing.is_set():
            batch, thoroughly = task
            run = BatchRun(self._spec, batch, thoroughly, self._closing.is_set)
            start = perf_counter()
            outcomes = await self._execution(run, self._driver(run, call)).run_async(batch)
            if not self._finish(run, outcomes, start):
                return
            del task, batch, run, outcomes

    def _driver(self, run: BatchRun, call: Callable[..., Any]) -> Callable[..., Any]:
        async def drive(*args: Any, **kwargs: Any) -> Any:
            steps = run.attempt(args, kwargs)
            outcome: CallOutcome | None = None
            try:
                while True:
                    step = steps.send(outcome)
                    outcome = None
                    if not isinstance(step, tuple):
                        with suppress(TimeoutError):
                            await asyncio.wait_for(self._closed.wait(), step)
                        continue
                    try:
                        outcome = await self._limited(call(*step[0], **step[1])), None
                    except BaseException as raised:
                        if ends_current_task(raised):
                            raise
                        outcome = None, trim_traceback(raised)
            except StopIteration as end:
                output, error = end.value
            if error is not None:
                try:
                    raise error
                finally:
                    del error, outcome, steps
            return output

        return drive

    async def _limited(self, answer: Any) -> Any:
        """`answer` of the function, awaited for as long as it may take."""
        limit = self._spec.timeout_s
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                return await answer
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise TimeLimitExceeded(
                f"{self._spec.name} took longer than timeout_s={limit:g}, and was cancelled"
            ) from error


def driver(
    run: BatchRun, call: Callable[..., Any], wait: Callable[[float], object]
) -> Callable[..., Any]:
    """What `Execution` calls in place of a plain function: it calls that, and waits, as `run` asks
    for.
    """

    def drive(*args: Any, **kwargs: Any) -> Any:
        steps = run.attempt(args, kwargs)
        outcome: CallOutcome | None = None
        try:
            while True:
                step = steps.send(outcome)
                outcome = None
                if not isinstance(step, tuple):
                    wait(step)
                    continue
                try:
                    outcome = call(*step[0], **step[1]), None
                except BaseException as raised:
                    outcome = None, trim_traceback(raised)
        except StopIteration as end:
            output, error = end.value
        if error is not None:
            try:
                raise error
            finally:
                del error, outcome, steps  # its traceback holds this frame
        return output

    return drive


def workers_of(spec: WorkerSpec, outbox: SimpleQueue[Done]) -> Workers:
    """The workers of a step; what became of its batches goes to `outbox`.

    Raises:
        TypeError: the function cannot be sent to a process.
    """
    return (LoopWorkers if spec.function.coroutine else ThreadWorkers)(spec, outbox)


def _join(threads: list[threading.Thread], wait: float) -> None:
    """Waits for all of `threads` together, `wait` seconds at most."""
    start = perf_counter()
    for thread in threads:
        thread.join(max(0.0, wait - (perf_counter() - start)))
