"""Runs of a function that works in steps: its calls until every row has an outcome.

1. The function is called with `Rows`. Calls join until no row is live and no call may join.
2. An error that the function raises is the outcome of every live row. Then the function is called
   again for the rows that have not joined.
3. If memory has run out with several rows, the live rows run again from their start, and fewer of
   them at once. A row that has emitted pieces to a reader never runs again, and gets the error.
4. A function that returns while rows are live, or without rows, has failed.

For the scheduler each row is a batch of one item, which ends with the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._collate.collator import refuse_unawaited
from .._core.capacity import Capacity
from .._core.request import Batch
from .._execution.attempts import ErrorTest, Outcomes, finish_now, passes
from .._execution.exceptions import trim_traceback
from .._execution.execution import Execution
from .._execution.memory import release_memory
from ..errors import BatchFunctionError
from .rows import AnyRow, Rows, Source
from .source import CallSource

Function = Callable[[Rows[Any, Any, Any]], Any]
"""The user's function, with its extra arguments."""
NOTHING: Outcomes = ([], [], [])
"""Outcomes of a run: its rows have been answered one by one."""


@dataclass(frozen=True, kw_only=True)
class StepExecution(Execution):
    """A function that works in steps."""

    in_steps = True
    capacity: Capacity
    """Rows that may be live at once."""

    def run(self, batch: Batch, runtime: Any = None, /) -> Outcomes:
        """Run `batch`, and all calls that join it, in this thread. Never raise."""
        source = CallSource(runtime, batch, self.capacity)
        finish_now(run_steps(self._function(batch), source, runtime.name, self.splits))
        return NOTHING

    async def run_async(self, batch: Batch, runtime: Any = None, /) -> Outcomes:
        """Run `batch`, and all calls that join it, in this task.

        Raise only an error that ends the task.
        """
        source, func = CallSource(runtime, batch, self.capacity), self._function(batch)
        await run_steps(func, source, runtime.name, self.splits, self.ends_task)
        return NOTHING

    def _function(self, batch: Batch) -> Function:
        """Return the function with its instance and the extra arguments of a batch."""
        request, func = batch.slices[0][0], self.func
        group: Any = request.group_key  # its `Arguments`
        args, kwargs = group.unpack()
        first = () if request.owner is None else (request.owner,)
        return lambda rows: func(*first, rows, *args, **kwargs)


async def run_steps(
    func: Function,
    source: Source,
    name: str,
    splits: ErrorTest,
    ends_task: ErrorTest | None = None,
) -> None:
    """Call `func` until every row has an outcome. `name` is for messages.

    It never suspends for a plain function. A coroutine function has `ends_task`, which selects the
    errors that cancel the awaiting task. Raise only these, and errors that `source.fail` raises.
    """
    while source.again:
        rows: Rows[Any, Any, Any] = Rows(source)
        error: BaseException | None = None
        try:
            output = func(rows)
            if ends_task is not None:
                await output
            else:
                refuse_unawaited(f"{name} returned", output)
        except BaseException as raised:
            if ends_task is not None and ends_task(raised):
                raise
            error = trim_traceback(raised)
        live, error = _end_call(rows, source, name, error, splits)
        source.fail(live, error)
        del rows, live, error  # an error holds frames, which must not hold the rows


def _end_call(
    rows: Rows[Any, Any, Any],
    source: Source,
    name: str,
    error: BaseException | None,
    splits: ErrorTest,
) -> tuple[list[AnyRow], BaseException | None]:
    """Let rows of a call that has ended run again if they may.

    Return the other rows without an outcome, and their error.
    """
    size, longest, began = len(rows), rows.longest, rows.began
    live = rows.close()
    if error is not None and passes(splits, error):
        release_memory(error)
        if size > 1:
            source.capacity.too_big(size, longest)
            source.too_big(size)
            source.again.extendleft([row for row in reversed(live) if not row.emitted])
            live = [row for row in live if row.emitted]
            error = error if live else None
    if not began:
        live = [*source.again]
        source.again.clear()
    if error is None and live:
        error = BatchFunctionError(
            f"{name} returned and left {len(live)} rows without an outcome; it must join rows "
            "while `rows` is true, and call finish or fail for each row"
        )
    return live, error
