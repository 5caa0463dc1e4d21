"""The command line, `batched` or `python -m batched`: one subparser per command, each of which
imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from ._installation import __version__

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["_Parser"]

N = TypeVar("N", int, float)

INTERRUPTED = 128 + 2
"""The exit status of a command that SIGINT ended, as shells count."""


class _Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong; the usage is a `--help` away."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None, *, prog: str = "batched") -> int:
    """The exit status of a command line: 0, 1 if what the command checks does not hold, 130 if it
    was interrupted.

    Raises:
        SystemExit: with 2 and one sentence on stderr, if the arguments are wrong or a package is
            missing; with 0, after `--help`.
    """
    parser = _parser(prog)
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
    parser.set_defaults(run=_demo, parser=parser, extra="demo")


def _demo(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    from ._demo import demo  # numpy and the like, which other commands do without

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
    from ._bench.command import Plan, bench

    plan = Plan(args.max_batch_size, args.batch_size, args.concurrency, args.seconds)
    return bench(args.target, args.input, plan=plan, output=args.output, began=began)


def _positive(text: str) -> int:
    return _at_least(1, int(text))


def _at_least_two(text: str) -> int:
    return _at_least(2, int(text))


def _seconds(text: str) -> float:
    return _at_least(0.1, float(text))


def _at_least(least: N, number: N) -> N:
    if not number >= least:  # which is how "nan" is refused, too
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
    return number


# argparse says "invalid integer value: 'x'"
_positive.__name__ = _at_least_two.__name__ = "integer"
_seconds.__name__ = "number"
