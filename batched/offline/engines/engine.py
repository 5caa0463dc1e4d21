"""Engine: the function of a step, called by the runtime of online functions.

1. A batcher of its own forms the batches, and its threads call `Engine.run`. Each thread has one
   `Worker`, which it builds before its first call. Coroutine functions share one worker.
2. A row ends with its result, or with an exception in its place: the function's own; `Unfit`, for
   an error outside the function; or `WorkerClosed`, if the row was not computed.
3. A failed batch is called again in halves until the rows that fail stand alone. After `_FAILURES`
   failures without a success it is given up, and its errors are `GivenUp`. Errors of a service are
   not searched. A batch with a request of `SEARCHED` is searched to the end after any error.
4. While `paused` is set, and after `stop`, batches end at once and are not computed.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Any, Final

from ..._core.request import Batch, Request
from ..._execution.attempts import Outcomes, attempts, finish_now
from ..._execution.memory import is_out_of_memory
from ..._function.function import Batcher, BatchFunction
from ...errors import BatchFunctionError, BatchSizeMismatch, TimeLimitExceeded
from ..step import Auto, Step
from .sizes import AutoSize

_logger = logging.getLogger("batched")

_FAILURES: Final = 3
"""Failures without a success after which a batch is given up: the batch and its two halves."""

SEARCHED: Final = object()
"""Owner of requests whose failures are searched to the end."""


class WorkerClosed(Exception):
    """The row was not computed, or not to the end."""


class Unfit(Exception):
    """An error of one row in `phase`, outside the function."""

    def __init__(self, phase: str, error: BaseException) -> None:
        self.phase = phase
        self.error = error


class GivenUp(Exception):
    """The error of a batch in which not all failing rows were searched."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Worker(ABC):
    """Place where the function computes."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.closing = threading.Event()  # no call begins any more
        self.ready = False  # the function is built
        self._building = threading.Lock()  # of several threads, one builds

    def make_ready(self) -> None:
        """Build the function, if it is not built; again after errors of a service.

        Raises:
            WorkerClosed: the engine is closed.
            Exception: the function cannot be built.
        """
        retry = self.step.call_retry
        for attempt in count(1):
            if self.closing.is_set():
                raise WorkerClosed
            with self._building:
                if self.ready:
                    return
                try:
                    self.start()
                    self.ready = True
                except BaseException as error:
                    if attempt >= retry.attempts or not retry.is_service_fault(error):
                        raise
                    self.closing.wait(retry.wait(attempt, error))

    @abstractmethod
    def start(self) -> None:
        """Build the function."""

    @abstractmethod
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the function.

        Raises:
            Exception: the error of the function, or of the worker.
        """

    def kill(self) -> None:  # noqa: B027  # a call in a thread cannot be ended
        """End a running call, from any thread."""

    def close(self) -> None:  # noqa: B027  # not all workers hold resources
        """Release all resources. Can be called several times."""


class Engine:
    """The function of one step on its workers, a batch on each.

    `on_fatal` gets the error of a worker that cannot be built, on the thread of that worker.
    """

    in_steps = False  # as the runtime asks

    def __init__(
        self,
        step: Step,
        workers: Sequence[Worker],
        on_fatal: Callable[[BaseException], object],
    ) -> None:
        self.step = step
        self.slots = len(workers)
        """Batches that may run at once."""
        self._on_fatal = on_fatal
        self._workers = workers
        parts = step.parts
        function = parts.function
        self.collator = parts.execution.collator
        self.options = options = function.options
        self.takes_features = options.features is not None
        size = options.policy.batch_size
        auto = step.batch_size
        self._sizes = AutoSize(auto if isinstance(auto, Auto) else Auto(size, size))
        policy = replace(
            options.policy,
            batch_size=self.batch_size,
            flush="window",  # a batch is held until it is full, or `hold` says otherwise
            timeout_ms=1e15,
            max_concurrent_batches=self.slots,
            max_queue_size=None,
            queue_timeout_ms=None,
        )
        requests = _FeaturesOfRow(parts.requests) if self.takes_features else parts.requests
        # plain: `requests` prepares, and a client may have a runtime of its own
        options = replace(options, policy=policy, prepare=None)
        function = BatchFunction(function.func, "static", False, options)
        parts = parts._replace(function=function, requests=requests, execution=self)  # type: ignore[arg-type]  # it runs batches as `Execution` does
        self._batcher = Batcher(parts)
        # a call that hangs must not hold up the end of the program
        self._batcher.runtime.finishes_at_exit = False
        self._mine = threading.local()  # the worker of this thread
        self._free = [*workers]  # workers without a thread
        self._lock = threading.Lock()  # guards the count and the size of batches
        self.batches = 0  # that have ended
        self.paused = False
        self.closed = False
        """Whether no further call begins."""
        self._holds = True
        self._warned = False  # whether it was told that results are missing

    @property
    def batch_size(self) -> int:
        """Rows of a full batch at present."""
        return self._sizes.size

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
        try:
            if self.takes_features and len(items) > 1:
                raise ValueError("features of several rows are several calls")
            self._batcher.outcomes(items, ended, args, owner=owner)
        except (KeyboardInterrupt, SystemExit):  # of a signal handler
            raise
        except BaseException as error:
            if len(items) == 1:
                ended([0], [Unfit("preprocess", error)])
                return
            for place, item in enumerate(items):
                self.submit([item], lambda _, out, place=place: ended([place], out), args, owner)  # type: ignore[misc]

    def hold(self, *, holds: bool) -> None:
        """Hold batches that are not full, or let them leave."""
        if holds != self._holds:
            with self._lock:  # or a worker that changes the batch size would hold them again
                self._holds = holds
                self._adjust()

    def _adjust(self) -> None:
        self._batcher.runtime.adjust(draining=not self._holds, batch_size=self.batch_size)

    # batches, called by the runtime

    def run(self, batch: Batch, _: Any = None, /) -> Outcomes:
        """Call the function for `batch`. Never raise."""
        worker, began = self._worker(), perf_counter()
        searched = any(request.owner is SEARCHED for request, _, _ in batch.slices)
        failures, works, given_up = 0, False, False
        # a function may change its dicts, and a search calls it for them again
        copies = len(self.step.inputs) > 1 and not (self.takes_features or self.step.preprocess)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal works
            self._begin(worker)
            if copies:
                args = [{**row} for row in args[0]], *args[1:]
            try:
                output = worker.call(*args, **kwargs)
            except BaseException:
                if self.closed:  # perhaps the call was ended
                    raise WorkerClosed from None
                raise
            works = True
            return output if self.takes_features else _rows(output, self.step)

        def isolates(error: BaseException) -> bool:
            nonlocal failures, given_up
            if isinstance(error, WorkerClosed) or not self.step.isolate_errors:
                return False
            if isinstance(error, BatchSizeMismatch) and not self._warned:
                self._warned = True
                _logger.warning(
                    "step %r: %s; the rows of such batches are computed again in parts",
                    *(self.step.name, error),
                )
            if searched or self.step.call_retry.is_service_fault(error):
                return searched
            failures += 1
            given_up = given_up or (failures >= _FAILURES and not works)
            return not given_up

        slices, results, calls = finish_now(
            attempts(call, batch, self.collator, is_out_of_memory, isolates)
        )
        self._note_batch(batch, perf_counter() - began)
        if given_up:
            self.paused = True  # at once; the run decides whether it stays
            results = [
                GivenUp(each)
                if isinstance(each, BaseException) and type(each) is not WorkerClosed
                else each
                for each in results
            ]
        return slices, results, calls

    def _worker(self) -> Worker:
        if not hasattr(self._mine, "worker"):
            self._mine.worker = self._free.pop()
        worker: Worker = self._mine.worker
        return worker

    def _begin(self, worker: Worker) -> None:
        """Prepare a call. Raise WorkerClosed if none may begin."""
        if self.closed or self.paused:
            raise WorkerClosed
        try:
            worker.make_ready()
        except BaseException as error:
            if not self.closed:
                self.closed = True
                error.add_note(f"in step {self.step.name!r}")
                self._on_fatal(error)
            raise WorkerClosed from None

    def _note_batch(self, batch: Batch, seconds: float) -> None:
        with self._lock:
            self.batches += 1
            before = self.batch_size
            if batch.fitted and batch.attempts == 1:
                self._sizes.note(batch.size, seconds)
            if self.batch_size != before:
                self._adjust()

    # the end

    def build(self) -> None:
        """Build the function of the first worker."""
        self._workers[0].make_ready()

    def stop(self) -> None:
        """Let no further call begin. Never block; can be called several times."""
        self.closed = True
        for worker in self._workers:
            worker.closing.set()
        self.hold(holds=False)

    def close(self) -> None:
        """End running calls where that is possible, and all workers.

        A call in a thread cannot be ended, and is left to its daemon thread.
        """
        self.stop()
        for worker in self._workers if self.running else ():
            worker.kill()
        self._batcher.runtime.abort("its run has ended")
        for worker in dict.fromkeys(self._workers):
            worker.close()


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


def _rows(output: Any, step: Step) -> Any:
    """Return `output`; if it is a dict of several columns, return a dict for each row.

    Raises:
        BatchFunctionError: the columns are no lists of one length.
    """
    names = step.outputs
    if len(names) < 2 or not isinstance(output, Mapping):
        return output
    try:
        rows = zip(*map(output.__getitem__, names), strict=True)
        return [dict(zip(names, row, strict=True)) for row in rows]
    except (KeyError, TypeError, ValueError):
        raise BatchFunctionError(
            f"{step.name} returned a dict; it must have a list for each of the columns "
            f"{', '.join(names)}, all of one length"
        ) from None


def time_limit_exceeded(step: Step) -> TimeLimitExceeded:
    """Return the error of a call that was ended."""
    return TimeLimitExceeded(
        f"{step.name} took longer than timeout_s={step.timeout_s:g}, and was ended"
    )
