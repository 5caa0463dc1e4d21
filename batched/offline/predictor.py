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
from .run.stage import Result, Stage
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
            stage = self._stage
            try:
                return self._compute(
                    stage, [Row(n, (), dict(row), n) for n, row in enumerate(rows)]
                )
            except BaseException:  # rows wait in the old stage
                self._stage = Stage(0, self._step, self._engine)
                self._stage.verdicts.sample = stage.verdicts.sample
                self._stage.verdicts.failed_alone = stage.verdicts.failed_alone
                raise

    def _compute(self, stage: Stage, rows: Sequence[Row]) -> list[Any]:
        """Return the result of each row, or its error."""
        verdicts = stage.verdicts
        results: dict[int, Any] = {}
        prepared = stage.enter(rows)
        while stage.open:
            if unprepared := stage.take_unprepared(len(rows)):
                prepared = stage.prepare(unprepared)
            ended: list[Result] = []
            now = time.perf_counter()
            if prepared is not None:
                stage.admit(prepared, now)
                ended += prepared.failed
            stage.dispatch(now, drain=True)
            prepared = stage.queue(due) if (due := verdicts.take_due(now)) else None
            outcomes, self._outcomes[:] = self._outcomes[:], []
            for outcome in outcomes:
                ended += stage.finish(stage.end(outcome, time.perf_counter()))
            ended += [(failure.row, failure.error) for failure in verdicts.take_dead()]
            for row, result in ended:
                results[row.number] = result
                failed = isinstance(result, BaseException)
                stage.note_ended(ok=not failed, failed=failed)
                if not failed:
                    verdicts.sample = verdicts.sample or row.copy()
            if verdicts.stopped is not None:
                why, error = verdicts.stopped
                raise RunStopped(
                    f"step {self._step.name!r} {why}; the last error: {error_text(error).error}"
                ) from error
            if not (ended or outcomes or due):
                time.sleep(max(0.0, min(1.0, verdicts.next_moment() - time.perf_counter())))
        return [results[number] for number in range(len(rows))]
