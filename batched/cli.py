"""The command line, `python -m batched`: one subparser per command, each of which imports what it needs when it runs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from . import __version__

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["_Parser"]

INTERRUPTED = 128 + 2
"""The exit status of a command that SIGINT ended, as shells count."""


class _Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong; the usage is a `--help` away."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status of a command line: 0, 1 if what the command checks does not hold, 130 if it was interrupted.

    Raises:
        SystemExit: with 2 and one sentence on stderr, if the arguments are wrong or a package is missing; with 0, after `--help`.
    """
    parser = _parser()
    args = parser.parse_args(argv)
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
        command.error(f'{package} is not installed; run `pip install -e ".[{args.extra}]"` in the checkout of batched')
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> _Parser:
    parser = _Parser(prog="python -m batched", description="One batch function, many callers: calls of one item run in full batches.")
    parser.add_argument("--version", action="version", version=f"batched {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    _add_demo(commands)
    return parser


def _add_demo(commands: Commands) -> None:
    about = "compare a real embedding model with and without batching, under concurrent callers"
    parser = commands.add_parser("demo", help=about, description=f"{about[0].upper()}{about[1:]}; takes under two minutes on two cores.")
    parser.add_argument(
        "--model", metavar="NAME_OR_PATH", help="any SentenceTransformer model (default: all-MiniLM-L6-v2 from its package)"
    )
    parser.add_argument(
        "--callers", type=_positive, default=64, metavar="N", help="concurrent callers, each with one call at a time (%(default)s)"
    )
    parser.add_argument("--sentences", type=_positive, default=512, metavar="N", help="sentences to embed in each run (%(default)s)")
    parser.add_argument("--batch-size", type=_positive, default=32, metavar="N", help="most sentences in one batch (%(default)s)")
    parser.add_argument("--output", type=Path, default="batched-demo.png", metavar="FILE", help="picture of the comparison (%(default)s)")
    parser.set_defaults(run=_demo, parser=parser, extra="demo")


def _demo(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    from ._demo import demo  # numpy and the like, which other commands do without

    return demo(args.model, callers=args.callers, sentences=args.sentences, batch_size=args.batch_size, output=args.output, began=began)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


_positive.__name__ = "integer"  # argparse says "invalid integer value: 'x'"
