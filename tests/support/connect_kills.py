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

import batched
from batched._connect import starting

CALLERS = 32
"""Callers of each kind."""

starting.PAUSE = 0.1  # type: ignore[misc]  # so that most kills find a process
double = batched.connect[int, int]("served_model:double", linger_s=1)
stopped = threading.Event()
numbers = itertools.count(os.getpid() << 32)


def outcome(item: int, answer: object) -> str:
    if isinstance(answer, batched.errors.ServerGone):
        return "gone"
    return "right" if answer == 2 * item else f"wrong: {answer!r}"


def report(item: int, answer: object, began: float) -> None:
    line = f"{item} {time.monotonic() - began:.3f} {outcome(item, answer)}\n"
    os.write(1, line.encode())


def call_from_thread() -> None:
    while not stopped.is_set():
        item, began = next(numbers), time.monotonic()
        answer: object
        try:
            answer = double(item)
        except Exception as error:
            answer = error
        report(item, answer, began)


async def call_from_coroutine() -> None:
    while not stopped.is_set():
        item, began = next(numbers), time.monotonic()
        answer: object
        try:
            answer = await double.acall(item)
        except Exception as error:
            answer = error
        report(item, answer, began)


async def main() -> None:
    await asyncio.gather(*[call_from_coroutine() for _ in range(CALLERS)])


threads = [threading.Thread(target=call_from_thread) for _ in range(CALLERS)]
threads.append(threading.Thread(target=asyncio.run, args=(main(),)))
for each in threads:
    each.start()
sys.stdin.read()
stopped.set()
for each in threads:
    each.join()
