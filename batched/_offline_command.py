"""The commands `run` and `status`: one batch function over a dataset, and how far that is."""

from __future__ import annotations

import argparse
import builtins
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from ._reference import argument_error, describe, first_line, import_attribute
from .errors import ResultError, RunLocked, RunMismatch, RunStopped, SourceError
from .offline import Auto, DeadLetter, Pipeline, Ray, Report, Step
from .offline._pipeline import progress_path
from .offline._progress import Progress
from .offline._report import dead_letters, error_type, letters_of
from .offline._result import without_credentials
from .offline._watch import ENDS, read_status, status_path

FAILED = 1
"""Exit status of a run that ended before all was done, because too much failed."""
OPTIONS = {
    "on_mismatch='recompute'": "--on-mismatch recompute",
    "'keep' keeps": "--on-mismatch keep keeps",
    "overwrite=True": "--overwrite",
    "progress=PATH": "--progress PATH",
    "another dest leaves": "another result leaves",
    "version= says": "version= of a Step says",
}
"""Arguments that messages speak of, as the command line has them."""

REFUSALS = (ResultError, RunLocked, RunMismatch, SourceError)
"""Errors of which the sentence is enough."""


def run(args: argparse.Namespace, command: str) -> int:
    """Runs a function of the user's over a source; the exit status. `command` is the command line
    that goes on where this one ends.

    Raises:
        KeyboardInterrupt: it was interrupted, and has said how to go on.
        argparse.ArgumentError: an argument, the source or the progress file cannot be used.
    """
    pipeline, engine = _pipeline(args), _engine(args)
    shown = without_credentials(args.dest)
    if "?" in args.dest.removeprefix(shown):  # typed as it stands, it is refused
        shown += "?..."
    command = command.replace(shlex.quote(args.dest), shlex.quote(shown))
    try:
        report = pipeline.run(
            args.source,
            args.dest,
            key=args.key,
            batch_size=Auto() if args.batch_size == "auto" else args.batch_size,
            workers=args.workers,
            engine=engine,
            resume_step=_step_of(pipeline, args.resume_step),
            on_mismatch=args.on_mismatch,
            keep=args.keep,
            progress=args.progress,
            overwrite=args.overwrite,
            watch=not args.quiet,
        )
    except RunStopped as stopped:
        _say(stopped.report, args)
        _print_error(f"What is committed stays. To go on:\n  {command}")
        return FAILED
    except KeyboardInterrupt:
        _print_error(f"Interrupted; {_way_on(_done(args), command)}")
        raise
    except (*REFUSALS, OSError) as error:  # a full disk, a store or a model that is not there
        refused = isinstance(error, REFUSALS)
        text = _as_options(first_line(error)) if refused else describe(error)
        if done := _done(args):
            text += f"\n{_way_on(done, command)}"
        raise argument_error(text) from error
    except ModuleNotFoundError as error:  # of the user's code
        raise argument_error(f"{args.target} raised {describe(error)}") from error
    _say(report, args)
    return 0


def _pipeline(args: argparse.Namespace) -> Pipeline:
    """Pipeline that the arguments name, or describe."""
    found = import_attribute(args.target)
    of_step = {
        "input": args.input,
        "output": args.output,
        "length": None if args.length is None else _length(args.length),
        "processes": args.processes,
        "timeout_s": args.timeout,
    }
    if isinstance(found, Pipeline):
        of_step["max_failed"] = args.max_failed
        if given := [name for name, value in of_step.items() if value]:
            raise argument_error(
                f"{args.target} is a Pipeline, which has its own {', '.join(given)}"
            )
        return found
    if args.input is None or args.output is None:
        raise argument_error(
            "--input and --output are required, columns that the function reads and returns"
        )
    try:
        return Pipeline(Step(found, **of_step), max_failed=args.max_failed)
    except (TypeError, ValueError) as error:
        raise argument_error(first_line(error)) from error


def _engine(args: argparse.Namespace) -> Ray | None:
    """Engine that the arguments describe."""
    of_ray = {"address": args.address, "num_cpus": args.num_cpus, "num_gpus": args.num_gpus}
    given = {name: value for name, value in of_ray.items() if value is not None}
    if args.engine is None and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise argument_error(f"{names} is for --engine ray")
    if args.engine is None:
        return None
    engine = Ray(**given)
    try:
        engine.check()
    except ImportError as error:
        raise argument_error(first_line(error)) from error
    return engine


def _length(reference: str) -> Any:
    """A function of Python's own, such as `len`, or `module:function`."""
    func = getattr(builtins, reference, None)
    return import_attribute(reference) if func is None else func


def _step_of(pipeline: Pipeline, given: str | None) -> int | str | None:
    """The step to resume from, by name or number."""
    names = [step.name for step in pipeline.steps]
    if given is None or given in names:
        return given
    if given.isdecimal() and int(given) < len(names):
        return int(given)
    raise argument_error(
        f"--resume-step must be one of {', '.join(names)}, or a number below {len(names)}, got "
        f"{given!r}"
    )


def _done(args: argparse.Namespace) -> int:
    """Rows that the run of this process has done, from the status that it has left."""
    known = read_status(progress_path(args.dest, args.progress))
    return known["steps"][-1]["ok"] if known and known["pid"] == os.getpid() else 0


def _way_on(rows: int, command: str) -> str:
    return f"{rows:,} row{'s are' if rows != 1 else ' is'} committed. To go on:\n  {command}"


def _say(report: Report, args: argparse.Namespace) -> None:
    """Prints what a run came to; of a quiet one, what went wrong."""
    if not args.quiet or report.stopped:
        print(report, file=sys.stderr if report.stopped else sys.stdout, flush=True)
    if report.failed:
        _print_error(
            f"{_plural(report.failed, 'row')} failed and will be tried again by the next run. To "
            f"see them:\n  {_status_command(args)}"
        )


def _status_command(args: argparse.Namespace) -> str:
    """Command line that tells of the run of these arguments."""
    given = ["status", without_credentials(args.dest)]
    given += ["--progress", args.progress] if args.progress else []
    return f"{args.program} {shlex.join(given)}"


def _as_options(message: str) -> str:
    """A message whose advice is options of the command line."""
    for argument, option in OPTIONS.items():
        message = message.replace(argument, option)
    return message


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def status(args: argparse.Namespace) -> int:
    """Prints how far a run is, or what it came to; 0.

    Raises:
        argparse.ArgumentError: there is no such run, or its dead letters cannot be read yet.
    """
    args.dest = without_credentials(args.dest)
    try:
        path = progress_path(args.dest, args.progress)
        if not path.exists():
            raise argument_error(f"there is no run of {args.dest}: {path} does not exist")
        if args.failed:
            for letter in dead_letters(path):
                sys.stdout.buffer.write(orjson.dumps(letter) + b"\n")
            sys.stdout.buffer.flush()
            return 0
        known = read_status(path)
        try:
            with closing(Progress.open(path)) as progress:
                lines = _ended(args, known, progress)
        except RunLocked:
            lines = _running(args.dest, known, path)
    except REFUSALS as error:
        raise argument_error(_as_options(first_line(error))) from error
    except OSError as error:
        raise argument_error(describe(error)) from error
    print("\n".join(lines))
    return 0


def _running(dest: str, known: Mapping[str, Any] | None, path: Path) -> list[str]:
    """Lines about a run that goes on."""
    if known is None or known["state"] in ENDS:
        return [f"{dest}: a run has just begun; {status_path(path)} will tell more in a moment"]
    so_far = _time(known["seconds"])
    lines = [
        f"{known['result']}: {known['state']}, {so_far} so far, as of {known['updated']}",
        f"process {known['pid']} on {known['host']}",
        _rows(known),
        *_table(
            ("step", "ok", "failed", "waiting", "batches", "rows/s", "time left"),
            [
                (
                    step["name"],
                    f"{step['ok']:,}",
                    f"{step['failed']:,}",
                    f"{step['waiting']:,}",
                    f"{step['batches']:,}",
                    _rate(step["rows_per_s"]),
                    "" if step["seconds_left"] is None else _time(step["seconds_left"]),
                )
                for step in known["steps"]
            ],
        ),
    ]
    for name, count in known["errors"].items():
        example = known["examples"].get(name)
        lines.append(_failures(count, name, example))
    return lines


def _ended(
    args: argparse.Namespace, known: Mapping[str, Any] | None, progress: Progress
) -> list[str]:
    """Lines about what is committed, while no run goes on."""
    counts = progress.counts()
    names = [step["name"] for step in progress.get("steps") or []]
    rates = {step["name"]: _mean_rate(step, known) for step in known["steps"]} if known else {}
    lines = [f"{known['result'] if known else args.dest}: {_end(known)}"]
    lines += [_rows(known)] if known else []
    lines += _table(
        ("step", "ok", "failed", "rows/s in the last run"),
        [
            (
                name,
                f"{counts.get(number, {}).get('ok', 0):,}",
                f"{counts.get(number, {}).get('failed', 0):,}",
                rates.get(name, ""),
            )
            for number, name in enumerate(names)
        ],
    )
    examples: dict[tuple[str, str], DeadLetter] = {}
    failed: dict[tuple[str, str], int] = {}
    for letter in letters_of(progress):
        kind = letter["step"], error_type(letter["phase"], letter["error"])
        examples.setdefault(kind, letter)
        failed[kind] = failed.get(kind, 0) + 1
    for kind, count in sorted(failed.items(), key=lambda each: -each[1]):
        lines.append(_failures(count, kind[1], examples[kind]))
    if failed:
        lines.append(f"All of them, as JSON lines: {_status_command(args)} --failed")
    return lines


def _end(known: Mapping[str, Any] | None) -> str:
    """How the last run has ended."""
    if known is None:
        return "no run goes on, and none has begun"
    state = known["state"]
    if state not in ENDS:
        state = "killed"
    again = "" if state == "done" else "; the same command goes on where it was"
    why = f" ({known['stopped']})" if known["stopped"] else ""
    return f"{state} after {_time(known['seconds'])}, at {known['updated']}{why}{again}"


def _rows(known: Mapping[str, Any]) -> str:
    of = "" if known["total"] is None else f" of {known['total']:,}"
    text = f"{known['read']:,}{of} rows read, {known['skipped']:,} of them done before"
    again = known["recomputed"]
    return f"{text}, {again:,} edited since the last run" if again else text


def _failures(count: int, name: str, example: DeadLetter | None) -> str:
    """Line about dead letters of one kind."""
    text = f"{count:,} x {name}"
    if example is None:
        return text
    return (
        f"{text}, such as row {example['key']!r} in step {example['step']}, {example['phase']}: "
        f"{example['error'].partition(chr(10))[0]}"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table, the first column to the left, numbers to the right."""
    every = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    return [
        "  ".join(
            chain(
                [row[0].ljust(widths[0])],
                (text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)),
            )
        ).rstrip()
        for row in every
    ]


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _mean_rate(step: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Rows a second of one step, over all of its last run."""
    rows = step["ok"] + step["failed"]
    return _rate(rows / known["seconds"]) if rows else ""


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.1f}"


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
