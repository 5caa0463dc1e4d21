"""Runs of a function that works in steps: its calls until every row has an outcome.

1. The function is called with `Rows`. Calls join until no row is live and no call may join.
2. An error that the function raises is the outcome of every live row. Then the function is called
   again for the rows that have not joined.
3. If memory has run out with several rows, the live rows run again from their start, and fewer of
   them at once. A row that has emitted pieces to a reader never runs again, and gets the error.
4. A function that returns while rows are live, or without rows, has failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from .._collate.collator import UNAWAITED, is_unawaited
from .._collate.items import owned
from .._core.capacity import Capacity
from .._core.request import Request
from ..errors import BatchFunctionError
from .attempts import ErrorTest, passes
from .exceptions import trim_traceback
from .memory import drop_locals, free_cache
from .rows import AnyRow, Row, Rows, Source

Function = Callable[[Rows[Any, Any, Any]], Any]
"""The function of the user, with its extra arguments."""


class RunSource(Source, Protocol):
    """Source of a run. Its rows may run again."""

    again: deque[AnyRow]
    """Rows that were taken and do not run now: the next rows that `take` returns."""

    def fail(self, rows: list[AnyRow], error: BaseException | None, /) -> None:
        """Note the end of a call of the function: `rows` have no outcome because of `error`."""

    def too_big(self, rows: int, longest: int, /) -> None:
        """Note that `rows` rows, none longer than `longest`, ran out of memory."""


def run_steps(func: Function, source: RunSource, name: str, splits: ErrorTest) -> None:
    """Call `func` until every row has an outcome. `name` is for messages.

    Raise only an error that `source.fail` raises.
    """
    while source.again:
        rows: Rows[Any, Any, Any] = Rows(source)
        try:
            _check_output(name, func(rows))
            error: BaseException | None = None
        except BaseException as raised:
            error = trim_traceback(raised)
        live, error = _end_call(rows, source, name, error, splits)
        source.fail(live, error)
        del rows, live, error  # an error holds frames, which must not hold the rows


async def run_steps_async(
    func: Function, source: RunSource, name: str, splits: ErrorTest, ends_task: ErrorTest
) -> None:
    """Await `func` as `run_steps` calls it. Raise also an error that ends the task."""
    while source.again:
        rows: Rows[Any, Any, Any] = Rows(source)
        try:
            await func(rows)
            error: BaseException | None = None
        except BaseException as raised:
            if ends_task(raised):
                raise
            error = trim_traceback(raised)
        live, error = _end_call(rows, source, name, error, splits)
        source.fail(live, error)
        del rows, live, error


def _check_output(name: str, output: Any) -> None:
    if is_unawaited(output):
        raise BatchFunctionError(f"{name} returned {UNAWAITED}")


def _end_call(
    rows: Rows[Any, Any, Any],
    source: RunSource,
    name: str,
    error: BaseException | None,
    splits: ErrorTest,
) -> tuple[list[AnyRow], BaseException | None]:
    """Let rows of a call that has ended run again if they may.

    Return the other rows without an outcome, and their error.
    """
    size, began = len(rows), rows.began
    longest = max([row.length for row in rows], default=0)
    live, taken = rows.close()
    source.again.extendleft(reversed(taken))
    if error is not None and passes(splits, error):
        drop_locals(error)
        with suppress(BaseException):  # a user's module may be named torch
            free_cache()
        if size > 1:
            source.too_big(size, longest)
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


class ListSource:
    """Rows of a list of items, without callers. `results` has the outcomes in their order.

    A failed row has its exception there. An error that the function raises is raised.
    """

    def __init__(self, items: Sequence[Any], capacity: Capacity, lengths: list[int] | None) -> None:
        request = Request([*items], len(items), None, waker=self, listed=True, lengths=lengths)
        self.results: list[Any] = [None] * len(items)
        self.told: list[Any] = []
        self.again: deque[AnyRow] = deque(
            [Row(self, None, request, place) for place in range(len(items))]
        )
        self._capacity = capacity

    def take(self, live: list[AnyRow], most: int | None) -> list[Any]:
        """Return rows that may join the `live` rows now."""
        return take_rows(self.again, live, most, self._capacity)

    def end(self, row: AnyRow, outcome: Any) -> None:
        """Keep the outcome of a row."""
        self.results[row.position] = owned(outcome)
        row.ended = True

    def fail(self, rows: list[AnyRow], error: BaseException | None) -> None:
        """Raise the error of a call that has left rows without an outcome."""
        try:
            if rows and error is not None:
                raise error
        finally:
            del rows, error  # the traceback holds this frame

    def leave(self, _: AnyRow) -> None:
        """Do nothing: the rows have no callers that go."""

    def stepped(self, _: int) -> None:
        """Do nothing: steps are not counted."""

    def too_big(self, rows: int, longest: int) -> None:
        """Let fewer rows run at once."""
        self._capacity.too_big(rows, longest)


def take_rows(
    waiting: deque[AnyRow], live: Sequence[AnyRow], most: int | None, capacity: Capacity
) -> list[AnyRow]:
    """Remove and return the first of the `waiting` rows, as many as fit with the `live` rows."""
    taken: list[AnyRow] = []
    longest = max([row.length for row in live], default=0)
    while waiting and (most is None or len(taken) < most):
        longest = max(longest, waiting[0].length)
        if len(live) + len(taken) >= capacity.max_items(longest):
            break
        taken.append(waiting.popleft())
    return taken
