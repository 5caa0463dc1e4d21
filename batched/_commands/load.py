"""Closed-loop callers, threads or coroutines: each calls again once its last call is answered."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from .. import AsyncBatched, Batched

T = TypeVar("T")


@dataclass(frozen=True)
class Calls:
    """Answered calls of some callers."""

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
        """Return a percentile of the latencies, by the nearest rank (s)."""
        rank = math.ceil(len(self.latencies) * percent / 100)
        return sorted(self.latencies)[rank - 1]


async def make_calls(
    call: Callable[[T], Any],
    items: Iterator[T],
    callers: int,
    answered: Callable[[T, Any], object],
    *,
    until: float = math.inf,
    least: int = 0,
    warm_up: float = 0.0,
) -> Calls:
    """Call `call` with each item from `callers` coroutines if it is awaited, else from threads.

    Callers share `items`, which is no generator, because threads cannot share one. `answered` gets
    each item with its answer. After `until`, a moment of `perf_counter`, and `least` answers, only
    the first call of a caller begins. The share `warm_up` of all calls does not count, in whole
    rounds of the callers.
    """
    answers: list[tuple[float, float]] = []  # moment of the answer, and latency

    def is_over(item: T, answer: Any, began: float) -> bool:
        answered(item, answer)
        now = time.perf_counter()
        answers.append((now, now - began))
        return now > until and len(answers) >= least

    def call_from_thread() -> None:
        for item in items:
            began = time.perf_counter()
            if is_over(item, call(item), began):
                return

    async def call_from_coroutine() -> None:
        for item in items:
            began = time.perf_counter()
            if is_over(item, await call(item), began):
                return

    batched = call if isinstance(call, (Batched, AsyncBatched)) else None
    if batched:
        batched.reset_stats()
    caller: Callable[[], Any] = call_from_coroutine
    threads = ThreadPoolExecutor(callers)
    if not inspect.iscoroutinefunction(call):
        run = asyncio.get_running_loop().run_in_executor
        caller = functools.partial(run, threads, call_from_thread)
    started = time.perf_counter()
    try:
        await asyncio.gather(*(caller() for _ in range(callers)))
    except BaseException as error:
        until, least = -math.inf, 0  # callers end with their present call
        threads.shutdown(wait=isinstance(error, Exception))
        raise
    threads.shutdown()
    ended = time.perf_counter()
    skipped = int(len(answers) * warm_up) // callers * callers
    if skipped:
        started, _ = answers[skipped - 1]
    latencies = [latency for _, latency in answers[skipped:]]
    mean_batch = batched.stats.avg_batch_size if batched else 1.0
    return Calls(ended - started, latencies, mean_batch)
