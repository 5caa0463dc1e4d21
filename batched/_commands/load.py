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
    least: int = 0,
    warm_up: float = 0.0,
    answered: Callable[[T, Any], object] | None = None,
) -> Calls:
    """Call `call` with each item from `callers` coroutines if it is awaited, else from threads.

    Callers share `items`, which is no generator, because threads cannot share one. After `until`, a
    moment of `perf_counter`, and `least` answers, only the first call of a caller begins. The share
    `warm_up` of all calls does not count, in whole rounds of the callers. `answered` gets each item
    with its answer.
    """
    answers: list[tuple[float, float]] = []  # moment of the answer, and latency

    def is_over(item: T, answer: Any, began: float) -> bool:
        now = time.perf_counter()
        answers.append((now, now - began))
        if answered:
            answered(item, answer)
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
        batched._function.warned.add("single calls")  # a lone caller is meant to call so
        batched.reset_stats()
    caller: Callable[[], Any] = call_from_coroutine
    threads = ThreadPoolExecutor(callers)
    if not inspect.iscoroutinefunction(call):
        run = asyncio.get_running_loop().run_in_executor
        caller = functools.partial(run, threads, call_from_thread)
    started = time.perf_counter()
    try:
        await asyncio.gather(*(caller() for _ in range(callers)))
    finally:
        until, least = -math.inf, 0  # interrupted callers end with their present call
        threads.shutdown(wait=False)
    ended = time.perf_counter()
    skipped = int(len(answers) * warm_up) // callers * callers
    if skipped:
        started, _ = answers[skipped - 1]
    latencies = [latency for _, latency in answers[skipped:]]
    mean_batch = batched.stats.avg_batch_size if batched else 1.0
    return Calls(callers, ended - started, latencies, mean_batch)
