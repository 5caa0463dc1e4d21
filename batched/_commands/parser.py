"""Command line, `batched` or `python -m batched`.

Each command is a function of a module that is imported when the command runs, so that no command
needs the packages of another.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from .._installation import __version__, needs
from ..errors import BatchedError
from .reference import describe

INTERRUPTED: Final = 128 + 2
"""Exit status of a command that SIGINT ended, as shells count."""
BROKEN_PIPE: Final = 128 + 13
"""Exit status of a command after its output was closed; 13 is SIGPIPE."""


class _Parser(argparse.ArgumentParser):
    """Parser that reports an error in one sentence; the usage is a `--help` away."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None, *, prog: str = "batched") -> int:
    """Run a command line. Return its exit status.

    The status is 0, 1 if a check failed or a run was stopped, 130 if it was interrupted, 143 if it
    was terminated, or 141 if its output was closed.

    Raises:
        SystemExit: with 2 and one sentence on stderr, if the arguments are wrong or a package is
            missing; with 0, after `--help`.
    """
    parser = _parser(prog)
    args = parser.parse_args(argv)
    args.program = prog
    if args.command is None:
        parser.print_help()
        return 0
    command: _Parser = args.parser
    try:
        with needs("this command", args.extra):
            status: int = pkgutil.resolve_name(__package__ + args.run)(args)
        sys.stdout.flush()
        return status
    except (ModuleNotFoundError, argparse.ArgumentError) as error:
        command.error(str(error))
    except BrokenPipeError:  # a reader, as `head`, has gone
        # Python flushes the rest as it exits, and that would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (BatchedError, OSError) as error:
        command.error(describe(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser(prog: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        description="One batch function, many callers: calls of one item run in full batches.",
    )
    parser.add_argument("--version", action="version", version=f"batched {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")

    def add(name: str, run: str, extra: str, about: str, more: str = "") -> _Parser:
        command = commands.add_parser(
            name, help=about, description=f"{about}{more}.", allow_abbrev=False
        )
        command.set_defaults(parser=command, run=run, extra=extra)
        return command

    _add_demo_options(
        add(
            "demo",
            ".demo:demo",
            "demo",
            "Compare a real embedding model with and without batching, under concurrent callers",
            "; takes under two minutes on two cores",
        )
    )
    _add_bench_options(
        add(
            "bench",
            ".bench:bench",
            "bench",
            "Measure a batch function of yours, by size of the batch and under concurrent callers, "
            "unbatched and batched, and recommend a batch_size",
            "; takes about twenty seconds",
        )
    )
    _add_run_options(
        add(
            "run",
            ".run:run",
            "offline",
            "Run a batch function over a CSV, JSON Lines or Parquet file; started again, it goes "
            "on where it was",
            ". Name a Pipeline for further settings. Exit status: 0 done, 1 stopped because too "
            "much failed, 2 wrong arguments or input, 130 interrupted (Ctrl-C), 143 terminated",
        )
    )
    serve = add(
        "serve",
        ".serve:serve",
        "",
        "Serve a batched function on a Unix socket, for functions that batched.connect makes",
        "; SIGTERM and Ctrl-C end it once accepted calls are answered",
    )
    serve.add_argument("target", nargs="?", metavar="module:function", help="a batched function")
    serve.add_argument(
        "--socket", type=Path, required=True, metavar="PATH", help="path of the socket"
    )
    serve.add_argument(
        "--check",
        action="store_true",
        help="instead: exit with 0 if a process listens on the socket, and with 1 if none does",
    )
    status = add(
        "status",
        ".run:status",
        "offline",
        "Show how far a run is, or how it ended: counts, rates, and failed rows",
    )
    status.add_argument("dest", metavar="result", help="as given to the run")
    status.add_argument("--progress", metavar="FILE", help="as given to the run")
    status.add_argument(
        "--failed", action="store_true", help="print the failed rows as JSON lines instead"
    )
    export = add(
        "export",
        ".run:export_committed",
        "offline",
        "Write the rows that a run has committed so far to a file",
    )
    export.add_argument("result", help="as given to the run")
    export.add_argument("dest", metavar="file", help="file to write")
    export.add_argument("--progress", metavar="FILE", help="as given to the run")
    export.add_argument("--overwrite", action="store_true", help="replace a file of that name")
    return parser


def _add_demo_options(parser: _Parser) -> None:
    parser.add_argument(
        "--model",
        metavar="NAME_OR_PATH",
        help="any SentenceTransformer model (default: all-MiniLM-L6-v2 from its package)",
    )
    _add_count(parser, "--callers", "concurrent callers, each with one call at a time", 64)
    _add_count(parser, "--sentences", "sentences to embed in each run", 512)
    _add_count(parser, "--batch-size", "most sentences in one batch", 32)


def _add_bench_options(parser: _Parser) -> None:
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
        help=".txt, each line an item; .csv; or JSON Lines, each an item",
    )
    parser.add_argument(
        "--column", metavar="NAME", help="of the items, in a .csv file or in objects of JSON Lines"
    )
    _add_count(parser, "--max-batch-size", "most items in one batch", 64, least=2)
    parser.add_argument(
        "--concurrency",
        type=_at_least(1),
        metavar="N",
        help="callers at once (64 threads, or 256 coroutines of a coroutine function)",
    )


def _add_count(parser: _Parser, option: str, about: str, default: int, *, least: int = 1) -> None:
    about += " (%(default)s)"
    parser.add_argument(option, type=_at_least(least), default=default, metavar="N", help=about)


def _add_run_options(parser: _Parser) -> None:
    parser.add_argument(
        "target",
        metavar="module:function",
        help="takes a list; plain, a coroutine function, decorated, or a class built once per "
        "worker; or an offline.Pipeline",
    )
    parser.add_argument(
        "source",
        help="file, folder, glob or URI: CSV, JSON Lines or Parquet; or - for JSON Lines on "
        "standard input",
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
        metavar="JSON",
        help="list of arguments after the list of items; of a class, for its constructor",
    )
    parser.add_argument(
        "--max-failed",
        type=float,
        metavar="X",
        help="end once more rows have failed: a number of them or, below 1, a share",
    )
    parser.add_argument(
        "--key", metavar="COLUMN", help="by which rows are known again (their number)"
    )
    parser.add_argument(
        "--batch-size",
        type=_int_or_text,
        metavar="N",
        help='most rows in one batch, or "auto" to find it (the decorator\'s, or 32)',
    )
    parser.add_argument(
        "--workers",
        type=_at_least(1),
        metavar="N",
        help="batches that run at once (the function's own, or 1)",
    )
    parser.add_argument(
        "--engine",
        choices=["ray"],
        help="where the function computes (on this machine); the cluster is the one around, or the "
        "one of RAY_ADDRESS",
    )
    parser.add_argument(
        "--resume-step",
        type=_int_or_text,
        metavar="STEP",
        help="compute that step and all after it anew",
    )
    parser.add_argument(
        "--keep", type=_names, metavar="A,B", help="columns of the source in the result (all)"
    )
    parser.add_argument(
        "--limit", type=_at_least(1), metavar="N", help="rows that are read, for a trial (all)"
    )
    parser.add_argument(
        "--keep-failed",
        dest="failed",
        action="store_const",
        const="keep",
        default="drop",
        help="keep failed rows in the result, with the error in a column _error",
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


def _json_list(text: str) -> list[Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list):
        raise argparse.ArgumentTypeError(f"must be a JSON list, got {text!r}")
    return value


def _int_or_text(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _names(text: str) -> list[str]:
    return text.split(",")


def _at_least(least: int) -> Callable[[str], int]:
    """Return the type of an option with a least value."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number
