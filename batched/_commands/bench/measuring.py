"""Measurements of a batch function: the times of batches by size, and what closed-loop callers
get.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle
from typing import Any

import numpy as np

from ..._function.batched import parts_of
from ..._function.function import BatchFunction
from ..load import Calls, measure_calls
from .advice import BatchTime
from .target import AnyBatched, Target

ROUNDS = 8
"""Times that each size gets its turn; in turns, because a machine may be slower for a while."""
LEAST_ROUNDS = 5
ROUNDS_SECONDS = 6.0
"""After this long a round is the last one, if there were `LEAST_ROUNDS`."""
TURN = 0.1
"""Seconds after which no more batches are begun in a turn."""
QUICK = 1e-3
"""A batch that takes less than this (s) is run several times in a row, to show how fast it is when
all it needs is in the caches.
"""
MOST_CALLS = 20
"""Most calls in a row with one batch."""
LEAST_TIME = 1e-9
"""Time of a call (s) during which the clock has not moved on."""

WARM_UP = 0.2
"""Part of `seconds` for which callers warm up."""


def doublings(most: int) -> list[int]:
    """1, 2, 4 and so on, and at last `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


class TimedFunction:
    """Batch function that is called `calls` times for each batch, and the times (s)
    that this took.
    """

    def __init__(self, function: BatchFunction) -> None:
        func = function.func
        self.calls = 1  # of the function for each batch
        self.seconds: list[float] = []  # of each call

        @functools.wraps(func)
        def timed(*args: Any, **kwargs: Any) -> Any:
            output: Any = None
            for call_args in self._calls(args):
                started = time.perf_counter()
                output = func(*call_args, **kwargs)
                finish_on_gpu()
                self._record(started)
            return output

        @functools.wraps(func)
        async def timed_async(*args: Any, **kwargs: Any) -> Any:
            output: Any = None
            for call_args in self._calls(args):
                started = time.perf_counter()
                output = await func(*call_args, **kwargs)
                self._record(started)
            return output

        self.func = timed_async if function.coroutine else timed

    def _record(self, started: float) -> None:
        self.seconds.append(max(time.perf_counter() - started, LEAST_TIME))

    def _calls(self, args: tuple[Any, ...]) -> Iterator[list[Any]]:
        """Arguments of each call, which gets a list or dict of its own: it may change it."""
        for _ in range(self.calls):
            yield [type(arg)(arg) if type(arg) in (list, dict) else arg for arg in args]


def finish_on_gpu() -> None:
    """Waits for what a GPU has been told to do, which is part of what was asked for."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of all calls of the function with batches of one size."""

    size: int
    """Items."""
    seconds: list[float]

    @property
    def median(self) -> BatchTime:
        return BatchTime(self.size, statistics.median(self.seconds))

    @property
    def rate(self) -> float:
        """Items per second, one call after the other."""
        return self.size * len(self.seconds) / sum(self.seconds)

    @property
    def mean_batch(self) -> float:
        """Items."""
        return self.size

    def percentile(self, percent: int) -> float:
        """Percentile of the times of calls (s)."""
        return float(np.percentile(self.seconds, percent))


async def time_batches(
    target: Target, sizes: list[int], advance: Callable[[], object]
) -> list[Timing]:
    """Times of batches of each size, with the function called where it will run, and nothing around
    it timed.

    Each batch goes through a batcher, which makes the arguments and checks what the function
    returns; the first of each size does not count.

    Raises:
        argparse.ArgumentError: the function raised, or did not return one result per item.
    """
    parts = parts_of(target.batched)
    timed = TimedFunction(parts.function)
    function = dataclasses.replace(parts.function, func=timed.func)
    plain: AnyBatched = type(target.batched)(function, owner=parts.owner)
    # a batch of items of different length might be cut short; rows of features are padded before
    settings: Any = {"length": None}
    if target.takes_features:
        settings["unpad"] = False  # learning how to would take calls, too
    batched = plain.with_options(
        batch_size=sizes[-1],
        max_batch_tokens=None,
        flush="eager",
        isolate_errors=False,
        on_oom="raise",
        on_batch=None,
        **settings,
    )
    batches = {size: target.batches(size) for size in sizes}
    timings = {size: Timing(size, []) for size in sizes}
    calls = dict.fromkeys(sizes, 1)

    async def run_batch(size: int) -> list[float]:
        timed.calls, timed.seconds = calls[size], []
        with target.report_errors(f"given a batch of {size}"):
            await batched.acall(next(batches[size]))
        return timed.seconds

    try:
        for size in sizes:
            seconds = min(await run_batch(size))
            calls[size] = min(max(round(QUICK / seconds), 1), MOST_CALLS)
        end = time.perf_counter() + ROUNDS_SECONDS
        for done in range(ROUNDS):
            if done >= LEAST_ROUNDS and time.perf_counter() > end:
                break
            for size in sizes:
                turn_end = time.perf_counter() + TURN
                timings[size].seconds.extend(await run_batch(size))
                while time.perf_counter() < turn_end:
                    timings[size].seconds.extend(await run_batch(size))
            advance()
    finally:
        await batched.aclose(cancel_futures=True)
    return list(timings.values())


class Load(Calls[Any, Any]):
    """Calls of some callers who make them for a while."""

    def __init__(self, arguments: list[Any], callers: int, seconds: float) -> None:
        super().__init__(ItemsUntil(time.perf_counter() + seconds, arguments), callers)


class ItemsUntil:
    """Numbered items, over and over, until a moment on `perf_counter`; threads may share it."""

    def __init__(self, end: float, items: list[Any]) -> None:
        self._end = end
        self._items = zip(count(), cycle(items))  # neither ends

    def __iter__(self) -> ItemsUntil:
        return self

    def __next__(self) -> tuple[int, Any]:
        if time.perf_counter() >= self._end:
            raise StopIteration
        return next(self._items)


async def measure_load(target: Target, callers: int, batch_size: int, seconds: float) -> Load:
    """Calls of that many callers, after a warm-up.

    Raises:
        argparse.ArgumentError: the function raised, or did not return one result per item.
    """
    # as the user has it, but for what turns callers away: that would count as answers here
    batched: AnyBatched = target.batched.with_options(
        batch_size=batch_size, max_queue_size=None, queue_timeout_ms=None
    )
    arguments = target.arguments()
    try:
        with target.report_errors(f"called by {callers} {'callers' if callers > 1 else 'caller'}"):
            await measure_calls(batched, Load(arguments, callers, WARM_UP * seconds))
            return await measure_calls(batched, Load(arguments, callers, seconds))
    finally:
        await batched.aclose(cancel_futures=True)
