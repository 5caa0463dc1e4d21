"""Calls of the function for a batch: the first one, and further ones if it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from .._collate.collator import Collator
from .._core.scheduler import Batch
from .attempts import ErrorTest, Outcomes, attempts, finish_now
from .exceptions import trim_traceback


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

    The first call of a plain function is made without the coroutine `attempts`: nearly all batches
    need no other call.
    """

    in_steps: ClassVar[bool] = False
    """Whether the function takes rows, and works in steps."""

    func: Callable[..., Any]
    collator: Collator
    splits: ErrorTest = never
    isolates: ErrorTest = never
    ends_task: ErrorTest = never

    def run(self, batch: Batch, _: Any = None, /) -> Outcomes:
        """Call the function for `batch` here, and return the outcomes. Never raise."""
        slices, collator, func = batch.slices, self.collator, self._function(batch)
        args = kwargs = output = context = None
        try:
            args, kwargs, context = collator.collate(slices, batch)
            batch.attempts = 1
            output = func(*args, **kwargs)
            return slices, collator.split(output, slices, context), [1] * len(slices)
        except BaseException as raised:
            failure = trim_traceback(raised)
        # the next attempt needs the memory, and an error holds this frame, which must not hold it
        del args, kwargs, output, context
        further = attempts(func, batch, collator, self.splits, self.isolates, None, failure)
        del failure
        return finish_now(further)

    async def run_async(self, batch: Batch, _: Any = None, /) -> Outcomes:
        """Await the function for `batch` here, and return the outcomes.

        Raise only an error that ends the task.
        """
        return await attempts(
            self._function(batch),
            batch,
            self.collator,
            self.splits,
            self.isolates,
            self.ends_task,
        )

    def _function(self, batch: Batch) -> Callable[..., Any]:
        owner = batch.slices[0][0].owner  # a batch has one owner
        return self.func if owner is None else partial(self.func, owner)
