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

from .engines import Outcome
from .engines.threads import CallerEngine
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
        self._engine = CallerEngine(self._step, self._outcomes.append)
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
        stage.enter(rows, time.perf_counter())
        while stage.open:
            now = time.perf_counter()
            if unprepared := stage.take_unprepared(len(rows)):
                stage.admit(*stage.transform.prepare(unprepared), now)
            stage.dispatch(now, drain=True)
            outcomes, self._outcomes[:] = self._outcomes[:], []
            ended: list[Row] = []
            dead = stage.take_dead()
            for outcome in outcomes:
                good, failed = stage.transform.finish(stage.end(outcome, time.perf_counter()))
                ended += good
                dead += failed
            if ended:
                verdicts.sample = verdicts.sample or ended[0].copy()
            results.update((row.number, row.result) for row in ended)
            results.update((row.number, error) for row, _, error in dead)
            stage.note_ended(ok=len(ended), failed=len(dead))
            stage.check()
            if not (outcomes or dead):
                time.sleep(max(0.0, min(1.0, verdicts.next_moment() - time.perf_counter())))
        return [results[number] for number in range(len(rows))]
