"""Pipeline: steps, and their runs over a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import fields
from dataclasses import replace as replaced
from os import PathLike
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, get_args

from .._core.checks import check_whole, suggest
from .._services.failures import error_text
from ..errors import ResultError, RunMismatch, RunStopped, SourceError
from .checks import check_amount
from .engines.cluster import Ray
from .engines.row_threads import ROW_THREADS
from .identity.code import difference, fingerprint
from .progress.commit import Letter
from .progress.store import Progress
from .report import Report, Snapshot, State
from .results.export import progress_path
from .results.merge import Merge
from .results.opening import Stamp, open_result
from .run.plan import Plan
from .run.run import Run
from .sources.base import Source
from .sources.opening import open_source
from .step import Auto, Step
from .types.columns import Columns
from .watch.watcher import Watcher, watcher

OnMismatch = Literal["refuse", "recompute", "keep"]
Failed = Literal["drop", "keep"]


class Pipeline:
    """Steps that each row goes through, one after another.

    `max_failed` ends a run once more rows have failed: a number of rows or, below 1, a share of
    all. Committed results stay.
    """

    def __init__(self, *steps: Step, max_failed: float | None = None) -> None:
        for step in steps or [None]:
            if not isinstance(step, Step):
                raise TypeError(
                    "a pipeline is made of steps, one after another: "
                    f"Pipeline(offline.Step(function, input=..., output=...), ...); got {step!r}"
                )
        names = [step.name for step in steps]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two steps are called {name!r}; give one of them another name=")
        if max_failed is not None:
            check_amount("max_failed, a number of rows or a share of them below 1,", max_failed)
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
        failed: Failed = "drop",
        progress: str | PathLike[str] | None = None,
        limit: int | None = None,
        overwrite: bool = False,
        replace: bool = False,
        row_threads: int = ROW_THREADS,
        watch: bool | Callable[[Snapshot], None] = True,
    ) -> Report:
        """Run every row of `source` through the steps, and write the result to `dest`.

        Committed results are never computed again: the same call after an end of any kind goes on
        where the last run ended, also with other batch sizes, workers, or order of rows. Rows that
        failed are tried again, and so are rows that have been edited.

        Args:
            source: a path, several paths, a glob, a folder or a URI of Parquet, JSON lines or CSV
                files, compressed or not; "-" for JSON lines from standard input; an object
                that exports Arrow streams (polars, duckdb, pyarrow, pandas); a
                `pyarrow.dataset.Dataset`, `datasets.Dataset` or `ray.data.Dataset`; an iterable of
                dicts.
            dest: a file that ends in `.parquet`, `.jsonl` or `.csv`, or a folder, ending in `/`, of
                Parquet files. It appears once it is whole, in the order of the source. A URI, such
                as `s3://bucket/vectors.parquet`, is opened by `pyarrow.fs.FileSystem.from_uri`.
            key: the column that identifies rows; None: rows are known by their number.
            batch_size, workers: settings of the steps that do not say.
            engine: where the functions compute; None: on this machine.
            resume_from_last: False computes all anew.
            resume_step: number or name of a step: it and all after it are computed anew.
            on_mismatch: "recompute" replaces results of other code or parameters, "keep" keeps
                them; by default they are refused.
            keep: columns of the source that the result has; None: all.
            failed: "keep" writes failed rows, too, with nulls and a column `_error`.
            progress: the progress file; beside `dest` if not given. A URI needs it.
            limit: number of rows that are read, for a trial; None: all.
            overwrite: whether a file at `dest` that no run of this progress file made is replaced.
            replace: whether an output column may take the place of a column of the source.
            row_threads: threads for `preprocess`, `postprocess` and `where`; by default four more
                than there are CPUs, at most 32.
            watch: whether to show the progress, or a function that gets a `Snapshot` a few times a
                second.

        Raises:
            SourceError: the source or a column is not as it must be.
            ResultError: the result cannot be written to `dest`.
            RunLocked: another run writes the same progress file.
            RunMismatch: the progress file is of other steps.
            RunStopped: the budget of failed rows is spent, or nothing succeeds any more.
        """
        if resume_from_last is not None and resume_step is not None:
            raise TypeError("resume_from_last and resume_step say different things; give one")
        for name, value, choices in (
            ("on_mismatch", on_mismatch, get_args(OnMismatch)),
            ("failed", failed, get_args(Failed)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        check_whole("row_threads", row_threads)
        check_whole("limit", 1 if limit is None else limit)
        if not isinstance(dest, str | PathLike):
            raise TypeError(f"run(source, result, ...): the result is a path, got {dest!r}")
        if engine is not None and not isinstance(engine, Ray):
            raise TypeError(f"engine must be an offline.Ray(), got {engine!r}")
        for step in self.steps:
            if step.timeout_s and not (engine or step.processes or step.is_coroutine):
                raise ValueError(
                    f"step {step.name!r}: timeout_s needs processes=True or a coroutine function, "
                    "for a thread cannot be cut off"
                )
        steps = [
            replaced(
                step,
                batch_size=step.batch_size or batch_size,
                workers=step.workers
                or workers
                or step.parts.function.options.policy.max_concurrent_batches,
            )
            for step in self.steps
        ]
        asked = 0 if resume_from_last is False else len(steps)  # first step to be computed anew
        if resume_step is not None:
            asked = self._find(resume_step)
        if not isinstance(key, str | None):
            raise TypeError(f"key must be the name of one column, got {key!r}")
        path = progress_path(dest, progress)
        if not path.parent.is_dir():
            raise ResultError(f"there is no folder {path.parent}")
        spool = path.with_name(f"{path.name}.input")
        with (
            closing(Progress(path)) as store,
            closing(open_source(source, spool=spool, limit=limit)) as opened,
        ):
            if not replace:
                _check_outputs(steps, opened)
            result = open_result(
                dest,
                overwrite=overwrite,
                known=store.get("results") or [],
                source_paths=opened.files.paths if opened.files else (),
                progress=path,
            )
            salt = store.get("salt") or token_hex(16)
            prints = [fingerprint(step, salt) for step in self.steps]
            first, old = _first_to_compute(store, prints, on_mismatch, key, asked)
            first = min(asked, first)
            names = [keep] if isinstance(keep, str) else None if keep is None else list(keep)
            plan = Plan(steps, key, names)
            columns = [Columns(step.outputs, step.declared) for step in steps]
            merge = Merge(opened, store, result, columns, names, key, failed == "keep")
            opened.windows([*plan.columns, *(names or [])])  # refuses a missing column
            # after all checks, because it may drop committed results; the same call goes on
            # after an interruption, and does not drop them again
            anew = None if asked == len(steps) else [asked, prints]
            if anew is not None and store.get("anew") == anew:
                first = len(steps)
            notes = {"key": key, "steps": prints, "salt": salt, "anew": anew}
            notes["old"] = old if old < first else None
            store.drop_steps(first, notes)
            store.clear_letters("source")  # each run counts them anew
            watching = watcher(watch, path, result.path)
            work = Run(
                plan,
                opened,
                store,
                merge.note_kinds,
                engine,
                self.max_failed,
                row_threads,
                watching.update,
            )
            return _execute(work, merge, path, watching)

    def _find(self, step: int | str) -> int:
        """Return the number of a step, given by number or name."""
        names = [each.name for each in self.steps]
        if step in names:
            return names.index(step)
        if step in range(len(names)):
            return int(step)
        raise ValueError(
            f"resume_step must be one of the steps {', '.join(map(repr, names))} or a number below "
            f"{len(names)}, got {step!r}"
        )


def run(
    fn: Callable[..., Any],
    source: Any,
    dest: str | PathLike[str],
    *,
    max_failed: float | None = None,
    **settings: Any,
) -> Report:
    """Run one batch function over `source`: a `Step` in a `Pipeline`, with the settings of both."""
    if not callable(fn):
        raise TypeError(
            "run(function, source, result, ...) begins with the function; steps run as "
            f"Pipeline(step, ...).run(source, result), and an object needs __call__; got {fn!r:.60}"
        )
    of_step, of_run = {each.name for each in fields(Step)}, Pipeline.run.__annotations__.keys()
    for name in settings.keys() - of_step - of_run:
        raise TypeError(f"run has no setting {name!r}{suggest(name, of_step | of_run)}")
    step = Step(fn, **{name: settings.pop(name) for name in of_step & settings.keys()})
    return Pipeline(step, max_failed=max_failed).run(source, dest, **settings)


def _check_outputs(steps: Sequence[Step], source: Source) -> None:
    """Raise `SourceError` if a step would replace a column of the source."""
    names: Iterable[str] | None = source.columns
    if names is None:
        window = next(source.windows(None, required=[]), None)
        names = window.columns if window else []
    for step in steps:
        if taken := {*names} & {*step.outputs}:
            raise SourceError(
                f"step {step.name!r}: {source.name} has a column {min(taken)!r} already; choose "
                "another output=, or let it take that place with replace=True"
            )


def _first_to_compute(
    store: Progress,
    now: Sequence[dict[str, Any]],
    on_mismatch: OnMismatch,
    key: str | None,
    asked: int,
) -> tuple[int, int]:
    """Return the first step of which no committed result counts, and the first with old results.

    `now` are the fingerprints of the steps; the user has `asked` for a step to be computed anew.
    Results are old that `on_mismatch="keep"` has kept.

    Raises:
        RunMismatch: the results are of other steps, and `on_mismatch` says neither to compute
            them anew nor to keep them.
    """
    if store.is_empty:
        return 0, len(now)
    before: list[dict[str, Any]] = store.get("steps") or []
    first, why = _first_difference(before, now)
    old = store.get("old")
    old = len(now) if old is None else old
    ways = "on_mismatch='recompute' replaces them, "
    if store.get("key") != key:
        first, why = 0, f"its rows were known by {store.get('key')!r}, not by {key!r}"
    elif on_mismatch == "keep" and why and _columns(before) == _columns(now)[: len(before)]:
        return len(now), min(first, old)
    else:
        ways += "'keep' keeps them where only the code or its parameters differ, "
    if on_mismatch == "recompute":
        return min(first, old), old
    if why is not None and not first >= asked < len(now):
        raise RunMismatch(
            f"the progress file holds results of other steps: {why}; {ways}another result file "
            "leaves them alone"
        )
    return first, old


def _first_difference(
    before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]
) -> tuple[int, str | None]:
    """Return the first step in which two pipelines differ, and how they differ there.

    The second is None if only new steps have been added at the end.
    """
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        if why := difference(old, new):
            return number, why
    if len(before) > len(now):
        return len(now), f"a further step, {before[len(now)]['name']!r}"
    return len(now), None


def _columns(steps: Sequence[dict[str, Any]]) -> list[Any]:
    return [(step["input"], step["output"]) for step in steps]


def _execute(work: Run, merge: Merge, path: Path, watching: Watcher) -> Report:
    """Run all rows through all steps, and write the result. `path`: the progress file."""
    stopped, cause = "", None
    state: State = "failed"
    try:
        work.execute()
        watching.update(work.snapshot(), "writing")
        _write(work, merge)
        merge.progress.put_all({"anew": None})
        state = "done"
    except RunStopped as end:
        stopped, state, cause = str(end), "stopped", end.__cause__
    except KeyboardInterrupt:
        state = "interrupted"
        raise
    except BaseException as error:
        stopped = error_text(error).error
        raise
    finally:
        seen = replaced(work.snapshot(), stopped=stopped)
        watching.update(seen, state)
    report = Report(**vars(seen), output=merge.result.path, progress=str(path))
    if stopped:
        refused = RunStopped(f"{stopped}; what is committed stays: {path}")
        refused.report = report
        raise refused from cause
    return report


def _write(work: Run, merge: Merge) -> None:
    """Write the result, unless it is there."""
    store, files = merge.progress, merge.source.files
    merged = {
        "source": None if files is None else [files.stamps, merge.source.limit, merge.source.form],
        "columns": [[columns.names, str(columns.declared)] for columns in merge.columns],
        "keep": merge.keep,
        "failed": merge.keep_failed,
    }
    known = merge.result.known[-1:]
    if files is not None and store.get("merged") == merged and merge.result.find()[0] in known:
        return

    def note(stamps: Sequence[Stamp]) -> None:
        # one of these is there if the run ends now; nothing tells of which source
        store.put_all({"merged": None, "results": stamps})

    def note_letters(letters: Sequence[Letter]) -> None:
        store.add_letters("output", letters)
        work.note_letters(letters)

    store.clear_letters("output")
    with closing(merge.result) as result:
        work.check_results(merge.write(note_letters))
        stamps = result.publish(note)
    store.put_all({"results": stamps, "merged": merged})
