"""Measurements of a batch function: times of batches by size, and calls of closed-loop callers."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

from rich.progress import Progress

from ..._function.batched import parts_of
from ..._function.function import BatchFunction
from ..display import count
from ..load import Calls, make_calls
from .target import Target

ROUNDS = 5
"""Turns of each size; in turns, because a machine may be slower for a while."""
TURN = 0.15
"""Time after which no more batches are begun in a turn (s)."""
WARM_UP = 0.2
"""Share of `seconds` for which callers warm up, in addition."""


def doublings(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and at last `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def timed(function: BatchFunction, seconds: list[float]) -> Callable[..., Any]:
    """Return the function itself, with the time of each call added to `seconds` (s)."""
    func = function.func

    @functools.wraps(func)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        with stopwatch(seconds):
            return await func(*args, **kwargs)

    return awaited if function.coroutine else stopwatch(seconds)(func)


@contextmanager
def stopwatch(seconds: list[float]) -> Iterator[None]:
    """Add the time of a block, or of each call of a function, to `seconds` (s)."""
    began = time.perf_counter()
    yield
    finish_on_gpu()
    seconds.append(time.perf_counter() - began)


def finish_on_gpu() -> None:
    """Wait until the GPU has done all submitted work, which belongs to the call."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


async def time_batches(
    target: Target, sizes: list[int], progress: Progress
) -> dict[int, list[float]]:
    """Return the times of the function alone (s), by size of the batch.

    Each batch goes through a batcher, which makes the arguments, calls the function in its usual
    thread, and checks the results. The first batch of each size does not count.

    Raises:
        argparse.ArgumentError: the function raised.
        BatchedError: the function did not return one result per item.
    """
    parts = parts_of(target.batched)
    seconds: list[float] = []
    function = dataclasses.replace(parts.function, func=timed(parts.function, seconds))
    plain = type(target.batched)(function, owner=parts.owner)
    # a batch of items of different length might be cut short; rows of features are padded before
    settings: Any = {"length": None}
    if target.takes_features:
        settings["unpad"] = False  # learning to unpad would take calls, too
    batched = plain.with_options(
        batch_size=sizes[-1],
        max_batch_tokens=None,
        flush="eager",
        isolate_errors=False,
        on_oom="raise",
        **settings,
    )
    batches = {size: target.batches(size) for size in sizes}
    times: dict[int, list[float]] = {size: [] for size in sizes}

    async def run_batch(size: int) -> float:
        with target.report_errors(f"given a batch of {size}"):
            await batched.acall(next(batches[size]))
        return seconds.pop()

    try:
        for size in sizes:
            await run_batch(size)
        for _ in progress.track(range(ROUNDS), description=f"batches of 1 to {sizes[-1]}"):
            for size in sizes:
                end = time.perf_counter() + TURN
                times[size].append(await run_batch(size))
                while time.perf_counter() < end:
                    times[size].append(await run_batch(size))
    finally:
        await batched.aclose(cancel_futures=True)
    return times


async def measure_load(target: Target, callers: int, batch_size: int, seconds: float) -> Calls:
    """Return the calls that callers made in `seconds`, after a warm-up.

    Raises:
        argparse.ArgumentError: the function raised.
        BatchedError: the function did not return one result per item.
    """
    # the user's settings without limits on the queue: a refused call would end the measurement
    batched: Any = target.batched.with_options(
        batch_size=batch_size, max_queue_size=None, queue_timeout_ms=None
    )
    arguments = cycle(target.arguments())

    async def call_for(seconds: float) -> Calls:
        return await make_calls(batched, arguments, callers, until=time.perf_counter() + seconds)

    try:
        with target.report_errors(f"called by {count(callers, 'caller')}"):
            await call_for(WARM_UP * seconds)
            return await call_for(seconds)
    finally:
        await batched.aclose(cancel_futures=True)
