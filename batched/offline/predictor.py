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
from contextlib import suppress
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
        self._engine = engine_for(replace(step, workers=1), _ignore)
        weakref.finalize(self, self._engine.close)
        self._lock = threading.Lock()  # held while rows are computed
        self._engine.build()
        # a row that has worked, and rows that have failed since the last success, and outside
        self._known: tuple[Row | None, int, int] = None, 0, 0

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> list[Any | BaseException]:
        """Return the result of each row, or the exception in its place.

        Raises:
            RunStopped: nothing succeeds any more: the function is broken, or its service is away.
        """
        inbox = queue.SimpleQueue[Callable[[], object]]()
        room = Room(0, self._engine, inbox.put, None)
        failures = room.failures
        results: dict[int, Any] = {}
        outside: list[BaseException | str] = []  # errors of rows that failed outside the function
        worked = False
        room.enter([Row(number, (), dict(row), number) for number, row in enumerate(rows)])
        with self._lock:
            failures.probe, failures.failed, failures.outside = self._known
            try:
                while room.open:
                    moment = room.feed(time.perf_counter(), more=False, stuck=False)
                    done, room.done = room.done, []
                    dead, failures.dead = failures.dead, []
                    results.update((row.number, row.result) for row in done)
                    results.update((row.number, error) for row, _, error in dead)
                    if done and failures.probe is None:
                        failures.probe = done[0].next()
                    room.note_ended(ok=len(done), failed=len(dead))
                    worked |= bool(done)
                    outside += [error for _, phase, error in dead if phase != "inference"]
                    room.check()
                    if room.open and not done and not dead:
                        wait = max(0.0, min(1.0, moment - time.perf_counter()))
                        with suppress(queue.Empty):
                            inbox.get(timeout=wait)()
                if outside or worked:
                    failures.note_outside(outside, worked=worked)
                room.check()
            finally:
                self._known = failures.probe, failures.failed, failures.outside
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
