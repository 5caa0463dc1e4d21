"""Predictor: a step without a run, for pipelines of others that hand over rows and want them back.

It drives the step's stage as the coordinator of a run does, in the thread that calls: the same
batches, splits, retries and narrowing down. Its rules, where a run would hold rows back or commit:

1. Rows of a batch that was given up are tried again, each until it has succeeded or failed alone.
   So are those that failed by a fault of the service, if others of the same call succeeded.
2. After `MOST_FAILURES` batches in a row of which nothing succeeded, a row that is known to be good
   is tried. If it fails, too, or there is none yet, an error is raised: the function is broken, and
   what it fails for says nothing about the rows. So it is for each later batch that fails, until
   one succeeds.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from .._core.request import Batch
from ..errors import RunStopped
from ._batch_run import BatchRun, Done, WorkerSpec
from ._columns import Columns
from ._errors import describe
from ._keys import Key
from ._pipeline import _worker_spec
from ._places import BuildError, Here
from ._stage import MOST_FAILURES, Row, Stage
from ._step import Step
from ._worker import Workers, driver


class Predictor:
    """A step that is ready to compute: its class is built here, once.

    Rows of one call run together, one batch after another, in the thread that calls; calls from
    several threads wait for each other. What memory allows is remembered from call to call.

    Raises:
        ValueError: the step has a setting that only a run can follow.
        Exception: the class could not be built.
    """

    def __init__(self, step: Step) -> None:
        for name in ("workers", "processes", "timeout_s", "num_cpus", "num_gpus"):
            if getattr(step, name):
                raise ValueError(
                    f"step {step.name!r}: {name} is for runs; a predictor computes one batch at a "
                    "time in the thread that calls it"
                )
        self._step = replace(step, workers=1)
        self._caller = _Caller(_worker_spec(0, self._step, None))
        weakref.finalize(self, self._caller.close, 0)
        self._lock = threading.Lock()  # held while rows are computed
        self._stage = self._new_stage()
        try:
            self._caller.start()
        except BuildError as error:
            failed = error.error
        else:
            return
        raise failed

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> list[Any | BaseException]:
        """The result of each row, or the exception in its place.

        Raises:
            RunStopped: one batch after another failed as a whole.
        """
        with self._lock:
            results: dict[Key, Any] = {}
            todo = [Row(number, (), dict(row), False) for number, row in enumerate(rows)]
            try:
                again = self._compute(todo, results)
                self._compute(again, results)
            except BaseException:
                before, self._stage = self._stage, self._new_stage()  # rows wait in the old one
                self._stage.failures, self._stage.sample = before.failures, before.sample
                raise
            return [results[number] for number in range(len(rows))]

    def _compute(self, rows: Sequence[Row], results: dict[Key, Any]) -> list[Row]:
        """Fills in what becomes of `rows`, and returns those that are to be tried again."""
        stage, retry = self._stage, self._step.retry
        requests, failed = stage.prepare(rows)
        results.update((row.key, error) for row, error in failed)
        for request in requests:
            stage.scheduler.submit(request, time.perf_counter())
        given_up: list[Row] = []
        unanswered: list[Row] = []
        succeeded = False
        while (batch := stage.take(time.perf_counter(), drain=True)) is not None:
            stage.submit(batch)
            done = self._caller.take_done()
            stage.note_end(done, time.perf_counter())
            succeeded = succeeded or done.alive
            last: BaseException | None = None
            for (request, _, _), output in zip(done.slices, done.results, strict=True):
                row: Row = request.waker
                if not isinstance(output, BaseException):
                    stage.sample = stage.sample or row
                    output = _finished(stage, output)
                else:
                    last = output
                    if not row.thorough and done.gave_up:
                        given_up.append(row)
                    elif not row.thorough and retry.is_due(output):
                        unanswered.append(row)
                results[row.key] = output
            if stage.failures >= MOST_FAILURES:
                self._check_function(last)
        again = given_up + unanswered if succeeded else given_up
        for row in again:
            row.thorough = True
        return again

    def _check_function(self, last: BaseException | None) -> None:
        """Tries the sample, after one batch after another has failed."""
        stage = self._stage
        assert last is not None
        why = (
            f"step {stage.name!r}: the last {stage.failures} batches failed as a whole, the last "
            f"one with {describe(last)[0]}"
        )
        requests, _ = stage.prepare([] if stage.sample is None else [stage.sample])
        if not requests:
            raise RunStopped(why) from last
        stage.try_sample(requests[0], why)
        output = self._caller.take_done().results[0]
        stage.probe = None
        stage.elsewhere -= 1
        if isinstance(output, BaseException):
            raise RunStopped(why) from last
        stage.end_probe()

    def _new_stage(self) -> Stage:
        stage = Stage(0, self._step, self._caller, Columns(self._step.outputs))
        stage.began = True
        return stage


class _Caller(Workers):
    """The thread that submits a batch, as the one worker; `submit` returns once that has run."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec, SimpleQueue())
        self._place = Here(spec.function)
        self._runner: asyncio.Runner | None = None
        self._call: Callable[..., Any]

    def start(self) -> None:
        self._place.start()
        self._call = self._place.call
        if self._spec.function.coroutine:
            self._runner = asyncio.Runner()
            self._call = self._await

    def submit(self, batch: Batch, *, thoroughly: bool = False) -> None:
        run = BatchRun(self._spec, batch, thoroughly, self._closing.is_set)
        start = time.perf_counter()
        call = driver(run, self._call_here, time.sleep)
        outcomes = self._execution(run, call).run(batch)
        if run.stopped is not None:
            raise run.stopped
        self._outbox.put(run.done(outcomes, time.perf_counter() - start))

    def take_done(self) -> Done:
        """What became of the batch that was submitted."""
        return self._outbox.get_nowait()

    def close(self, wait: float) -> None:
        del wait  # nothing runs: the caller was here, and is gone
        self._closing.set()
        self._place.close()
        if self._runner is not None:
            self._runner.close()

    def _call_here(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(*args, **kwargs)
        except KeyboardInterrupt as error:  # it is for the thread, not the answer for a row
            raise BuildError(error) from error

    def _await(self, *args: Any, **kwargs: Any) -> Any:
        async def answer() -> Any:
            return await self._place.call(*args, **kwargs)

        assert self._runner is not None
        return self._runner.run(answer())


def _finished(stage: Stage, output: Any) -> Any:
    """The result to keep, or the error of `postprocess`."""
    try:
        return stage.finish(output)
    except Exception as error:
        return error
