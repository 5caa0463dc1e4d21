"""Rows of a run, from the calls of a runtime."""

from __future__ import annotations

from collections import deque
from typing import Any

from .._core.capacity import Capacity, Room
from .._core.request import Batch
from .._runtime.wakers import logger, wake_all
from .rows import AnyRow, Row


class CallSource:
    """Rows of one run: the call of a first batch, and calls that join it later."""

    def __init__(self, runtime: Any, first: Batch, capacity: Capacity) -> None:
        self.capacity = capacity
        self.again: deque[AnyRow] = deque([Row(self, first)])
        self.readers: list[Any] = []
        self._runtime = runtime
        self._key = first.slices[0][0].group_key
        self._scheduler = runtime._scheduler  # of a queue that may be reset meanwhile

    def join(self, room: Room) -> list[AnyRow]:
        """Return rows of calls that join now."""
        if not self._scheduler.waiting:
            return []
        return [Row(self, each) for each in self._runtime.join(self._scheduler, self._key, room)]

    def end(self, row: AnyRow, outcome: Any) -> None:
        """Answer the caller of a row, if it waits."""
        runtime, request, batch = self._runtime, row.request, row.batch
        failed = isinstance(outcome, BaseException)
        ending = "given up" if request.waker is None else "failed" if failed else "finished"
        runtime.recorder.count(ending)
        batch.attempts, batch.fitted = 1, False  # other rows ran with it
        part = [outcome] if request.listed and not failed else outcome
        runtime.finish(batch, (batch.slices, (part,), (1,)))

    def fail(self, rows: list[AnyRow], error: BaseException | None) -> None:
        """Answer the callers of rows with an error, or log the error if there are none."""
        if error is not None and not rows:
            message = "%s raised after all of its rows had ended"
            logger.error(message, self._runtime.name, exc_info=error)
        for row in rows:
            row.ended = True
            self.end(row, error)
        self.stepped(0)

    def stepped(self, live: int) -> None:
        """Count a step of `live` rows, and wake the readers of streams."""
        if live:
            counts = {"steps": 1, "live_rows": live, "places": self.capacity.batch_size}
            self._runtime.recorder.add(counts)
        if self.readers:
            readers, self.readers = self.readers, []
            wake_all([waker for pieces in readers for waker in pieces.take_wakers()])

    def too_big(self, rows: int) -> None:
        """Note that `rows` rows ran out of memory."""
        self._runtime.recorder.count("memory_errors")
        message = f"{rows} rows ran out of memory, and run in smaller parts"
        self._runtime.notices.add("memory", message)
