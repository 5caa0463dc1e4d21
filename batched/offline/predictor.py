"""Predictor: a step without a run, for pipelines of other libraries that hand over rows.

It drives the step's stage as the coordinator of a run does, in the thread that calls: the same
batches, splits, retries and verdicts. Nothing is committed.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import RunStopped
from .engines import Outcome
from .engines.threads import CallerEngine
from .failures import error_text
from .run.plan import spec_of
from .run.stage import Stage
from .run.verdicts import Row
from .step import Step


class Predictor:
    """A step that is ready to compute: its class is built here, once.

    Rows of one call run together, one batch after another, in the thread that calls; calls from
    several threads wait for each other. The batch size that fits memory is kept from call to call.

    Raises:
        ValueError: the step has a setting that only a run can follow.
        Exception: the class could not be built.
    """

    def __init__(self, step: Step) -> None:
        for name in ("workers", "processes", "timeout_s", "num_cpus", "num_gpus", "where"):
            if getattr(step, name):
                raise ValueError(
                    f"step {step.name!r}: {name} is for runs; a predictor computes one batch at a "
                    "time in the thread that calls it"
                )
        self._step = replace(step, workers=1)
        self._outcomes: list[Outcome] = []
        self._engine = CallerEngine(spec_of(0, self._step), self._outcomes.append)
        weakref.finalize(self, self._engine.close, 0.0)
        self._lock = threading.Lock()  # held while rows are computed
        self._engine.start()
        self._stage = Stage(0, self._step, self._engine)

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> list[Any | BaseException]:
        """Return the result of each row, or the exception in its place.

        Raises:
            RunStopped: nothing succeeds any more: the function is broken, or its service is away.
        """
        with self._lock:
            results: dict[int, Any] = {}
            try:
                self._compute(
                    [Row(number, (), dict(row), number) for number, row in enumerate(rows)], results
                )
            except BaseException:
                before = self._stage.verdicts  # rows wait in the old stage
                self._stage = Stage(0, self._step, self._engine)
                self._stage.verdicts.sample = before.sample
                self._stage.verdicts.failed_alone = before.failed_alone
                raise
            return [results[number] for number in range(len(rows))]

    def _compute(self, rows: Sequence[Row], results: dict[int, Any]) -> None:
        """Fill in the result of each row, or its error."""
        stage, verdicts = self._stage, self._stage.verdicts

        def end(row: Row, result: Any) -> None:
            results[row.number] = result
            failed = isinstance(result, BaseException)
            stage.note_ended(ok=not failed, failed=failed)

        stage.enter(rows, time.perf_counter())
        while stage.open:
            now = time.perf_counter()
            if unprepared := stage.take_unprepared(len(rows)):
                stage.admit(*stage.transform.prepare(unprepared), now)
            stage.dispatch(now, drain=True)
            outcomes, self._outcomes[:] = self._outcomes[:], []
            dead = stage.take_dead()
            for outcome in outcomes:
                good, failed = stage.transform.finish(stage.end(outcome, time.perf_counter()))
                for row, result in good:
                    end(row, result)
                    if verdicts.sample is None:
                        verdicts.sample = row.copy()
                dead += failed
            for row, _, error in dead:
                end(row, error)
            if verdicts.stopped is not None:
                why, error = verdicts.stopped
                raise RunStopped(
                    f"step {self._step.name!r} {why}; the last error: {error_text(error).error}"
                ) from error
            if not (outcomes or dead):
                time.sleep(max(0.0, min(1.0, verdicts.next_moment() - time.perf_counter())))
