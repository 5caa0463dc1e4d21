"""One batch in the hands of a worker: which calls it takes, and when it is given up.

`Execution` asks for attempts at the batch, or at parts of it. For each, `BatchRun` says which calls
to make and how long to wait in between; it calls nothing itself. Its rules:

1. A call that failed by a fault of the service is made again (`Retry`). What still fails then is
   not narrowed down, for it says nothing about the rows, unless the batch is run `thoroughly`.
2. A batch that fails, and both of whose halves fail, is tried by three of its rows: the first, the
   middle and the last. If these fail, too, it is given up, after six calls: then it is the function
   that fails, not the rows. A batch that is to be run `thoroughly` is isolated to the end.
3. What is closed, or cannot be built again, stops: no further call is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .._collate.collator import Collator
from .._core.request import Batch, Slice
from .._execution.attempts import CallOutcome, Outcomes
from .._execution.memory import drop_locals, is_out_of_memory
from ..errors import BatchSizeMismatch
from ._places import BuildError, PlaceClosed
from ._ray import Ray
from ._retry import Retry
from ._serving import Function

_logger = logging.getLogger("batched")

_FAILURES: Final = 3
"""A batch and its two halves."""

CallArguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass
class WorkerSpec:
    """A step, as its workers need to know it."""

    step: int
    name: str
    func: Callable[..., Any]
    """A batch function, plain or decorated, a coroutine function, or a class to be built for each
    worker (for a coroutine function: once) whose instance is one.
    """
    collator: Collator
    args: tuple[Any, ...] = ()
    """Arguments of the class, or of the function, after the items. So the requests of a batch have
    no arguments of their own, and no owner.
    """
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 1
    """Batches that run at once."""
    processes: bool = False
    engine: Ray | None = None
    """Where it computes; None: here, or in processes."""
    timeout_s: float | None = None
    """Longest time of one call (s), in a process, in an actor or of a coroutine function."""
    retry: Retry = field(default_factory=Retry)
    isolate_errors: bool = True
    models: int = 0
    """Instances that a worker keeps of a class of which one is built for each key; 0: of any other.
    """
    warned: bool = False
    """Whether it was logged that the function returned too few results, or too many."""

    @property
    def function(self) -> Function:
        return Function(self.func, self.name, self.args, self.kwargs, self.models)


@dataclass
class Done:
    """Outcome of a batch."""

    step: int
    batch: Batch | None
    """None if it tells of no batch, but of workers that ended (`fatal`)."""
    slices: list[Slice] = field(default_factory=list)
    results: Sequence[Any] = ()
    """For each slice its result, or the exception in its place."""
    tried: list[int] = field(default_factory=list)
    """For each slice the number of attempts that it was in."""
    seconds: float = 0.0
    """Time from the first call to the end of the last one (s)."""
    calls: int = 0
    """Calls of the function, all of them."""
    alive: bool = False
    """The function has succeeded for a row of it."""
    gave_up: bool = False
    """Not all rows that failed were tried alone: the function fails, rather than they."""
    fatal: BaseException | None = None
    """Why no worker can go on: the function could not be built."""


class BatchRun:
    """One batch in the hands of a worker: the calls and the waits that it takes."""

    def __init__(
        self, spec: WorkerSpec, batch: Batch, thoroughly: bool, is_closing: Callable[[], bool]
    ) -> None:
        self._spec = spec
        self._batch = batch
        self._thorough = thoroughly
        self._may_give_up = not thoroughly
        self._is_closing = is_closing
        self.calls = 0  # of the function
        self._attempts = 0  # calls that the execution asked for
        self._failures = 0  # those that failed, and are narrowed down
        self._too_big = 0  # those that ran out of memory
        self._succeeded = False  # a row that was tried alone
        self._hopeless: BaseException | None = None  # what was raised when it was given up
        self.stopped: BaseException | None = None  # why it is not run any further

    def splits(self, error: BaseException) -> bool:
        """Test of an error: memory ran out, and smaller parts are to be run."""
        return self._broken_off is None and is_out_of_memory(error)

    def isolates(self, error: BaseException) -> bool:
        """Test of an error: halves are to be run."""
        if (
            not self._spec.isolate_errors
            or self._broken_off is not None
            or (not self._thorough and self._spec.retry.is_due(error))
        ):
            return False
        self._failures += 1
        if isinstance(error, BatchSizeMismatch) and not self._spec.warned:
            self._spec.warned = True
            _logger.warning("%s; it is called with fewer items, down to one", error)
        return True

    def attempt(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Generator[CallArguments | float, CallOutcome | None, CallOutcome]:
        """Calls to be made for one attempt of the execution, each of which is sent what it came to,
        and waits in between (s).
        """
        if self._may_give_up and self._failures >= _FAILURES:
            if self._attempts == self._failures + self._too_big:
                yield from self._try_single_rows()
            self._may_give_up = False
        if self._broken_off is not None:
            return None, self._broken_off
        self._attempts += 1
        output, error = yield from self._retried(args, kwargs)
        if error is not None and _is_out_of_memory(error):
            self._too_big += 1
            drop_locals(error)  # before frames of coroutines are above it, which cannot be emptied
        return output, error

    def done(self, outcomes: Outcomes, seconds: float) -> Done:
        """Outcome of the batch, unless it was `stopped`."""
        spec, (slices, results, tried) = self._spec, outcomes
        alive = self._succeeded or not all(map(_is_error, results))
        gave_up = self._hopeless is not None
        return Done(
            spec.step, self._batch, slices, results, [*tried], seconds, self.calls, alive, gave_up
        )

    @property
    def _broken_off(self) -> BaseException | None:
        """Error after which nothing more of the batch is called."""
        return self._hopeless if self.stopped is None else self.stopped

    def _try_single_rows(self) -> Generator[CallArguments | float, CallOutcome | None, None]:
        """Gives the batch up unless one of three rows succeeds."""
        slices, collator = self._batch.slices, self._spec.collator
        failed: BaseException | None = None
        for each in (slices[0], slices[len(slices) // 2], slices[-1]):
            try:
                args, kwargs, context = collator.collate([each], self._batch)
                output, failed = yield from self._retried(args, kwargs)
                if failed is None:
                    (result,) = collator.split(output, [each], context)
                    failed = result if _is_error(result) else None
            except Exception as error:  # of the collator
                failed = error
            if failed is None:
                self._succeeded = True
                return
        self._hopeless = failed

    def _retried(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Generator[CallArguments | float, CallOutcome | None, CallOutcome]:
        attempt = 0
        while True:
            attempt += 1
            if self._is_closing():
                self.stopped = PlaceClosed()
                return None, self.stopped
            self.calls += 1
            outcome = yield args, kwargs
            assert outcome is not None
            output, error = outcome
            if isinstance(error, BuildError):
                self.stopped = error.error
            elif isinstance(error, PlaceClosed):
                self.stopped = error
            retry = self._spec.retry
            if error is None or attempt >= retry.attempts or not retry.is_due(error):
                return output, error
            yield retry.wait(attempt, error)
            del outcome, error


def _is_error(result: object) -> bool:
    return issubclass(type(result), BaseException)  # its `__class__` may be code of the user's


def _is_out_of_memory(error: BaseException) -> bool:
    try:
        return is_out_of_memory(error)
    except Exception:  # of its `__str__`
        return False
