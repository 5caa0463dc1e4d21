"""Pipeline: steps, and their runs over a source."""

from __future__ import annotations

import inspect
import queue
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import RemoteError, ResultError, RunMismatch, RunStopped
from ._batch_run import WorkerSpec
from ._columns import Columns
from ._committer import Committer
from ._errors import describe
from ._fingerprint import difference, fingerprint
from ._merging import Merge
from ._owner import network_disk
from ._progress import Progress
from ._ray import Ray
from ._reading import Plan, Reader
from ._report import Report, Snapshot
from ._result import Result, Stamp, is_remote, open_result, without_credentials
from ._run import Run, Stopped
from ._serving import Function
from ._source import Source, open_source
from ._stage import Stage
from ._step import Auto, Step, check_names
from ._watch import State, watcher
from ._worker import workers_of

OnMismatch = Literal["refuse", "recompute", "keep"]


class Pipeline:
    """Steps that each row goes through, one after another.

    `max_failed` ends a run once more rows have failed: a number of rows or, below 1, a share of
    all. What is committed stays.
    """

    def __init__(self, *steps: Step, max_failed: float | None = None) -> None:
        if not steps:
            raise TypeError("a pipeline needs a step: Pipeline(Step(function, input=..., ...))")
        for step in steps:
            if not isinstance(step, Step):
                raise TypeError(f"a pipeline is made of Steps, got {step!r}")
        names = [step.name for step in steps]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two steps are called {name!r}; give one of them another name=")
        number = isinstance(max_failed, (int, float)) and not isinstance(max_failed, bool)
        if max_failed is not None and not (number and max_failed >= 0):
            raise ValueError(
                "max_failed must be a number of rows, or a share of them below 1, got "
                f"{max_failed!r}"
            )
        self.steps = steps
        self.max_failed = max_failed

    def run(
        self,
        source: Any,
        dest: str | PathLike[str],
        *,
        key: str | None = None,
        batch_size: int | Auto | None = None,
        workers: int | None = None,
        engine: Ray | None = None,
        resume_from_last: bool | None = None,
        resume_step: int | str | None = None,
        on_mismatch: OnMismatch = "refuse",
        keep: str | Iterable[str] | None = None,
        progress: str | PathLike[str] | None = None,
        overwrite: bool = False,
        watch: bool | Callable[[Snapshot], None] = True,
    ) -> Report:
        """Runs every row of `source` through the steps, and writes the result to `dest`.

        What was committed is never computed again: the same call after an end of any kind goes on
        where the last one was, also with other batch sizes, workers, or order of rows. Rows that
        failed are tried again, and so are rows that have been edited.

        Args:
            source: a path or glob of `.parquet`, `.jsonl` or `.csv` files; anything that exports
                Arrow streams (polars, duckdb, pyarrow, pandas); a `datasets.Dataset` or
                `ray.data.Dataset`; an iterable of dicts.
            dest: a file that ends in `.parquet`, `.jsonl` or `.csv`, or a folder, ending in `/`, of
                Parquet files. It appears once it is whole, in the order of the source. A URI, such
                as `s3://bucket/vectors.parquet`, is opened by `pyarrow.fs.FileSystem.from_uri`.
            key: the column by whose value rows are known again; None: by their number.
            batch_size, workers: those of steps that do not say.
            engine: where the functions compute; None: on this machine.
            resume_from_last: False computes all anew.
            resume_step: number or name of a step: it and all after it are computed anew.
            on_mismatch: "recompute" if results of other code or parameters are to be replaced,
                "keep" if they are to stay; by default they are refused.
            keep: columns of the source that the result has; None: all.
            progress: the progress file; beside `dest` if not given. A URI needs it.
            overwrite: whether a file at `dest` that no run of this progress file made is replaced.
            watch: whether to show what happens, or a function that is told, a few times a second.

        Raises:
            SourceError: the source, a key or a column is not as it must be.
            RunLocked: another run writes the same progress file.
            RunMismatch: the progress file is of other steps.
            RunStopped: the budget of failed rows is spent, or nothing succeeds any more.
        """
        if resume_from_last is not None and resume_step is not None:
            raise TypeError("resume_from_last and resume_step say different things; give one")
        if on_mismatch not in get_args(OnMismatch):
            raise ValueError(
                f"on_mismatch must be 'refuse', 'recompute' or 'keep', got {on_mismatch!r}"
            )
        if engine is not None and not isinstance(engine, Ray):
            raise TypeError(f"engine must be an offline.Ray(), got {engine!r}")
        if engine is not None:
            engine.check()
        steps = [
            replace(
                step,
                batch_size=step.batch_size or batch_size,
                workers=(step.workers or workers or step.own_workers) * _in_flight(step, engine),
            )
            for step in self.steps
        ]
        first = 0 if resume_from_last is False else len(steps)
        if resume_step is not None:
            first = self._find(resume_step)
        if isinstance(keep, str):
            keep = [keep]
        path = progress_path(dest, progress)
        if not path.parent.is_dir():
            raise ResultError(f"the folder {path.parent} does not exist; create it first")
        if kind := network_disk(path):
            warnings.warn(
                f"the progress file {path} is on a network disk ({kind}), whose locks may not keep "
                "out a second run on another machine; start none, or have progress= on a local "
                "disk",
                stacklevel=2,
            )
        store = Progress.open(path)
        try:
            result = open_result(dest, overwrite=overwrite, known=store.get("results") or [])
            first = min(first, self._compare(store, on_mismatch, key))
            opened = open_source(source, spool=path.with_name(f"{path.name}.input"))
            try:
                if opened.files is not None and str(result.path) in opened.files.paths:
                    raise ResultError(f"{result.path} is read as the source; name another file")
                work = _Work(steps, opened, result, store, path, key, keep, first, engine)
                # last of all that may be refused, for it may drop what is committed
                store.forget(first)
                steps_now = [fingerprint(step) for step in self.steps]
                store.put_all({"key": key, "steps": steps_now})
                return work.run(self.max_failed, watch)
            finally:
                opened.close()
        finally:
            store.close()

    def _find(self, step: int | str) -> int:
        """Number of a step, by that or its name."""
        names = [each.name for each in self.steps]
        if step in names:
            return names.index(step)
        if isinstance(step, int) and not isinstance(step, bool) and -1 < step < len(names):
            return step
        raise ValueError(
            f"resume_step must be one of the steps {', '.join(map(repr, names))} or a number below "
            f"{len(names)}, got {step!r}"
        )

    def _compare(self, store: Progress, on_mismatch: OnMismatch, key: str | None) -> int:
        """The first step of which nothing that is committed counts.

        Raises:
            RunMismatch: what is committed means something else, and is neither to be computed anew
                nor to be kept.
        """
        before: list[dict[str, Any]] = store.get("steps") or []
        if store.is_empty:
            return 0
        now = [fingerprint(step) for step in self.steps]
        first, why = _first_difference(before, now)
        if store.get("key") != key:
            first, why = 0, f"its rows were known by {store.get('key')!r}, not by {key!r}"
        elif on_mismatch == "keep" and why is not None and _same_columns(before, now):
            return len(now)
        if why is not None and on_mismatch != "recompute":
            raise RunMismatch(
                f"the progress file holds results of other steps: {why}; on_mismatch='recompute' "
                "replaces them, 'keep' keeps them where only the code or its parameters differ, "
                "another dest leaves them alone"
            )
        return first


def run(
    fn: Callable[..., Any],
    source: Any,
    dest: str | PathLike[str],
    *,
    max_failed: float | None = None,
    **settings: Any,
) -> Report:
    """Runs one batch function over `source`: a `Step` and its `Pipeline`, with the settings of the
    one and those of the other's `run`.
    """
    known = {each.name for each in fields(Step)}
    of_run = [each for each in inspect.signature(Pipeline.run).parameters if each != "self"]
    check_names("run", settings, [*known, *of_run])
    of_step = {name: settings.pop(name) for name in list(settings) if name in known}
    return Pipeline(Step(fn, **of_step), max_failed=max_failed).run(source, dest, **settings)


def progress_path(dest: str | PathLike[str], progress: str | PathLike[str] | None) -> Path:
    """Path of the progress file of runs to `dest`; `progress` if that is given."""
    if progress is not None and is_remote(progress):
        raise ResultError(
            "progress must be a path on a disk of this machine, got "
            f"{without_credentials(str(progress))!r}"
        )
    if progress is None and is_remote(dest):
        raise ResultError(
            f"the result {without_credentials(str(dest))} is named by a URI, and its progress file "
            "must be on a disk of this machine; say where with progress=PATH"
        )
    return Path(f"{str(dest).rstrip('/')}.progress" if progress is None else progress)


def _first_difference(
    before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]
) -> tuple[int, str | None]:
    """The first step in which two pipelines differ, and how; None: what is new comes last."""
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        if why := difference(old, new):
            return number, why
    if len(before) > len(now):
        return len(now), f"a further step, {before[len(now)]['name']!r}"
    return len(now), None


def _same_columns(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> bool:
    """Whether steps of two pipelines differ in nothing but code and parameters."""
    return len(before) <= len(now) and all(
        old[name] == new[name]
        for old, new in zip(before, now, strict=False)
        for name in ("name", "input", "output")
    )


class _Work:
    """One run of valid settings."""

    def __init__(
        self,
        steps: Sequence[Step],
        source: Source,
        result: Result,
        store: Progress,
        path: Path,
        key: str | None,
        keep: Iterable[str] | None,
        first: int,
        engine: Ray | None,
    ) -> None:
        self._source = source
        self._result = result
        self._store = store
        self._path = path
        self._engine = engine
        self._keep = None if keep is None else list(keep)
        self._plan = Plan(steps, key)
        self._columns = [
            Columns(step.outputs, store.get(f"columns {number}") if number < first else None)
            for number, step in enumerate(steps)
        ]
        source.windows([*self._plan.columns, *(self._keep or [])])  # refuses what is not there

    def run(self, max_failed: float | None, watch: bool | Callable[[Snapshot], None]) -> Report:
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stages = [
            Stage(
                number, step, workers_of(_worker_spec(number, step, self._engine), inbox), columns
            )
            for number, (step, columns) in enumerate(
                zip(self._plan.steps, self._columns, strict=True)
            )
        ]
        reader = Reader(self._source, self._plan, self._store, self._columns, inbox.put)
        watching = watcher(watch, self._path, str(self._result.path))
        work = Run(self._plan, stages, inbox, self._source.rows, max_failed, watching.update)
        stopped, cause = "", None
        state: State = "failed"
        try:
            committer = Committer(self._store, inbox.put)
            try:
                work.execute(reader, committer)
            finally:
                committer.close()
            self._source.check_unchanged()
            work.check_results()
            watching.merge(work.snapshot())
            self._merge()
            state = "done"
        except Stopped as end:
            stopped, state, cause = str(end), "stopped", end.error
        except KeyboardInterrupt:
            state = "interrupted"
            raise
        except BaseException as error:
            stopped = describe(error).error
            raise
        finally:
            watching.end(replace(work.snapshot(), stopped=stopped), state)
        seen = work.snapshot()
        report = Report(
            ok=seen.ok,
            failed=seen.failed,
            skipped=seen.skipped,
            recomputed=seen.recomputed,
            seconds=seen.seconds,
            output=str(self._result.path),
            progress=str(self._path),
            steps=seen.steps,
            errors=seen.errors,
            stopped=stopped,
        )
        if stopped:
            refused = RunStopped(stopped)
            refused.report = report
            if isinstance(cause, RemoteError):
                refused.add_note(cause.lines)
            raise refused from cause
        return report

    def _merge(self) -> None:
        """Writes the result, unless it is there."""
        store, result, source = self._store, self._result, self._source
        merged = {
            "source": None if source.files is None else source.files.stamps,
            "columns": [column.names for column in self._columns],
            "keep": self._keep,
        }
        known = store.get("results") or []
        if merged["source"] is not None and store.get("merged") == merged and result.holds(known):
            return

        def note(stamp: Stamp) -> None:
            # whichever is there if this is the end; of which source, nothing tells
            store.put_all({"merged": None, "results": [*known, stamp]})

        result.check_space(self._path.stat().st_size)
        stamp = Merge(source, store, self._columns, self._keep).write(result, note)
        store.put_all({"results": [stamp], "merged": merged})


def _engine_of(step: Step, engine: Ray | None) -> Ray | None:
    """Where `step` computes; None: here, where coroutine functions stay, too."""
    if engine is None or Function(step.fn, step.name, (), {}).coroutine:
        return None
    return replace(
        engine,
        num_cpus=engine.num_cpus if step.num_cpus is None else step.num_cpus,
        num_gpus=engine.num_gpus if step.num_gpus is None else step.num_gpus,
    )


def _in_flight(step: Step, engine: Ray | None) -> int:
    """Batches that one worker of `step` has at once: each has a thread here that waits for it."""
    place = _engine_of(step, engine)
    return 1 if place is None else place.max_in_flight


def _worker_spec(number: int, step: Step, engine: Ray | None) -> WorkerSpec:
    parts = step.parts
    return WorkerSpec(
        step=number,
        name=step.name,
        func=step.fn,
        args=step.args,
        kwargs=dict(step.kwargs),
        collator=parts.execution.collator,
        workers=step.workers or 1,
        processes=step.processes,
        engine=_engine_of(step, engine),
        timeout_s=step.timeout_s,
        # what repeats calls by itself has done so when it fails
        retry=replace(step.retry, attempts=1)
        if getattr(step.fn, "retries_itself", False)
        else step.retry,
        isolate_errors=step.isolate_errors,
        models=step.max_models if step.is_class and step.route is not None else 0,
    )
