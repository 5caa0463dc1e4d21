"""Drivers of attempts: one calls the batch function, one awaits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._collate.collator import Call, Collator
from .._core.exceptions import trim_traceback
from .._core.scheduler import Batch
from .attempts import Attempts, CallOutcome, ErrorTest, Outcomes, attempts

Prepared = tuple[Attempts, Call | None, Any]
"""Attempts at a batch, the first call to be made, if that is known already, and what tells when its
features have arrived.
"""


def never(_: BaseException) -> bool:
    """Test that no error passes."""
    return False


def is_failure(error: BaseException) -> bool:
    """Whether the function failed, rather than was stopped."""
    return issubclass(type(error), Exception)


def _end(outcomes: Outcomes) -> Attempts:
    """Attempts that are over."""
    return outcomes
    yield


def _all_failed(batch: Batch, error: BaseException) -> Outcomes:
    """Outcomes of a batch for which the function could not be called."""
    batch.fitted = False
    return batch.slices, [trim_traceback(error)] * len(batch.slices), [0] * len(batch.slices)


class Execution:
    """A batch function, its collator, and the errors for which it is called again.

    Of an error, `splits` tells whether to run smaller batches (memory ran out), `isolates` whether
    to run halves, to find the items that fail alone, and `ends_task` whether the awaiting task was
    cancelled, so that there is nobody to answer.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        collator: Collator,
        *,
        splits: ErrorTest = never,
        isolates: ErrorTest = never,
        ends_task: ErrorTest = never,
    ) -> None:
        self._func = func
        self.collator = collator
        self._splits = splits
        self._isolates = isolates
        self._ends_task = ends_task

    def prepare(self, batch: Batch) -> Prepared:
        """`batch` collated, for `run` to go on with. Never raises."""
        steps = attempts(batch, self.collator, self._splits, self._isolates)
        try:
            call = next(steps)
            return steps, call, self.collator.hand_over(call)
        except StopIteration as end:
            return _end(end.value), None, None
        except BaseException as error:  # of the device
            return _end(_all_failed(batch, error)), None, None

    def run(self, batch: Batch, prepared: Prepared | None = None) -> Outcomes:
        """Outcomes of `batch`, by calling the function here. Never raises."""
        if prepared is None:
            steps, call = attempts(batch, self.collator, self._splits, self._isolates), None
        else:
            steps, call, arrivals = prepared
            try:
                if arrivals:
                    self.collator.take_over(call, arrivals)
            except BaseException as error:  # of the device
                return _all_failed(batch, error)
        func, owner = self._func, batch.slices[0][0].owner  # a batch has one owner
        outcome: CallOutcome | None = None
        try:
            call = call or next(steps)
            while True:
                args, kwargs, _ = call
                try:
                    if owner is not None:
                        args = owner, *args
                    outcome = func(*args, **kwargs), None
                except BaseException as raised:
                    outcome = None, trim_traceback(raised)
                del args, kwargs
                call = steps.send(outcome)
                outcome = None  # the next attempt has all memory for itself
        except StopIteration as end:
            del prepared, steps, call, outcome  # an error holds this frame, which must not hold it
            return end.value  # type: ignore[no-any-return]  # of a generator

    async def run_async(self, batch: Batch) -> Outcomes:
        """Outcomes of `batch`, by awaiting the function here. Raises only what ends the task."""
        steps = attempts(batch, self.collator, self._splits, self._isolates)
        func, owner = self._func, batch.slices[0][0].owner
        call: Call | None = None
        outcome: CallOutcome | None = None
        try:
            call = next(steps)
            while True:
                args, kwargs, _ = call
                try:
                    if owner is not None:
                        args = owner, *args
                    outcome = await func(*args, **kwargs), None
                except BaseException as raised:
                    if self._ends_task(raised):
                        raise
                    outcome = None, trim_traceback(raised)
                del args, kwargs
                call = steps.send(outcome)
                outcome = None
        except StopIteration as end:
            del steps, call, outcome
            return end.value  # type: ignore[no-any-return]  # of a generator
