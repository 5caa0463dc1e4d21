"""Closed-loop callers, threads or coroutines: each calls again once its last call is answered."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .. import AsyncBatched, Batched

T = TypeVar("T")


@dataclass(frozen=True)
class Calls:
    """Answered calls of some callers."""

    callers: int
    seconds: float
    """Time from the first call to the last answer (s)."""
    latencies: list[float]
    """Time from call to answer (s), of each call."""
    mean_batch: float = 1.0
    """Items in a batch on average; 1 without a batcher."""

    @property
    def rate(self) -> float:
        """Calls per second."""
        return len(self.latencies) / self.seconds

    def percentile(self, percent: int) -> float:
        """Return a percentile of the latencies (s)."""
        return float(np.percentile(self.latencies, percent))


async def make_calls(
    call: Callable[[T], Any],
    items: Iterator[T],
    callers: int,
    *,
    until: float = math.inf,
    answered: Callable[[T, Any], object] | None = None,
) -> Calls:
    """Call `call` with each item from `callers` coroutines if it is awaited, else from threads.

    Callers share `items`, which is no generator, because threads cannot share one. No call begins
    after `until`, a moment of `perf_counter`. `answered` gets each item with its answer.
    """
    latencies: list[float] = []

    def note(item: T, answer: Any, began: float) -> None:
        latencies.append(time.perf_counter() - began)
        if answered:
            answered(item, answer)

    def call_from_thread() -> None:
        for item in items:
            if (began := time.perf_counter()) > until:
                return
            note(item, call(item), began)

    async def call_from_coroutine() -> None:
        for item in items:
            if (began := time.perf_counter()) > until:
                return
            note(item, await call(item), began)

    batched = call if isinstance(call, (Batched, AsyncBatched)) else None
    if batched:
        batched._function.warned.add("single calls")  # a lone caller is meant to call so
        batched.reset_stats()
    started = time.perf_counter()
    if inspect.iscoroutinefunction(call):
        await asyncio.gather(*(call_from_coroutine() for _ in range(callers)))
    else:
        run, threads = asyncio.get_running_loop().run_in_executor, ThreadPoolExecutor(callers)
        try:
            await asyncio.gather(*(run(threads, call_from_thread) for _ in range(callers)))
        finally:
            threads.shutdown(wait=False)  # interrupted callers end when `call` is shut down
    seconds = time.perf_counter() - started
    return Calls(callers, seconds, latencies, batched.stats.avg_batch_size if batched else 1.0)
