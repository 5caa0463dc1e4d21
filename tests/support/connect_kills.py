"""Client under kills: 64 callers, threads and coroutines, of a model process that may be killed.

Each line of the output is the end of one call: its item, its outcome, and how long it took (s). The
program ends when its input is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import batched
from batched._connect import starting
from batched._execution.attempts import finish_now

CALLERS = 32
"""Callers of each kind."""

starting.PAUSE = 0.1  # type: ignore[misc]  # so that most kills find a process
double = batched.connect[int, int]("served_model:double", linger_s=1)
stopped = threading.Event()
numbers = itertools.count(os.getpid() << 32)


async def keep_calling(ask: Callable[[int], Awaitable[int]]) -> None:
    while not stopped.is_set():
        item, began = next(numbers), time.monotonic()
        try:
            answer = await ask(item)
            outcome = "right" if answer == 2 * item else f"wrong: {answer!r}"
        except batched.errors.ServerGone:
            outcome = "gone"
        except Exception as error:
            outcome = f"wrong: {error!r}"
        os.write(1, f"{item} {time.monotonic() - began:.3f} {outcome}\n".encode())


async def plainly(item: int) -> int:
    return double(item)


async def main() -> None:
    await asyncio.gather(*[keep_calling(double.acall) for _ in range(CALLERS)])


threads = [
    threading.Thread(target=lambda: finish_now(keep_calling(plainly))) for _ in range(CALLERS)
]
threads.append(threading.Thread(target=asyncio.run, args=(main(),)))
for each in threads:
    each.start()
sys.stdin.read()
stopped.set()
for each in threads:
    each.join()
