"""Rows of a function that works in steps, from the calls of a runtime."""

from __future__ import annotations

import sys
from collections import Counter, deque
from typing import Any

from .._core.request import Batch, Slice
from .._execution.attempts import Outcomes
from .._execution.rows import AnyRow, Row
from .._execution.steps import run_steps, run_steps_async, take_rows
from .runtime import Runtime
from .waits import WorkerContext
from .wakers import logger, wake_all

NOTHING: Outcomes = ([], [], [])
"""Outcomes of a run: its rows have been answered one by one."""


class CallSource:
    """Rows of one run: the calls of a first batch, and calls that join them later.

    Calls that join together are a batch, which ends with the last of them.
    """

    def __init__(self, runtime: Runtime, first: Batch, worker: WorkerContext) -> None:
        request = first.slices[0][0]
        self.told: list[Any] = []
        self._runtime = runtime
        self._scheduler = runtime._scheduler
        self._key = request.group_key
        self._open: dict[Batch, int] = {}  # rows without an outcome
        self._errors: Counter[Batch] = Counter()  # calls that have failed
        self._outcomes: dict[Batch, list[tuple[Slice, Any]]] = {}  # for the observer
        self._largest = 0, 0  # most rows that ran at once, and the length of the longest
        self.again = deque(self._rows_of(first))
        worker.batch = self

    @property
    def slices(self) -> list[Slice]:
        """Slices of all batches that have not ended."""
        return [piece for batch in [*self._open] for piece in batch.slices]

    def take(self, live: list[AnyRow], most: int | None) -> list[Any]:
        """Return rows that may join the `live` rows now."""
        rows = take_rows(self.again, live, most, self._scheduler.capacity)
        if not self.again and (most is None or len(rows) < most):
            before = [*live, *rows]
            longest = max([row.length for row in before], default=0)
            room = sys.maxsize if most is None else most - len(rows)
            batch = self._runtime.join(self._scheduler, self._key, (len(before), longest, room))
            if batch is not None:
                rows += self._rows_of(batch)
        if rows:
            count = len(live) + len(rows)
            longest = max([row.length for row in (*live, *rows)])
            self._largest = max(self._largest, (count, longest))
        return rows

    def end(self, row: AnyRow, outcome: Any) -> None:
        """Answer the caller of a row."""
        batch = self._batch_of(row)
        piece = row.request, row.position, row.position + 1
        collator, failed = self._runtime.execution.collator, isinstance(outcome, BaseException)
        part = outcome if failed else collator.split([outcome], [piece], None)[0]
        row.ended = True
        if self._runtime.observer is not None:
            self._outcomes.setdefault(batch, []).append((piece, part))
        self._runtime.recorder.row_ended("failed" if failed else "finished")
        try:
            self._errors[batch] += self._runtime.answer(batch, piece, part)
        finally:
            self._left(batch)

    def fail(self, rows: list[AnyRow], error: BaseException | None) -> None:
        """Answer the callers of rows with an error, or log the error if there are none."""
        if error is not None and not rows:
            message = "%s raised after all of its rows had ended"
            logger.error(message, self._runtime.name, exc_info=error)
        for row in rows:
            self.end(row, error)
        self.stepped(0)

    def leave(self, row: AnyRow) -> None:
        """Note that a row leaves because its caller has gone."""
        batch = self._batch_of(row)
        self._runtime.leave(batch)
        self._runtime.recorder.row_ended("given up")
        self._left(batch)

    def stepped(self, live: int) -> None:
        """Count a step of `live` rows, and wake the readers of streams."""
        if live:
            self._runtime.recorder.stepped(live, self._runtime.policy.batch_size)
        if self.told:
            told, self.told = self.told, []
            wake_all([waker for pieces in told for waker in pieces.take_wakers()])

    def too_big(self, rows: int, longest: int) -> None:
        """Note that `rows` rows ran out of memory."""
        self._largest = 0, 0
        self._runtime.too_big(rows, longest)

    def _batch_of(self, row: AnyRow) -> Batch:
        assert row.batch is not None
        return row.batch

    def _rows_of(self, batch: Batch) -> list[AnyRow]:
        self._open[batch] = batch.size
        return [
            Row(self, batch, request, position)
            for request, start, stop in batch.slices
            for position in range(start, stop)
        ]

    def _left(self, batch: Batch) -> None:
        self._open[batch] -= 1
        if not self._open[batch]:
            del self._open[batch]
            pairs = self._outcomes.pop(batch, [])
            slices, parts = [piece for piece, _ in pairs], [part for _, part in pairs]
            largest, self._largest = self._largest, (0, 0)
            errors = self._errors.pop(batch, 0)
            self._runtime.end(batch, errors, largest, (slices, parts, [1] * len(slices)))


def _function(runtime: Runtime, batch: Batch) -> Any:
    """Return the function with its instance and the extra arguments of a batch."""
    request, group = batch.slices[0][0], batch.slices[0][0].group_key
    args, kwargs = group.unpack()  # type: ignore[attr-defined]  # its `Arguments`
    func, owner = runtime.execution.func, request.owner

    def call(rows: Any) -> Any:
        return func(rows, *args, **kwargs) if owner is None else func(owner, rows, *args, **kwargs)

    return call


def run_rows(runtime: Runtime, batch: Batch, worker: WorkerContext) -> Outcomes:
    """Run `batch`, and all calls that join it, in this thread. Never raise."""
    source, splits = CallSource(runtime, batch, worker), runtime.execution.splits
    run_steps(_function(runtime, batch), source, runtime.name, splits)
    return NOTHING


async def run_rows_async(runtime: Runtime, batch: Batch, worker: WorkerContext) -> Outcomes:
    """Run `batch`, and all calls that join it, in this task.

    Raise only an error that ends the task.
    """
    source, execution = CallSource(runtime, batch, worker), runtime.execution
    call = _function(runtime, batch)
    await run_steps_async(call, source, runtime.name, execution.splits, execution.ends_task)
    return NOTHING
