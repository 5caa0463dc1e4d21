"""Commands run, status and export: one batch function over a dataset."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import orjson
from rich.console import Console

from .._services.failures import error_text
from ..errors import BatchedError, RunLocked, RunStopped
from ..offline import Auto, Pipeline, Ray, Report, Step, export
from ..offline.progress.store import Progress
from ..offline.report import ENDS, dead_letters
from ..offline.results.export import progress_path
from ..offline.uris import without_credentials
from ..offline.watch.watcher import read_status
from .display import count, new_table
from .reference import argument_error, describe, import_attribute

FAILED: Final = 1
"""Exit status of a run that ended early, because too many rows failed."""
TERMINATED: Final = 128 + 15
"""Exit status of a run that SIGTERM ended, as shells count."""
COUNTS: Final = ("ok", "failed", "filtered", "waiting")
"""Counts of rows that the table of steps has."""
WIDTH: Final = 1000
"""Width of the console for tables: a terminal wraps long lines, and cuts none."""


def run(args: argparse.Namespace) -> int:
    """Run a function of the user over a source. Return the exit status.

    Raises:
        argparse.ArgumentError: an argument, the source or the progress file cannot be used.
    """
    terminated: list[int] = []
    try:
        with _interrupts(terminated):
            report = _pipeline(args).run(
                args.source,
                args.dest,
                key=args.key,
                batch_size=Auto() if args.batch_size == "auto" else args.batch_size,
                workers=args.workers,
                engine=Ray() if args.engine else None,
                resume_step=args.resume_step,
                on_mismatch=args.on_mismatch,
                keep=args.keep,
                limit=args.limit,
                failed=args.failed,
                progress=args.progress,
                overwrite=args.overwrite,
                watch=not args.quiet,
            )
    except RunStopped as stopped:
        _print_report(stopped.report, args)
        if stopped.__cause__:
            _print_error(error_text(stopped.__cause__).traceback)
        _print_error(_way_on(args))
        return FAILED
    except KeyboardInterrupt:
        _print_error(f"Interrupted; {_way_on(args)}")
        if not terminated:
            raise
        return TERMINATED
    except (BatchedError, ImportError, OSError, TypeError, ValueError) as error:
        text = "\n".join(filter(None, [describe(error), _way_on(args)]))
        raise argument_error(text) from error
    _print_report(report, args)
    return 0


@contextmanager
def _interrupts(terminated: list[int]) -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, and note it in `terminated`."""

    def interrupt(number: int, frame: Any) -> None:
        terminated.append(number)
        handler = signal.getsignal(signal.SIGINT)
        # a shell without job control has its background commands ignore SIGINT
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _pipeline(args: argparse.Namespace) -> Pipeline:
    """Return the pipeline that the arguments name, or one step of the function that they name."""
    found = import_attribute(args.target)
    if isinstance(found, Pipeline):
        settings = ("input", "output", "args", "max_failed")
        given = [name for name in settings if getattr(args, name) is not None]
        if given:
            raise argument_error(
                f"{args.target} is a Pipeline, which has its own {', '.join(given)}"
            )
        return found
    if args.input is None or args.output is None:
        raise argument_error(
            "--input and --output are required, columns that the function reads and returns"
        )
    step = Step(found, input=args.input, output=args.output, args=args.args or ())
    return Pipeline(step, max_failed=args.max_failed)


def _way_on(args: argparse.Namespace) -> str:
    """Return a sentence about the rows that this process has committed, if there are any."""
    known = read_status(progress_path(args.dest, args.progress))
    rows = known["steps"][-1]["ok"] if known and known["pid"] == os.getpid() else 0
    if not rows:
        return ""
    command = "the same command" + ", without --resume-step," * (args.resume_step is not None)
    return f"{count(rows, 'row')} committed; {command} goes on where it was"


def _print_report(report: Report, args: argparse.Namespace) -> None:
    """Print the outcome of a run; of a quiet one, only failures."""
    if not args.quiet or report.stopped:
        print(report, file=sys.stderr if report.stopped else sys.stdout, flush=True)
    if report.failed:
        _print_error(
            f"{count(report.failed, 'row')} failed and will be tried again by the next run. To "
            f"see them:\n  {_status_command(args)}"
        )


def _status_command(args: argparse.Namespace) -> str:
    """Return the command line that prints the failed rows of the run of these arguments."""
    command = ["status", without_credentials(args.dest), "--failed"]
    command += ["--progress", args.progress] if args.progress else []
    return f"{args.program} {shlex.join(command)}"


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def export_committed(args: argparse.Namespace) -> int:
    """Write the committed rows of a run to a file. Return 0.

    Raises:
        BatchedError: the run is unknown or goes on, or the file cannot be written.
    """
    print(export(args.result, args.dest, progress=args.progress, overwrite=args.overwrite))
    return 0


def status(args: argparse.Namespace) -> int:
    """Print the state of a run, or its outcome. Return 0.

    Raises:
        argparse.ArgumentError: the run is unknown.
        RunLocked: the run goes on, and its dead letters cannot be read yet.
    """
    args.dest = without_credentials(args.dest)
    path = progress_path(args.dest, args.progress)
    if not path.exists():
        raise argument_error(f"there is no run of {args.dest}: {path} does not exist")
    if args.failed:
        for letter in dead_letters(path):
            print(orjson.dumps(letter).decode())
    else:
        _print_status(args, path)
    return 0


def _print_status(args: argparse.Namespace, path: Path) -> None:
    known = read_status(path) or {}
    steps = {step["name"]: step for step in known.get("steps", ())}
    is_running = False
    try:
        with closing(Progress(path)) as progress:
            found = progress.counts()
            names = [step["name"] for step in progress.get("steps") or ()]
            old = progress.get("old")
        if old is not None:
            print(
                f"step {names[old]} has results of older code, which --on-mismatch keep has kept; "
                "--on-mismatch recompute replaces them"
            )
        counts: dict[str, Any] = {name: found.get(at, {}) for at, name in enumerate(names)}
    except RunLocked:
        if not known or known["state"] in ENDS:
            print(f"{args.dest}: a run has just begun; ask again in a moment")
            return
        counts, is_running = steps, True
    if known:
        print(f"{known['result']}: {_state(known, is_running)}\n{_rows(known)}")
    _print_steps(counts, steps, is_running)
    errors = known.get("errors", {})
    for name, number in errors.items():
        letter = known["examples"][name]
        step = f" in step {letter['step']}" if letter["step"] else ""
        error = letter["error"].partition("\n")[0]
        print(
            f"{number:,} x {name}, for example row {letter['key']!r}{step}, {letter['phase']}: "
            f"{error}"
        )
    if errors and not is_running:
        print(f"All of them, as JSON lines: {_status_command(args)}")


def _print_steps(counts: Mapping[str, Any], steps: Mapping[str, Any], is_running: bool) -> None:
    """Print a table of the rows of each step, and of its speed."""
    table = new_table("", "step", *COUNTS, "rows/s", "time left")
    for name, number in counts.items():
        pace = steps.get(name, {})
        rate, left = pace.get("rows_per_s"), pace.get("seconds_left") if is_running else None
        table.add_row(
            name,
            *[f"{number.get(column, 0):,}" for column in COUNTS],
            "" if rate is None else f"{rate:,.1f}",
            "" if left is None else _time(left),
        )
    Console(width=WIDTH, markup=False, highlight=False).print(table)


def _state(known: Mapping[str, Any], is_running: bool) -> str:
    state, seconds, updated = known["state"], _time(known["seconds"]), known["updated"]
    if is_running:
        place = f"process {known['pid']} on {known['host']}"
        return f"{state}, {seconds} so far, as of {updated}; {place}"
    if state not in ENDS:
        state = "killed"
    again = "" if state == "done" else "; the same command goes on where it was"
    why = f" ({known['stopped']})" if known["stopped"] else ""
    return f"{state} after {seconds}, at {updated}{why}{again}"


def _rows(known: Mapping[str, Any]) -> str:
    about = "about " * known["total_is_estimate"]
    of = "" if known["total"] is None else f" of {about}{known['total']:,}"
    text = f"{known['read']:,}{of} rows read, {known['skipped']:,} of them done before"
    again = known["recomputed"]
    return f"{text}, {again:,} edited since the last run" if again else text


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
