"""Callers of one function, in closed and open loops, and the moments of their answers.

Only the standard library is imported, because the interpreters of all peers use this module.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

Call = Callable[[Any], Any]
AsyncCall = Callable[[Any], Awaitable[Any]]
Function = Callable[[list[Any]], Any]
"""A batch function, plain or a coroutine function."""
BURST = 10
"""Calls in a burst."""
BURST_GAP = 0.015
"""Time between two calls of a burst (ms), plus or minus `SPREAD`: the time that a thread or a task
needs to call.
"""
SPREAD = 0.5
"""Largest deviation of a gap, as a share of it."""


@dataclass(frozen=True)
class Sleep:
    """Batch function that sleeps, and needs no core: `fixed_ms + per_item_ms * n` for n items."""

    fixed_ms: float
    per_item_ms: float

    def seconds(self, items: int) -> float:
        return (self.fixed_ms + self.per_item_ms * items) / 1e3

    def blocking(self, items: list[Any]) -> list[Any]:
        time.sleep(self.seconds(len(items)))
        return items

    async def awaiting(self, items: list[Any]) -> list[Any]:
        """Sleep to the next full millisecond.

        The timers of an event loop have this resolution, unless another event wakes the loop
        earlier. That would favour libraries that poll.
        """
        await asyncio.sleep(math.ceil(self.seconds(len(items)) * 1e3) / 1e3)
        return items


def awaited(function: Function) -> Callable[[list[Any]], Awaitable[list[Any]]]:
    """Return a coroutine function for peers that take no other. A plain function runs in a thread
    of its own.
    """
    if inspect.iscoroutinefunction(function):
        return function
    thread = ThreadPoolExecutor(1)

    async def run(items: list[Any]) -> list[Any]:
        return list(await asyncio.get_running_loop().run_in_executor(thread, function, list(items)))

    return run


def by_threads(call: Call, callers: int, items: Sequence[Any]) -> list[float]:
    """Call from `callers` threads, each of which takes the next item as soon as it has its answer.
    Return the moments of the answers, in seconds from the start.
    """
    coming, answers = iter(items), list[float]()

    def caller() -> None:
        for item in coming:
            call(item)
            answers.append(time.perf_counter())

    start = time.perf_counter()
    with ThreadPoolExecutor(callers) as threads:
        for done in [threads.submit(caller) for _ in range(callers)]:
            done.result()
    return sorted(answer - start for answer in answers)


async def by_coroutines(call: AsyncCall, callers: int, items: Sequence[Any]) -> list[float]:
    """Call as `by_threads`, from coroutines."""
    coming, answers = iter(items), list[float]()

    async def caller() -> None:
        for item in coming:
            await call(item)
            answers.append(time.perf_counter())

    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return [answer - start for answer in answers]


def rate(answers: Sequence[float], callers: int, warm_up: int) -> float:
    """Return the number of calls answered per second. The first `warm_up` calls of each caller do
    not count, and neither does the last one, when some callers have ended.
    """
    first, last = warm_up * callers - 1, len(answers) - callers - 1
    return (last - first) / (answers[last] - answers[first])


def arrivals(rate: float, calls: int, dice: Random, burst: int = 1) -> list[float]:
    """Return moments (s) of that many calls per millisecond, in bursts that begin at random."""
    moments, began = list[float](), 0.0
    for _ in range(math.ceil(calls / burst)):
        began += dice.expovariate(rate / burst) / 1e3
        moment = began
        for _ in range(burst):
            moments.append(moment)
            if burst > 1:
                moment += BURST_GAP / 1e3 * dice.uniform(1 - SPREAD, 1 + SPREAD)
    return sorted(moments)[:calls]


async def arriving(call: AsyncCall, moments: Sequence[float]) -> list[float]:
    """Call at the given moments (in seconds, ascending), independently of earlier answers. Return
    the latency of each call in seconds.

    Latency counts from the planned moment. Calls come from a thread, as the calls of a network do,
    because the timers of an event loop have a resolution of milliseconds.
    """
    loop = asyncio.get_running_loop()
    latencies = [0.0] * len(moments)
    start = time.perf_counter() + 0.02
    everyone = asyncio.Event()
    running = set[asyncio.Task[None]]()
    left = len(moments)

    async def one(number: int) -> None:
        nonlocal left
        try:
            await call(number)
        finally:
            latencies[number] = time.perf_counter() - start - moments[number]
            left -= 1
            if not left:
                everyone.set()

    def arrive(number: int) -> None:
        task = loop.create_task(one(number))
        running.add(task)

    def feed() -> None:
        for number, moment in enumerate(moments):
            if (early := start + moment - time.perf_counter()) > 0:
                time.sleep(early)
            loop.call_soon_threadsafe(arrive, number)

    feeder = threading.Thread(target=feed)
    feeder.start()
    await everyone.wait()
    feeder.join()
    for task in running:
        await task
    return latencies


def spans(step: Callable[[], object], runs: int) -> Iterator[float]:
    """Return the time of each run (s)."""
    for _ in range(runs):
        start = time.perf_counter()
        step()
        yield time.perf_counter() - start


async def async_spans(step: Callable[[], Awaitable[object]], runs: int) -> list[float]:
    """Return the time of each run of an awaitable step (s)."""
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        await step()
        found.append(time.perf_counter() - start)
    return found
