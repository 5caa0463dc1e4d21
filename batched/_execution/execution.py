"""Calls of the function for a batch: the first one, and further ones if it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .._collate.collator import Call, Collator
from .._core.scheduler import Batch
from .attempts import ErrorTest, Outcomes, attempts
from .exceptions import trim_traceback

Prepared = tuple[Call | BaseException, Any]
"""The first call for a batch, or the error of collating it, and a mark of when its features have
arrived on the device.
"""


def never(_: BaseException) -> bool:
    """Return False for any error."""
    return False


def is_failure(error: BaseException) -> bool:
    """Return whether the function failed, rather than was stopped."""
    return issubclass(type(error), Exception)


@dataclass(frozen=True)
class Execution:
    """A batch function, its collator, and the errors after which the function is called again.

    `splits` selects the errors after which smaller batches are run (memory ran out). `isolates`
    selects the errors after which halves are run, to find the items that fail alone. `ends_task`
    selects the errors that cancel the awaiting task, so that no caller is left to answer.

    The first call of a batch is made without the coroutine `attempts`: nearly all batches need no
    other call.
    """

    func: Callable[..., Any]
    collator: Collator
    splits: ErrorTest = never
    isolates: ErrorTest = never
    ends_task: ErrorTest = never
    in_steps: bool = False
    """Whether the function takes rows, and works in steps."""

    def prepare(self, batch: Batch) -> Prepared:
        """Return `batch` collated, for `run` to go on with. Never raise."""
        try:
            call = self.collator.collate(batch.slices, batch)
            return call, self.collator.hand_over(call)
        except BaseException as raised:
            return trim_traceback(raised), None

    def run(self, batch: Batch, prepared: Prepared | None = None) -> Outcomes:
        """Call the function for `batch` here, and return the outcomes. Never raise."""
        slices, collator = batch.slices, self.collator
        owner = slices[0][0].owner  # a batch has one owner
        func = self.func if owner is None else partial(self.func, owner)
        call: Any = None
        args: Any = None
        kwargs: Any = None
        output: Any = None
        try:
            if prepared is None:
                args, kwargs, context = collator.collate(slices, batch)
            else:
                call, arrivals = prepared
                if type(call) is not tuple:
                    raise call
                if arrivals:
                    collator.take_over(call, arrivals)
                args, kwargs, context = call
            batch.attempts = 1
            output = func(*args, **kwargs)
            return slices, collator.split(output, slices, context), [1] * len(slices)
        except BaseException as raised:
            failure = trim_traceback(raised)
        # the next attempt needs the memory, and an error holds this frame, which must not hold it
        args = kwargs = output = context = call = prepared = None
        further = attempts(func, batch, collator, failure, self.splits, self.isolates)
        del failure
        try:
            while True:
                further.send(None)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # of a coroutine

    async def run_async(self, batch: Batch) -> Outcomes:
        """Await the function for `batch` here, and return the outcomes.

        Raise only an error that ends the task.
        """
        slices, collator = batch.slices, self.collator
        owner = slices[0][0].owner  # a batch has one owner
        func = self.func if owner is None else partial(self.func, owner)
        args: Any = None
        kwargs: Any = None
        output: Any = None
        try:
            args, kwargs, context = collator.collate(slices, batch)
            batch.attempts = 1
            output = await func(*args, **kwargs)
            return slices, collator.split(output, slices, context), [1] * len(slices)
        except BaseException as raised:
            if self.ends_task(raised):
                raise
            failure = trim_traceback(raised)
        args = kwargs = output = context = None
        further = attempts(
            func, batch, collator, failure, self.splits, self.isolates, self.ends_task
        )
        del failure
        return await further
