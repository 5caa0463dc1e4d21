"""The command line, `batched` or `python -m batched`: one subparser for each command, which imports
its packages when it runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from .._installation import __version__

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["_Parser"]

N = TypeVar("N", int, float)
V = TypeVar("V")

INTERRUPTED = 128 + 2
"""The exit status of a command that SIGINT ended, as shells count."""


class _Parser(argparse.ArgumentParser):
    """Parser that reports an error in one sentence; the usage is a `--help` away."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None, *, prog: str = "batched") -> int:
    """Run a command line. Return its exit status: 0, 1 if a check failed or a run was stopped, 130
    if it was interrupted, 143 if it was terminated, 141 if its output was closed.

    Raises:
        SystemExit: with 2 and one sentence on stderr, if the arguments are wrong or a package is
            missing; with 0, after `--help`.
    """
    parser = _parser(prog)
    given = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(given)
    args.given, args.program = given, prog
    if prog.startswith("python "):  # by the name that it has here
        args.program = f"{shlex.quote(Path(sys.executable).name)}{prog.removeprefix('python')}"
    if args.command is None:
        parser.print_help()
        return 0
    command: _Parser = args.parser
    try:
        status: int = args.run(args)
        return status
    except argparse.ArgumentError as error:
        command.error(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        command.error(
            f'{package} is not installed; run `pip install "batched-dynamically[{args.extra}]"`'
        )
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser(prog: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        description="One batch function, many callers: calls of one item run in full batches.",
    )
    parser.add_argument("--version", action="version", version=f"batched {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    _add_demo(commands)
    _add_bench(commands)
    _add_run(commands)
    _add_status(commands)
    _add_export(commands)
    return parser


def _add_demo(commands: Commands) -> None:
    about = "compare a real embedding model with and without batching, under concurrent callers"
    parser = commands.add_parser(
        "demo",
        help=about,
        description=f"{about[0].upper()}{about[1:]}; takes under two minutes on two cores.",
    )
    parser.add_argument(
        "--model",
        metavar="NAME_OR_PATH",
        help="any SentenceTransformer model (default: all-MiniLM-L6-v2 from its package)",
    )
    parser.add_argument(
        "--callers",
        type=_positive,
        default=64,
        metavar="N",
        help="concurrent callers, each with one call at a time (%(default)s)",
    )
    parser.add_argument(
        "--sentences",
        type=_positive,
        default=512,
        metavar="N",
        help="sentences to embed in each run (%(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=_positive,
        default=32,
        metavar="N",
        help="most sentences in one batch (%(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default="batched-demo.png",
        metavar="FILE",
        help="picture of the comparison (%(default)s)",
    )
    parser.add_argument(
        "--offline",
        action="store_true",
        help="instead: embed a CSV of the sentences, be killed half-way, and go on",
    )
    parser.set_defaults(run=_demo, parser=parser, extra="demo")


def _demo(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    if args.offline:
        from .demo.offline import offline_demo

        return offline_demo(args.model, sentences=args.sentences, batch_size=args.batch_size)
    from .demo.online import demo  # numpy and the like, which other commands do without

    return demo(
        args.model,
        callers=args.callers,
        sentences=args.sentences,
        batch_size=args.batch_size,
        output=args.output,
        began=began,
    )


def _add_bench(commands: Commands) -> None:
    about = (
        "measure a batch function of yours, by size of the batch and under concurrent callers, and "
        "recommend its batch_size"
    )
    parser = commands.add_parser(
        "bench", help=about, description=f"{about[0].upper()}{about[1:]}; takes about 20 seconds."
    )
    parser.add_argument(
        "target",
        metavar="module:function",
        help="takes a list; plain, a coroutine function, or decorated, which keeps its settings",
    )
    parser.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON Lines, each an item (an object of features, for inference functions)",
    )
    parser.add_argument(
        "--max-batch-size",
        type=_at_least_two,
        default=64,
        metavar="N",
        help="most items in one batch (%(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=_positive,
        metavar="N",
        help="of the batches under callers (the recommended one)",
    )
    parser.add_argument(
        "--concurrency", type=_positive, default=256, metavar="N", help="most callers (%(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="for each number of callers (%(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default="batched-bench.png",
        metavar="FILE",
        help="picture of it all (%(default)s)",
    )
    parser.set_defaults(run=_bench, parser=parser, extra="bench")


def _bench(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    from .bench.command import Plan, bench

    plan = Plan(args.max_batch_size, args.batch_size, args.concurrency, args.seconds)
    return bench(args.target, args.input, plan=plan, output=args.output, began=began)


def _add_run(commands: Commands) -> None:
    about = (
        "run a batch function over a CSV, JSON Lines or Parquet file; started again, it goes on "
        "where it was"
    )
    parser = commands.add_parser(
        "run",
        help=about,
        description=f"{about[0].upper()}{about[1:]}. Exit status: 0 done, 1 stopped because too "
        "much failed, 2 wrong arguments or input, 130 interrupted (Ctrl-C), 143 terminated.",
        allow_abbrev=False,  # `_without_resume_step` knows it by its whole name
    )
    parser.add_argument(
        "target",
        metavar="module:function",
        help="takes a list; plain, a coroutine function, decorated, or a class built once per "
        "worker; or an offline.Pipeline",
    )
    parser.add_argument(
        "source", help="file, folder, glob or URI: CSV, JSON Lines or Parquet; or -"
    )
    parser.add_argument(
        "dest",
        metavar="result",
        help=".parquet, .jsonl or .csv; or a folder, ending in /; or a URI of these (s3://...)",
    )
    parser.add_argument("--input", type=_names, metavar="A[,B]", help="columns that it reads")
    parser.add_argument("--output", type=_names, metavar="A[,B]", help="columns that it returns")
    parser.add_argument(
        "--args",
        type=_json_list,
        default=[],
        metavar="JSON",
        help="list of arguments after the list of items; of a class, for its constructor",
    )
    parser.add_argument(
        "--kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help='object of keyword arguments, such as \'{"model": "small"}\'',
    )
    parser.add_argument(
        "--key", metavar="COLUMN", help="by which rows are known again (their number)"
    )
    parser.add_argument(
        "--batch-size",
        type=_size,
        metavar="N",
        help='most rows in one batch, or "auto" to find it (the decorator\'s, or 32)',
    )
    parser.add_argument(
        "--length",
        metavar="FUNCTION",
        help="len or module:function: length of an item, so that like lengths run together",
    )
    parser.add_argument(
        "--workers",
        type=_positive,
        metavar="N",
        help="batches that run at once (the function's own, or 1)",
    )
    parser.add_argument("--processes", action="store_true", help="make each worker a process")
    parser.add_argument(
        "--engine", choices=["ray"], help="where the function computes (on this machine)"
    )
    parser.add_argument(
        "--address", metavar="A", help="address of the Ray cluster (the one around, or a new one)"
    )
    parser.add_argument(
        "--num-cpus", type=_amount, metavar="N", help="CPUs of each worker on Ray (1)"
    )
    parser.add_argument(
        "--num-gpus", type=_amount, metavar="N", help="GPUs of each worker on Ray (0)"
    )
    parser.add_argument(
        "--timeout", type=_seconds, metavar="S", help="longest time of one call, of processes"
    )
    parser.add_argument(
        "--max-failed",
        type=_amount,
        metavar="X",
        help="end once more rows have failed: a number of them or, below 1, a share",
    )
    parser.add_argument(
        "--keep", type=_names, metavar="A,B", help="columns of the source in the result (all)"
    )
    parser.add_argument(
        "--keep-failed",
        action="store_true",
        help="keep failed rows in the result, with the error in a column _error",
    )
    parser.add_argument(
        "--resume-step", type=_step, metavar="STEP", help="compute that step and all after it anew"
    )
    parser.add_argument(
        "--on-mismatch",
        choices=("refuse", "recompute", "keep"),
        default="refuse",
        help="treatment of results of another version of the function (%(default)s)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a file that no run with this progress file has made",
    )
    parser.add_argument("--progress", metavar="FILE", help="progress file (RESULT.progress)")
    parser.add_argument(
        "--quiet", action="store_true", help="print nothing unless something goes wrong"
    )
    parser.set_defaults(run=_run, parser=parser, extra="offline")


def _run(args: argparse.Namespace) -> int:
    from .run import run  # pyarrow and the like

    return run(args, f"{args.program} {shlex.join(_without_resume_step(args.given))}")


def _without_resume_step(given: list[str]) -> list[str]:
    """Return the arguments that go on: the next run computes nothing anew a second time."""
    rest = iter(given)
    kept = []
    for each in rest:
        if each == "--resume-step":
            next(rest)
        elif not each.startswith("--resume-step="):
            kept.append(each)
    return kept


def _add_status(commands: Commands) -> None:
    about = "tell how far a run is, or how it ended: counts, rates, and failed rows"
    parser = commands.add_parser("status", help=about, description=f"{about.capitalize()}.")
    parser.add_argument("dest", metavar="result", help="as given to the run")
    parser.add_argument("--progress", metavar="FILE", help="as given to the run")
    parser.add_argument(
        "--failed", action="store_true", help="print the failed rows as JSON lines instead"
    )
    parser.set_defaults(run=_status, parser=parser, extra="offline")


def _status(args: argparse.Namespace) -> int:
    from .run import status

    return status(args)


def _add_export(commands: Commands) -> None:
    about = "write the rows that a run has committed so far to a file"
    parser = commands.add_parser("export", help=about, description=f"{about.capitalize()}.")
    parser.add_argument("result", help="as given to the run")
    parser.add_argument(
        "dest", nargs="?", metavar="file", help="file to write (RESULT.partial with its suffix)"
    )
    parser.add_argument("--progress", metavar="FILE", help="as given to the run")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a file that no export has written"
    )
    parser.set_defaults(run=_export, parser=parser, extra="offline")


def _export(args: argparse.Namespace) -> int:
    from .run import export_committed

    return export_committed(args)


def _json_list(text: str) -> list[Any]:
    return _json_of(list, text)


def _json_object(text: str) -> dict[str, Any]:
    return _json_of(dict, text)


def _json_of(kind: type[V], text: str) -> V:
    value = json.loads(text)
    if not isinstance(value, kind):
        raise ValueError
    return value


def _positive(text: str) -> int:
    return _at_least(1, int(text))


def _at_least_two(text: str) -> int:
    return _at_least(2, int(text))


def _seconds(text: str) -> float:
    return _at_least(0.1, float(text))


def _amount(text: str) -> float:
    return _at_least(0, float(text))


def _size(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _step(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _at_least(least: N, number: N) -> N:
    if not number >= least:  # which is how "nan" is refused, too
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
    return number


# argparse says "invalid integer value: 'x'"
_json_list.__name__, _json_object.__name__ = "JSON list", "JSON object"
_positive.__name__ = _at_least_two.__name__ = _size.__name__ = "integer"
_seconds.__name__ = _amount.__name__ = "number"
