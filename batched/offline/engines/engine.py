"""Engine: the function of a step, called by the runtime of online functions.

1. A batcher of its own forms the batches, and its workers call `Engine.run`: threads, or tasks of a
   loop. Each thread has one `Worker`, which it builds before its first call, and alone calls it.
   The workers of a cluster and of a loop are shared.
2. A row ends with its result, or with an exception in its place: the function's own, or a `Failed`
   with what else is known. `Unprepared` has an error from before the call, and `WorkerClosed` means
   that the row was not computed.
3. A failed batch is called again in halves until the rows that fail stand alone. If a batch and
   both its halves fail, or a service fails, it is given up. A batch with a row that is `ISOLATING`,
   or a `TRIAL`, is searched to the end.
4. While `trials_only` is set, and after `stop`, other batches end at once and are not computed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, Final

from ..._collate.items import ItemCollator
from ..._core.request import Batch, Request
from ..._execution.attempts import Outcomes
from ..._execution.exceptions import trim_traceback
from ..._execution.execution import Execution
from ..._execution.memory import is_out_of_memory, release_memory
from ..._function.function import Batcher, BatchFunction
from ..._runtime.async_backend import ends_current_task
from ..._runtime.timer_thread import daemon_thread
from ..._services.failures import is_memory_error
from ...errors import BatchFunctionError, TimeLimitExceeded
from ..failures import has_error
from ..step import Auto, Step
from .sizes import AutoSize

_FAILURES: Final = 3
"""Calls that fail before a batch is given up: the batch and its two halves."""
_KILL_S: Final = 10.0
"""Longest wait for calls that were killed or cancelled (s)."""
_POLL_S: Final = 0.005
"""Time between two looks for the end of such calls (s)."""

ISOLATING: Final = object()
"""Owner of requests whose failures are searched to the end."""
TRIAL: Final = object()
"""Owner of the request of a row that is tried alone."""


class WorkerClosed(Exception):
    """The row was not computed, or not to the end."""


class Unprepared(Exception):
    """An error of one row before the call of the function (`error`)."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Failed(Exception):
    """An error of the function (`error`), and what is known of its batch."""

    def __init__(self, error: BaseException, *, alone: bool, began: float | None) -> None:
        self.error = error
        self.alone = alone  # whether it is the error of one row, found by a search
        self.began = began  # when the batch began, if none of its rows has succeeded (s)


class Worker(ABC):
    """Place where the function computes."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.closing = threading.Event()  # no call begins any more
        self.building = threading.RLock()  # held while the function is built
        self.ready = False  # the function is built
        self.failed: BaseException | None = None  # reason why the function cannot be built

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


class Engine:
    """The function of one step on its workers, `slots` batches at once.

    `on_fatal` gets the error of a worker that cannot be built, on the thread of that worker.
    """

    in_steps = False  # as the runtime asks

    def __init__(
        self,
        step: Step,
        workers: Sequence[Worker],
        on_fatal: Callable[[BaseException], object],
        slots: int,
    ) -> None:
        self.step = step
        self.slots = slots
        """Batches that may run at once."""
        self._on_fatal = on_fatal
        self.workers = list(workers)
        parts = step.parts
        function = parts.function
        self.collator = parts.execution.collator
        options = function.options
        self.takes_features = options.features is not None
        self._auto = AutoSize(step.batch_size) if isinstance(step.batch_size, Auto) else None
        policy = replace(
            options.policy,
            batch_size=self._auto.size if self._auto else options.policy.batch_size,
            flush="window",  # a batch is held until it is full, or `hold` says otherwise
            timeout_ms=1e15,
            max_concurrent_batches=slots,
            max_queue_size=None,
            queue_timeout_ms=None,
        )
        requests = _FeaturesOfRow(parts.requests) if self.takes_features else parts.requests
        # plain: `requests` prepares, and a client may have a runtime of its own
        options = replace(options, policy=policy, prepare=None)
        function = BatchFunction(function.func, "static", step.is_coroutine, options)
        parts = parts._replace(function=function, requests=requests, execution=self)  # type: ignore[arg-type]  # it runs batches as `Execution` does
        self._batcher = Batcher(parts)
        # a call that hangs must not hold up the end of the program
        self._batcher.runtime.finishes_at_exit = False
        self._mine = threading.local()  # the worker of this thread
        self._free = list(workers)  # workers without a thread
        self._lock = threading.RLock()  # guards the counts, and the start of the loop
        self.batches = 0  # that have ended
        self.seconds = 0.0  # time of these batches (s)
        self.trials_only = False
        self.succeeded = 0.0  # when a batch last ended without an error (s)
        self.closed = False
        """Whether no further call begins."""
        self._holds = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event  # of the loop
        self._thread: threading.Thread | None = None  # of the loop

    @property
    def batch_size(self) -> int:
        """Rows of a full batch at present."""
        auto = self._auto
        return auto.size if auto else self._batcher.parts.function.options.policy.batch_size

    @property
    def waiting(self) -> int:
        """Rows that wait for a worker."""
        return int(self._batcher.runtime.load()[0])

    @property
    def running(self) -> int:
        """Rows that workers have."""
        return int(self._batcher.runtime.load()[2])

    # rows in, outcomes out

    def submit(
        self,
        items: list[Any],
        ended: Callable[[list[int], list[Any]], object],
        args: tuple[Any, ...] = (),
        owner: object = None,
    ) -> None:
        """Compute `items`. `ended` gets places and outcomes as they come, on any thread."""
        self._post(self._submit, items, ended, args, owner)

    def _submit(self, items: list[Any], ended: Any, args: tuple[Any, ...], owner: object) -> None:
        alone = len(items) == 1
        try:
            if alone or not self.takes_features:
                self._batcher.outcomes(items, ended, args, owner=owner)
                return
        except BaseException as error:
            if alone:
                ended([0], [Unprepared(error)])
                return
        for place, item in enumerate(items):
            self._submit([item], lambda _, out, place=place: ended([place], out), args, owner)

    def hold(self, *, holds: bool) -> None:
        """Hold batches that are not full, or let them leave."""
        if holds != self._holds:
            self._holds = holds
            self._adjust()

    def _adjust(self) -> None:
        if self._thread is not None or not self.step.is_coroutine:
            self._post(self._adjust_runtime)

    def _adjust_runtime(self) -> None:
        runtime = self._batcher.runtime.here(self._loop)
        runtime.adjust(draining=not self._holds, batch_size=self.batch_size)

    def _post(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function` where the runtime may be called: here, or on its loop."""
        if not self.step.is_coroutine:
            function(*args)
            return
        with self._lock:
            if self._thread is None:
                begun = threading.Event()
                self._thread = daemon_thread(f"{self.step.name}-loop", self._serve, begun)
                self._thread.start()
                begun.wait()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function, *args)

    def _serve(self, begun: threading.Event) -> None:
        async def main() -> None:
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
            self._adjust_runtime()
            begun.set()
            await self._ended.wait()

        asyncio.run(main())

    # batches, called by the runtime

    def run(self, batch: Batch, _: Any = None, /) -> Outcomes:
        """Call the function for `batch`. Never raise."""
        run = _Run(self, self._worker(), batch)
        return run.end(run.execution(run.call).run(batch))

    async def run_async(self, batch: Batch, _: Any = None, /) -> Outcomes:
        """Await the function for `batch`. Raise only an error that ends the task."""
        run = _Run(self, self._worker(), batch)
        return run.end(await run.execution(run.call_async).run_async(batch))

    def _worker(self) -> Worker:
        if len(self.workers) == 1:
            return self.workers[0]
        if not hasattr(self._mine, "worker"):
            self._mine.worker = self._free.pop()
        worker: Worker = self._mine.worker
        return worker

    def may_run(self, batch: Batch) -> bool:
        """Return whether `batch` is to be computed now."""
        return not (self.closed or (self.trials_only and not _belongs_to(batch, TRIAL)))

    def note_batch(self, batch: Batch, seconds: float) -> None:
        """Count a batch that was computed."""
        with self._lock:
            self.batches += 1
            self.seconds += seconds
            if self._auto and batch.fitted and batch.attempts == 1:
                size = self._auto.size
                if self._auto.next(batch.size, seconds) != size:
                    self._adjust()

    def lose(self, error: BaseException) -> None:
        """Report that a worker cannot be built."""
        if not self.closed:
            self._on_fatal(error)

    # the end

    def build(self) -> None:
        """Build the function of the first worker here, or on the loop."""
        done = threading.Event()

        def make_ready() -> None:
            with suppress(BaseException):  # which `failed` has
                self.workers[0].make_ready()
            done.set()

        self._post(make_ready)
        done.wait()
        if (failed := self.workers[0].failed) is not None:
            raise failed

    def stop(self) -> None:
        """Let no further call begin. Never block; can be called several times."""
        self.closed = True
        for worker in self.workers:
            worker.closing.set()
        self.hold(holds=False)

    def close(self) -> None:
        """End running calls where that is possible, and all workers.

        A call in a thread cannot be ended, and is left to its daemon thread.
        """
        self.stop()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended.set)
            if self._thread is not threading.current_thread() and self._thread is not None:
                self._thread.join(_KILL_S)
        elif not self.step.is_coroutine:
            deadline = perf_counter() + _KILL_S
            if self.running and max([worker.kill() for worker in self.workers]):
                while self.running and perf_counter() < deadline:
                    time.sleep(_POLL_S)
            self._batcher.runtime.abort("its run has ended")
        for worker in self.workers:
            worker.close()


class _Run:
    """One batch on a worker: decides which failures are searched, and when to give the batch up."""

    def __init__(self, engine: Engine, worker: Worker, batch: Batch) -> None:
        self._engine, self._worker, self._batch = engine, worker, batch
        self._isolating = _belongs_to(batch, ISOLATING, TRIAL)
        self._over: BaseException | None = None  # error of further calls
        if not engine.may_run(batch):
            self._over = WorkerClosed()
        self._began = perf_counter()
        self._calls = self._failures = 0  # calls that have begun, and those that may be searched
        self._too_big = 0  # calls that ran out of memory

    def execution(self, call: Callable[..., Any]) -> Execution:
        """Return what makes all calls for the batch."""
        return _Calls(
            call,
            self._engine.collator,
            splits=self._splits,
            isolates=self._isolates,
            ends_task=ends_current_task,
        )

    def end(self, outcomes: Outcomes) -> Outcomes:
        """Count the batch, and mark errors that several rows share."""
        slices, results, calls = outcomes
        now = perf_counter()
        if self._calls:
            self._engine.note_batch(self._batch, now - self._began)
        errors = [isinstance(each, BaseException) for each in results]
        if not all(errors):
            self._engine.succeeded = now
        if not has_error(results):
            return outcomes
        rows = Counter[int]()
        for (_, start, stop), result in zip(slices, results, strict=True):
            rows[id(result)] += stop - start
        searched = self._isolating or not self._engine.step.isolate_errors
        began = self._began if all(errors) else None
        marked = [
            Failed(each, alone=searched or rows[id(each)] == 1, began=began)
            if is_error and type(each) is not WorkerClosed
            else each
            for each, is_error in zip(results, errors, strict=True)
        ]
        if self._over is not None and self._engine.succeeded < self._began:
            self._engine.trials_only = True  # at once; the run decides whether it stays
        return slices, marked, calls

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        self._begin()
        try:
            return self._rows(self._worker.call(*args, **kwargs))
        except WorkerClosed as closed:
            self._over = closed
            raise
        except BaseException:
            self._check_worker()
            raise

    async def call_async(self, *args: Any, **kwargs: Any) -> Any:
        """Await the function, no longer than the step's time limit."""
        self._begin()
        step = self._engine.step
        limit = asyncio.timeout(step.timeout_s)
        try:
            async with limit:
                output = await self._worker.call(*args, **kwargs)
            return self._rows(output)
        except BaseException as error:
            if limit.expired() and isinstance(error, TimeoutError):
                raise time_limit_exceeded(step) from error
            if is_memory_error(error):  # later, frames that cannot be cleared are above the user's
                release_memory(trim_traceback(error))
            raise

    def _begin(self) -> None:
        """Prepare a call. Raise an error if none may begin."""
        if self._over is not None:
            raise self._over
        try:
            self._worker.make_ready()
        except BaseException:
            self._check_worker()
            self._over = WorkerClosed()
            raise self._over from None
        self._calls += 1

    def _check_worker(self) -> None:
        """End the batch if its worker cannot be built, or not again."""
        if self._worker.failed is not None:
            self._engine.lose(self._worker.failed)
            self._over = WorkerClosed()
            raise self._over from None

    def _splits(self, error: BaseException) -> bool:
        """Return whether memory ran out, so that smaller parts are tried."""
        splits = self._over is None and is_out_of_memory(error)
        self._too_big += splits
        return splits

    def _isolates(self, error: BaseException) -> bool:
        """Return whether the halves of a failed part are tried."""
        step = self._engine.step
        if self._over is not None or not step.isolate_errors:
            return False
        self._failures += 1
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
        step = self._engine.step
        names, are_items = step.outputs, isinstance(self._engine.collator, ItemCollator)
        if len(names) < 2 or not are_items or not isinstance(output, Mapping):
            return output
        try:
            rows = zip(*map(output.__getitem__, names), strict=True)
            return [dict(zip(names, row, strict=True)) for row in rows]
        except (KeyError, TypeError, ValueError):
            raise BatchFunctionError(
                f"{step.name} returned a dict; it must have a list for each of the columns "
                f"{', '.join(names)}, all of one length"
            ) from None


class _Calls(Execution):
    """Calls for batches whose owners are no instances."""

    def _function(self, batch: Batch) -> Callable[..., Any]:  # noqa: ARG002  # as in any execution
        return self.func


class _FeaturesOfRow:
    """Parser of the features of one row, given as a list of one item."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser

    def parse(
        self, items: list[Any], args: Any, kwargs: Any, owner: Any, waker: Any, _: Any, /
    ) -> Request:
        request: Request = self._parser.parse(items[0], args, kwargs, owner, waker, True)
        if request.size != 1:
            raise ValueError(
                f"the features of a row of the source must have one row, got {request.size}"
            )
        return request


def _belongs_to(batch: Batch, *owners: object) -> bool:
    """Return whether a request of `batch` has one of these owners."""
    return any(request.owner in owners for request, _, _ in batch.slices)


def time_limit_exceeded(step: Step) -> TimeLimitExceeded:
    """Return the error of a call that was ended."""
    return TimeLimitExceeded(
        f"{step.name} took longer than timeout_s={step.timeout_s:g}, and was ended"
    )
