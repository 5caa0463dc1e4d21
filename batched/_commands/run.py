"""Commands `run`, `status` and `export`: one batch function over a dataset."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import orjson

from ..errors import ResultError, RunLocked, RunMismatch, RunStopped, SourceError
from ..offline import Auto, DeadLetter, Pipeline, Ray, Report, Step, export
from ..offline.progress.store import Progress
from ..offline.report import ENDS, dead_letters
from ..offline.results.export import progress_path
from ..offline.uris import without_credentials
from ..offline.watch.watcher import read_status
from .reference import argument_error, describe, first_line, import_attribute

FAILED: Final = 1
"""Exit status of a run that ended early, because too many rows failed."""
SIGNALLED: Final = 128
"""Exit status of a command that a signal ended, less the signal's number, as shells count."""
BROKEN_PIPE: Final = SIGNALLED + 13
"""Exit status of a command after its output was closed; 13 is SIGPIPE."""
REFUSALS: Final = (ResultError, RunLocked, RunMismatch, SourceError)
"""Errors with a message that says all without the type of the error."""


def run(args: argparse.Namespace, command: str) -> int:
    """Run a function of the user over a source. Return the exit status.

    `command` is the command line that goes on after an early end.

    Raises:
        argparse.ArgumentError: an argument, the source or the progress file cannot be used.
    """
    pipeline = _pipeline(args)
    of_ray = {"address": args.address, "num_cpus": args.num_cpus, "num_gpus": args.num_gpus}
    of_ray = {name: value for name, value in of_ray.items() if value is not None}
    shown = without_credentials(args.dest)
    if "?" in args.dest.removeprefix(shown):  # a query may hold secrets; the command cannot run
        shown += "?..."
    command = command.replace(shlex.quote(args.dest), shlex.quote(shown))
    received: list[int] = []
    try:
        with _interrupts(received):
            report = pipeline.run(
                args.source,
                args.dest,
                key=args.key,
                batch_size=Auto() if args.batch_size == "auto" else args.batch_size,
                workers=args.workers,
                engine=Ray(**of_ray) if args.engine or of_ray else None,
                resume_step=args.resume_step,
                on_mismatch=args.on_mismatch,
                keep=args.keep,
                failed="keep" if args.keep_failed else "drop",
                progress=args.progress,
                overwrite=args.overwrite,
                watch=not args.quiet,
            )
    except RunStopped as stopped:
        _say(stopped.report, args)
        _print_error(_way_on(args, command))
        return FAILED
    except KeyboardInterrupt:
        _print_error(f"Interrupted; {_way_on(args, command)}")
        return SIGNALLED + (received or [signal.SIGINT])[0]
    except (*REFUSALS, ImportError, OSError, TypeError, ValueError) as error:
        text = first_line(error) if isinstance(error, REFUSALS) else describe(error)
        raise argument_error("\n".join(filter(None, [text, _way_on(args, command)]))) from error
    _say(report, args)
    return 0


@contextmanager
def _interrupts(received: list[int]) -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, and note it in `received`."""

    def interrupt(number: int, frame: Any) -> None:
        received.append(number)
        handler = signal.getsignal(signal.SIGINT)
        # a shell without job control has its background commands ignore SIGINT
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _pipeline(args: argparse.Namespace) -> Pipeline:
    """Return the pipeline that the arguments name, or describe."""
    found = import_attribute(args.target)
    of_step = {
        "input": args.input,
        "output": args.output,
        "args": args.args,
        "kwargs": args.kwargs,
        "length": len if args.length == "len" else args.length and import_attribute(args.length),
        "processes": args.processes,
        "timeout_s": args.timeout,
    }
    given = {name: value for name, value in of_step.items() if value}
    if isinstance(found, Pipeline):
        if args.max_failed is not None:
            given["max_failed"] = args.max_failed
        if given:
            raise argument_error(
                f"{args.target} is a Pipeline, which has its own {', '.join(given)}"
            )
        return found
    if args.input is None or args.output is None:
        raise argument_error(
            "--input and --output are required, columns that the function reads and returns"
        )
    try:
        return Pipeline(Step(found, **given), max_failed=args.max_failed)
    except (TypeError, ValueError) as error:
        raise argument_error(first_line(error)) from error


def _way_on(args: argparse.Namespace, command: str) -> str:
    """Return a sentence with the command that goes on, if this process has committed a row."""
    known = read_status(progress_path(args.dest, args.progress))
    rows = known["steps"][-1]["ok"] if known and known["pid"] == os.getpid() else 0
    return f"{_count(rows, 'row')} committed. To go on:\n  {command}" if rows else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _say(report: Report, args: argparse.Namespace) -> None:
    """Print the outcome of a run; of a quiet one, only failures."""
    if not args.quiet or report.stopped:
        print(report, file=sys.stderr if report.stopped else sys.stdout, flush=True)
    if report.failed:
        _print_error(
            f"{_count(report.failed, 'row')} failed and will be tried again by the next run. To "
            f"see them:\n  {_status_command(args)}"
        )


def _status_command(args: argparse.Namespace) -> str:
    """Return the command line that prints the failed rows of the run of these arguments."""
    given = ["status", without_credentials(args.dest), "--failed"]
    given += ["--progress", args.progress] if args.progress else []
    return f"{args.program} {shlex.join(given)}"


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise errors about an earlier run as errors of the arguments."""
    try:
        yield
    except REFUSALS as error:
        raise argument_error(first_line(error)) from error
    except OSError as error:
        raise argument_error(describe(error)) from error


def export_committed(args: argparse.Namespace) -> int:
    """Write the committed rows of a run to a file. Return 0.

    Raises:
        argparse.ArgumentError: the run is unknown or goes on, or the file cannot be written.
    """
    with _refusals():
        print(export(args.result, args.dest, progress=args.progress, overwrite=args.overwrite))
    return 0


def status(args: argparse.Namespace) -> int:
    """Print the state of a run, or its outcome. Return the exit status.

    Raises:
        argparse.ArgumentError: the run is unknown, or its dead letters cannot be read yet.
    """
    args.dest = without_credentials(args.dest)
    with _refusals():
        path = progress_path(args.dest, args.progress)
        if not path.exists():
            raise argument_error(f"there is no run of {args.dest}: {path} does not exist")
        try:
            for line in map(_json, dead_letters(path)) if args.failed else _status(args, path):
                print(line)
            sys.stdout.flush()
        except BrokenPipeError:  # `head` has seen enough
            # Python flushes the rest as it exits, and that would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
    return 0


def _json(letter: DeadLetter) -> str:
    return orjson.dumps(letter).decode()


def _status(args: argparse.Namespace, path: Path) -> Iterator[str]:
    """Yield the lines that tell of a run."""
    known = read_status(path) or {}
    errors = known.get("errors", {})
    steps = {step["name"]: step for step in known.get("steps", ())}
    is_running = False
    try:
        with closing(Progress(path)) as progress:
            found = progress.counts()
            names = [step["name"] for step in progress.get("steps") or ()]
        counts: dict[str, Any] = {name: found.get(at, {}) for at, name in enumerate(names)}
    except RunLocked:
        if not known or known["state"] in ENDS:
            yield f"{args.dest}: a run has just begun; ask again in a moment"
            return
        counts, is_running = steps, True
    if known:
        yield f"{known['result']}: {_state(known, is_running)}"
        yield _rows(known)
    columns = ["ok", "failed", "filtered", *["waiting"] * is_running]
    lines = [["step", *columns, "rows/s", *["time left"] * is_running]]
    for name, count in counts.items():
        rate, left = (steps.get(name, {}).get(each) for each in ("rows_per_s", "seconds_left"))
        line = [name, *[f"{count.get(column, 0):,}" for column in columns]]
        line.append("" if rate is None else f"{rate:,.1f}")
        lines.append([*line, *["" if left is None else _time(left)] * is_running])
    yield from _table(lines)
    for name, step in steps.items():
        for column, types in step["types"].items():
            if len(types) > 1:
                listed = ", ".join(f"{rows:,} {kind}" for kind, rows in types.items())
                yield f"types of {column!r} in step {name}: {listed}"
    for name, count in errors.items():
        letter = known["examples"][name]
        step = f" in step {letter['step']}" if letter["step"] else ""
        error = letter["error"].partition("\n")[0]
        yield f"{count:,} x {name}, such as row {letter['key']!r}{step}, {letter['phase']}: {error}"
    if errors and not is_running:
        yield f"All of them, as JSON lines: {_status_command(args)}"


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


def _table(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, the first column to the left, numbers to the right."""
    first, *rest = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *texts in lines:
        cells = [text.rjust(width) for text, width in zip(texts, rest, strict=True)]
        yield "  ".join([name.ljust(first), *cells]).rstrip()


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
