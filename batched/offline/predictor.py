"""Predictor: a step without a run, for pipelines of other libraries that hand over rows.

It drives the room of the step as a run does, in the thread that calls: the same batches, splits,
retries and verdicts. Nothing is committed.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .engines import engine_for
from .run.failures import Row
from .run.room import Room
from .step import Step


class Predictor:
    """A step that is ready to compute: its class is built here, once.

    Rows of one call run together, one batch after another; calls from several threads wait for each
    other. The batch size that fits memory is kept from call to call.

    Raises:
        ValueError: the step has a setting that only a run can follow.
        Exception: the class could not be built.
    """

    def __init__(self, step: Step) -> None:
        check_step(step)
        self._step = replace(step, workers=1)
        self._inbox = queue.SimpleQueue[Callable[[], object]]()
        self._engine = engine_for(self._step, _ignore)
        weakref.finalize(self, self._engine.close)
        self._lock = threading.Lock()  # held while rows are computed
        self._engine.build()
        self._room = Room(0, self._engine, self._inbox.put, None)

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> list[Any | BaseException]:
        """Return the result of each row, or the exception in its place.

        Raises:
            RunStopped: nothing succeeds any more: the function is broken, or its service is away.
        """
        with self._lock:
            try:
                return self._compute([Row(n, (), dict(row), n) for n, row in enumerate(rows)])
            except BaseException:  # rows are left in the room, or on their way to it
                before = self._room.failures
                self._inbox = queue.SimpleQueue()
                self._room = Room(0, self._engine, self._inbox.put, None)
                after = self._room.failures
                after.probe, after.failed = before.probe, before.failed
                raise

    def _compute(self, rows: Sequence[Row]) -> list[Any]:
        """Return the result of each row, or its error."""
        room = self._room
        results: dict[int, Any] = {}
        room.enter(rows)
        while room.open:
            moment = room.feed(time.perf_counter(), more=False, stuck=False)
            done, room.done = room.done, []
            dead, room.failures.dead = room.failures.dead, []
            results.update((row.number, row.result) for row in done)
            results.update((row.number, error) for row, _, error in dead)
            if done and room.failures.probe is None:
                room.failures.probe = done[0].next()
            room.note_ended(ok=len(done), failed=len(dead))
            room.check()
            if room.open and not done and not dead:
                wait = max(0.0, min(1.0, moment - time.perf_counter()))
                try:
                    self._inbox.get(timeout=wait)()
                except queue.Empty:
                    pass
        return [results[number] for number in range(len(rows))]


def check_step(step: Step) -> None:
    """Raise a ValueError if a step has a setting that only a run can follow."""
    for name in ("workers", "processes", "timeout_s", "num_cpus", "num_gpus", "where"):
        if getattr(step, name):
            raise ValueError(
                f"step {step.name!r}: {name} is for runs; a predictor computes one batch at a time"
            )


def _ignore(_: BaseException) -> None:
    """Ignore that a worker cannot be built: `Engine.build` has raised its error."""
