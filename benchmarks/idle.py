"""What do idle batchers cost? How often a process with fifty of them, each called once, goes to
sleep anew, beyond one with none.

Run: python benchmarks/idle.py [--check] [--quick] [--save]
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio
import uvloop

import batched
from report import Figure, conclude, options

BATCHERS = 50
ITEMS = [1, 2, 3, 4, 5, 6, 7, 8]
SETTLING = 1.0
"""Seconds that workers get to come to rest."""
QUIET = 5.0
"""Seconds that are counted."""

SETTINGS: list[dict[str, Any]] = [
    {"timeout_ms": 0.0},
    {"flush": "window"},
    {"flush": "window", "timeout_ms": 0.0},
    {"max_concurrent_batches": 4},
    {"max_queue_size": 1, "queue_timeout_ms": 100.0},
]
OF_THREADS: list[dict[str, Any]] = [
    *SETTINGS,
    {"prefetch": 1},
    {"prefetch": 1, "max_concurrent_batches": 4, "timeout_ms": 0.0},
]

Sleep = Callable[[float], Awaitable[object]]


def plain(items: list[int]) -> list[int]:
    return items


async def coroutine(items: list[int]) -> list[int]:
    return items


def fifty(decorator: Any, function: object, settings: list[dict[str, Any]]) -> list[Any]:
    """Batchers with each of these settings in turn; batches are of one item, so that a list has all
    workers started.
    """
    return [
        decorator(batch_size=1, **settings[i % len(settings)])(function) for i in range(BATCHERS)
    ]


def switches() -> int:
    """How often any thread of this process has gone to sleep by itself."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def blocking(batchers: list[Any]) -> int:
    for fn in batchers:
        assert fn(ITEMS) == ITEMS
    time.sleep(SETTLING)
    before = switches()
    time.sleep(QUIET)
    return switches() - before


async def awaiting(sleep: Sleep, batchers: list[Any]) -> int:
    for fn in batchers:
        assert await fn(ITEMS) == ITEMS
    await sleep(SETTLING)
    before = switches()
    await sleep(QUIET)
    return switches() - before


def trio_run(batchers: list[Any]) -> int:
    return trio.run(awaiting, trio.sleep, batchers)


def asyncio_run(batchers: list[Any]) -> int:
    return asyncio.run(awaiting(asyncio.sleep, batchers))


def uvloop_run(batchers: list[Any]) -> int:
    return uvloop.run(awaiting(asyncio.sleep, batchers))


RUNS: dict[str, Callable[[list[Any]], int]] = {
    "threads": blocking,
    "asyncio": asyncio_run,
    "uvloop": uvloop_run,
    "trio": trio_run,
}
MAKES: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "batched.dynamically": lambda: fifty(batched.dynamically, plain, OF_THREADS),
    "aio, functions": lambda: fifty(batched.aio.dynamically, plain, OF_THREADS),
    "aio, coroutine functions": lambda: fifty(batched.aio.dynamically, coroutine, SETTINGS),
}
PAIRS = [
    ("threads", "batched.dynamically"),
    *((run, make) for run in list(RUNS)[1:] for make in list(MAKES)[2:]),
]
"""Who calls what."""


def counted() -> dict[tuple[str, str], int]:
    """Context switches for each pair, and of each caller that calls nothing, side by side in
    processes of their own.
    """
    code = "import idle; print(idle.RUNS[{0!r}](idle.MAKES[{1!r}]()))"
    processes = {
        (run, make): subprocess.Popen(
            [sys.executable, "-c", code.format(run, make)],
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            text=True,
        )
        for run, make in [*((run, "none") for run in RUNS), *PAIRS]
    }
    return {pair: int(process.communicate()[0]) for pair, process in processes.items()}


def main() -> None:
    arguments = options(__doc__ or "")
    rounds = [counted() for _ in range(1 if arguments.quick else 3)]
    figures = [
        Figure(f"{run}: none", [float(found[run, "none"]) for found in rounds], "switches")
        for run in RUNS
    ]
    figures += [
        Figure(
            f"{run}: {BATCHERS} of {make}, beyond that",
            [float(found[run, make] - found[run, "none"]) for found in rounds],
            "switches",
            0.0,
        )
        for run, make in PAIRS
    ]
    conclude(figures, arguments)


if __name__ == "__main__":
    main()
