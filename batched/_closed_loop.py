"""Closed-loop callers, threads or coroutines: each makes its next call when it has the answer to
its last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
R = TypeVar("R")


class Calls(Generic[T, R]):
    """What some callers, who share the items, come to."""

    def __init__(self, items: Iterator[tuple[int, T]]) -> None:
        self.seconds = 0.0  # from the first call to the last answer
        self._items = items  # each with its number; no generator, because threads cannot share one
        self._latencies: list[float] = []  # from call to answer (s)

    @property
    def latencies(self) -> NDArray[np.float64]:
        """From call to answer (s), of each call."""
        return np.array(self._latencies)

    @property
    def rate(self) -> float:
        """Calls per second."""
        return len(self._latencies) / self.seconds

    def latency(self, percent: int) -> float:
        """A percentile over the calls (ms)."""
        return float(np.percentile(self.latencies, percent)) * 1e3

    def make_calls(self, call: Callable[[T], R]) -> None:
        """All that one caller does, if it is a thread."""
        for number, item in self._items:
            started = time.perf_counter()
            self.answered(number, call(item), started)

    async def await_calls(self, call: Callable[[T], Awaitable[R]]) -> None:
        """All that one caller does, if it is a coroutine."""
        for number, item in self._items:
            started = time.perf_counter()
            self.answered(number, await call(item), started)

    def keep(self, number: int, answer: R) -> None:
        """Is told every answer; does nothing with it."""

    def answered(self, number: int, answer: R, started: float) -> None:
        self._latencies.append(time.perf_counter() - started)
        self.keep(number, answer)


def by_threads(call: Callable[[T], R], calls: Calls[T, R], callers: int) -> None:
    """Has that many threads make the calls."""
    threads = ThreadPoolExecutor(callers)
    try:
        for caller in [threads.submit(calls.make_calls, call) for _ in range(callers)]:
            caller.result()
    finally:
        threads.shutdown(wait=False)  # interrupted, they end when the server is shut down


async def by_coroutines(
    call: Callable[[T], Awaitable[R]], calls: Calls[T, R], callers: int
) -> None:
    """Has that many coroutines make the calls, on this loop."""
    await asyncio.gather(*(calls.await_calls(call) for _ in range(callers)))
