"""Engine: runs the batches of one step on workers that it owns.

A worker is a place where the function computes: this process, another process or an actor.

1. Each thread of the engine, or each task of its loop, takes a batch from the queue and runs the
   batch on its worker by `Execution`. The engine reports one `Outcome` for each batch.
2. No call is repeated, and no call waits. A service error of the whole batch is the outcome of all
   its rows. The owner of the engine decides when rows are tried again.
3. Any other failure is narrowed by halves until the rows that fail stand alone. If a batch and both
   its halves fail, the batch is given up: the function fails, rather than its rows. An isolating
   batch is narrowed to the end, whatever the error.
4. A class whose constructor fails with a service error is built again, as `Retry` says. A worker
   that cannot be built leaves, and its batch returns to the queue. The engine reports a fatal error
   once the last worker has left.
5. With a class per routing key, a worker takes the oldest batch of a key that it holds; else the
   oldest batch of a key that no worker holds; else the oldest batch.
6. `stop` ends all waits of the workers. No call begins after `stop`. A batch that `stop` interrupts
   is not reported.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

from ..._collate.items import ItemCollator
from ..._core.request import Batch, Slice
from ..._execution.attempts import Outcomes
from ..._execution.exceptions import trim_traceback
from ..._execution.execution import Execution
from ..._execution.memory import is_out_of_memory, release_memory
from ..._runtime.async_backend import ends_current_task
from ..._services.failures import error_text, is_memory_error
from ...errors import BatchFunctionError, BatchSizeMismatch, TimeLimitExceeded
from ..failures import has_error
from ..step import Step

_logger = logging.getLogger("batched")

_FAILURES: Final = 3
"""Calls that fail before a batch is given up: the batch and its two halves."""

_KILL_TIME: Final = 10.0
"""Longest wait for a call that was killed or cancelled (s)."""

Task = tuple[Batch, bool]
"""A batch, and whether the batch is isolating."""


@dataclass
class Outcome:
    """Outcome of a batch, or the end of all workers."""

    batch: Batch | None
    """None if the outcome is `fatal`."""
    slices: list[Slice] = field(default_factory=list)
    results: Sequence[Any] = ()
    """For each slice its result, or the exception in its place."""
    tried: list[int] = field(default_factory=list)
    """For each slice the number of calls that included the slice."""
    seconds: float = 0.0
    """Time from the first call to the end of the last one (s)."""
    fatal: BaseException | None = None
    """Error of the last worker, which could not be built."""


class WorkerClosed(Exception):
    """The engine was closed before or during a call."""


class Worker(ABC):
    """Place where the function computes, for one thread of the engine or several."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.collator = step.parts.execution.collator
        self.closing = threading.Event()  # no call begins any more
        self.building = threading.RLock()  # held while the function is built
        self.ready = False  # the function is built
        self.failed: BaseException | None = None  # reason why the function cannot be built
        self.keys = deque[Hashable](maxlen=step.models)  # routing keys of its instances
        self.warned: set[str] = set()  # warnings that have been logged

    def make_ready(self) -> None:
        """Build the function, if it is not built; again after errors of a service.

        Raises:
            WorkerClosed: the engine is closed.
            Exception: the function cannot be built.
        """
        attempt = 0
        while not self.ready or self.closing.is_set():
            with self.building:
                if self.closing.is_set():
                    raise WorkerClosed
                if self.failed is not None:
                    raise self.failed
                try:
                    self.ready = self.ready or self.start()
                except BaseException as error:
                    attempt += 1
                    retry = self.step.call_retry
                    if attempt >= retry.attempts or not retry.is_service_fault(error):
                        self.failed = error
                    else:
                        self.closing.wait(retry.wait(attempt, error))

    def reserve(self) -> None:  # noqa: B027  # only a cluster has room to reserve
        """Reserve room for one worker."""

    @abstractmethod
    def start(self) -> bool:
        """Build the function. Return True."""

    @abstractmethod
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the function.

        Raises:
            WorkerClosed: `kill` was called.
            Exception: the error of the function, or of the worker.
        """

    def kill(self) -> bool:
        """End a running call, from any thread. Return whether that is possible."""
        return False

    def close(self) -> None:  # noqa: B027  # not all workers hold resources
        """Release all resources. Can be called several times."""


class BatchRun:
    """One batch on a worker: decides which failures are narrowed, and when the batch is over."""

    def __init__(self, worker: Worker, task: Task) -> None:
        self._worker = worker
        self._step = worker.step
        self._batch, self._isolating = task
        self._start = perf_counter()
        self._calls = 0  # calls of the function that have begun
        self._failures = 0  # failed calls that may be narrowed
        self._too_big = 0  # calls that ran out of memory
        self._timed_out = False  # the first call took longer than the time limit
        self._over: BaseException | None = None  # error of all further calls
        self._stopped: BaseException | None = None  # reason why the thread stops

    def run(self) -> Outcome:
        """Call the function until each row has an outcome.

        Raises:
            WorkerClosed, KeyboardInterrupt: the batch was interrupted.
            Exception: the function could not be built.
        """
        return self._outcome(self._execution(self._call).run(self._batch))

    async def run_async(self) -> Outcome:
        """Await the function until each row has an outcome. Raise as `run` does."""
        return self._outcome(await self._execution(self._call_async).run_async(self._batch))

    def _execution(self, call: Callable[..., Any]) -> Execution:
        return Execution(
            call,
            self._worker.collator,
            splits=self._splits,
            isolates=self._isolates,
            ends_task=ends_current_task,
        )

    def _outcome(self, outcomes: Outcomes) -> Outcome:
        slices, results, tried = outcomes
        if self._stopped is not None:
            raise self._stopped
        batch = self._batch
        if self._timed_out and not has_error(results):
            batch.too_big = [*batch.too_big, (batch.size, batch.longest)]
            self._warn(
                "step %r: %d rows took longer than timeout_s, and their parts did not; smaller "
                "batches are formed from now on",
                self._step.name,
                batch.size,
            )
        return Outcome(batch, slices, results, [*tried], perf_counter() - self._start)

    def _warn(self, message: str, *values: object) -> None:
        if message not in self._worker.warned:
            self._worker.warned.add(message)
            _logger.warning(message, *values)

    def _stop(self, error: BaseException) -> None:
        self._over = self._stopped = error

    def _begin(self) -> None:
        """Prepare a call. Raise an error if none may begin."""
        if self._over is not None:
            raise self._over
        try:
            self._worker.make_ready()
        except BaseException as error:
            self._stop(error)
            raise
        self._calls += 1

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        try:
            return self._rows(self._worker.call(*args, **kwargs))
        except BaseException as error:
            if self._ends(error):
                self._stop(error)
            raise

    def _ends(self, error: BaseException) -> bool:
        """Return whether the worker, rather than the function, has ended the call."""
        if isinstance(error, KeyboardInterrupt):  # elsewhere the function has raised the error
            return threading.current_thread() is threading.main_thread()
        return isinstance(error, WorkerClosed) or self._worker.failed is not None

    async def _call_async(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        limit = asyncio.timeout(self._step.timeout_s)
        try:
            async with limit:
                output = await self._worker.call(*args, **kwargs)
            return self._rows(output)
        except BaseException as error:
            if limit.expired() and isinstance(error, TimeoutError):
                raise time_limit_exceeded(self._step) from error
            if is_memory_error(error):  # later, frames that cannot be cleared are above the user's
                release_memory(trim_traceback(error))
            raise

    def _splits(self, error: BaseException) -> bool:
        """Return whether memory ran out, so that smaller parts are tried."""
        splits = self._over is None and is_out_of_memory(error)
        self._too_big += splits
        return splits

    def _isolates(self, error: BaseException) -> bool:
        """Return whether the halves of a failed part are tried."""
        step = self._step
        if self._over is not None or not step.isolate_errors:
            return False
        self._failures += 1
        if self._calls == 1:
            self._timed_out = isinstance(error, TimeLimitExceeded)
        if isinstance(error, BatchSizeMismatch):
            self._warn("%s; it is called with fewer items, down to one", error)
        if self._isolating or step.call_retry.is_service_fault(error):
            return self._isolating
        # no call has succeeded
        if self._failures >= _FAILURES and self._calls <= self._failures + self._too_big:
            self._over = error
        return self._over is None

    def _rows(self, output: Any) -> Any:
        """Return `output`; if it is a dict of several columns, return a dict for each row.

        Raises:
            BatchFunctionError: the columns are no lists of one length.
        """
        names, are_items = self._step.outputs, isinstance(self._worker.collator, ItemCollator)
        if len(names) < 2 or not are_items or not isinstance(output, Mapping):
            return output
        try:
            rows = zip(*map(output.__getitem__, names), strict=True)
            return [dict(zip(names, row, strict=True)) for row in rows]
        except (KeyError, TypeError, ValueError):
            raise BatchFunctionError(
                f"{self._step.name} returned a dict; it must have a list for each of the columns "
                f"{', '.join(names)}, all of one length"
            ) from None


class Engine:
    """Threads that run the batches of one step on its workers; `engine_for` makes an engine.

    `report` is called on these threads.
    """

    def __init__(
        self,
        report: Callable[[Outcome], None],
        workers: Sequence[Worker],
        threads_each: int = 1,
    ) -> None:
        self.slots = len(workers) * threads_each
        """Batches that may run at once."""
        self._report = report
        self._workers = [*workers]
        self._threads_each = threads_each
        self._step = workers[0].step
        self._threads = [
            threading.Thread(
                target=self._work, args=(worker,), name=f"batched-{self._step.name}", daemon=True
            )
            for worker in workers
            for _ in range(threads_each)
        ]
        self._changed = threading.Condition()  # guards the attributes below, and `_workers`
        self._tasks: deque[Task] = deque()  # batches that wait for a worker
        self._stopped = False

    def reserve(self) -> None:
        """Reserve room for one worker, before another step takes all of the cluster."""
        self._workers[0].reserve()

    def start(self) -> None:
        """Start the workers, which first build the function."""
        for thread in self._threads:
            thread.start()

    def submit(self, batch: Batch, *, isolating: bool = False) -> None:
        """Queue `batch` for the next free worker. Never block."""
        self._put((batch, isolating))

    def stop(self) -> None:
        """Let no further call begin. Never block; can be called several times."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for worker in [*self._workers]:
            worker.closing.set()

    def close(self, deadline: float) -> None:
        """End the workers. Calls that run may end until `deadline`, a moment of `perf_counter` (s).

        Then processes are killed, actors are ended, and coroutines are cancelled. A call in a
        thread cannot be ended, and is left to its daemon thread.
        """
        self.stop()
        try:
            join(self._threads, deadline)
        finally:  # also if Ctrl-C ends the wait
            if self._kill():
                join(self._threads, perf_counter() + _KILL_TIME)
            for worker in self._workers:
                worker.close()

    def _kill(self) -> bool:
        """End running calls. Return whether that is possible."""
        return max([worker.kill() for worker in self._workers], default=False)

    def _work(self, worker: Worker) -> None:
        try:
            self._serve(worker)
        except BaseException as error:
            if not self._stopped:
                self._lose(worker, error)
        if self._threads_each == 1:
            worker.close()

    def _lose(self, worker: Worker, error: BaseException) -> None:
        """Go on without `worker`, or report that no worker is left."""
        with self._changed:
            if worker not in self._workers:  # another of its threads was here
                return
            self._workers.remove(worker)
        worker.close()
        if self._workers:
            note_loss(self._step, error)
        else:
            self._report(Outcome(None, fatal=error))

    def _serve(self, worker: Worker) -> None:
        """Run batches until `stop`. Raise the error of a worker that must leave."""
        worker.make_ready()
        while (task := self._take(worker)) is not None:
            try:
                self._report(BatchRun(worker, task).run())
            except BaseException:
                self._put(task)
                raise
            del task  # rows may be large, and the next wait long

    def _put(self, task: Task) -> None:
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def _take(self, worker: Worker, *, wait: bool = True) -> Task | None:
        """Return the next batch for `worker`; None after `stop`, or if none waits."""
        with self._changed:
            while wait and not self._tasks and not self._stopped:
                self._changed.wait()
            if self._stopped or not self._tasks:
                return None
            place = self._place_for(worker) if self._step.models else 0
            task = self._tasks[place]
            del self._tasks[place]
            return task

    def _place_for(self, worker: Worker) -> int:
        """Return the place in the queue of the batch for `worker`, which will hold its key."""
        # the routing key is the only argument of the requests
        keys = [batch.slices[0][0].group_key for batch, _ in self._tasks]
        held = {key for each in self._workers for key in each.keys}
        ranks = [(key not in worker.keys, key in held) for key in keys]
        place = ranks.index(min(ranks))
        with suppress(ValueError):
            worker.keys.remove(keys[place])
        worker.keys.append(keys[place])
        return place


def note_loss(step: Step, error: BaseException) -> None:
    """Log that a worker of a step could not be built, and others go on."""
    _logger.warning(
        "step %r goes on with a worker less, which could not be built: %s",
        step.name,
        error_text(error).error,
    )


def time_limit_exceeded(step: Step) -> TimeLimitExceeded:
    """Return the error of a call that was ended."""
    return TimeLimitExceeded(
        f"{step.name} took longer than timeout_s={step.timeout_s:g}, and was ended"
    )


def join(threads: Sequence[threading.Thread], deadline: float) -> None:
    """Wait until all of `threads` that have started end, or until `deadline` (s)."""
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - perf_counter()))
