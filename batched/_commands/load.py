"""Closed-loop callers, threads or coroutines: each makes its next call when it has the answer to
its last.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np

from .. import AsyncBatched, Batched, Stats

T = TypeVar("T")
R = TypeVar("R")
C = TypeVar("C", bound="Calls[Any, Any]")


class Calls(Generic[T, R]):
    """Calls of some callers, who share the items, and their latencies."""

    def __init__(self, items: Iterator[tuple[int, T]], callers: int) -> None:
        self.callers = callers
        self.seconds = 0.0  # from the first call to the last answer
        self.latencies: list[float] = []  # from call to answer (s), of each call
        self.stats: Stats | None = None  # of the batcher, if there is one
        self._items = items  # each with its number; no generator, because threads cannot share one

    @property
    def rate(self) -> float:
        """Calls per second."""
        return len(self.latencies) / self.seconds

    @property
    def mean_batch(self) -> float:
        """Items; 1 without a batcher."""
        return 1.0 if self.stats is None else self.stats.avg_batch_size

    def percentile(self, percent: int) -> float:
        """Percentile of the latencies (s)."""
        return float(np.percentile(self.latencies, percent))

    def make_calls(self, call: Callable[[T], R]) -> None:
        """Makes the calls of one caller that is a thread."""
        for number, item in self._items:
            started = time.perf_counter()
            self.record(number, call(item), started)

    async def await_calls(self, call: Callable[[T], Awaitable[R]]) -> None:
        """Makes the calls of one caller that is a coroutine."""
        for number, item in self._items:
            started = time.perf_counter()
            self.record(number, await call(item), started)

    def record(self, number: int, answer: R, started: float) -> None:
        """Notes the answer to a call that was `started` then, on `perf_counter`."""
        self.latencies.append(time.perf_counter() - started)
        self.keep(number, answer)

    def keep(self, number: int, answer: R) -> None:
        """Does nothing with the answer to item `number`; to be overridden."""


def run_threads(call: Callable[[T], R], calls: Calls[T, R]) -> None:
    """Has threads make the calls."""
    threads = ThreadPoolExecutor(calls.callers)
    try:
        for caller in [threads.submit(calls.make_calls, call) for _ in range(calls.callers)]:
            caller.result()
    finally:
        threads.shutdown(wait=False)  # interrupted, they end when the server is shut down


async def measure_calls(call: Any, calls: C) -> C:
    """Has callers, coroutines if they await `call`, else threads, make the calls; returns them."""
    batched = call if isinstance(call, (Batched, AsyncBatched)) else None
    if batched:
        batched.reset_stats()
    started = time.perf_counter()
    if inspect.iscoroutinefunction(call):
        await asyncio.gather(*(calls.await_calls(call) for _ in range(calls.callers)))
    else:
        await asyncio.to_thread(run_threads, call, calls)
    calls.seconds = time.perf_counter() - started
    calls.stats = batched.stats if batched else None
    return calls
