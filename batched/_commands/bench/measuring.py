"""Measurements of a batch function: times of batches by size, and calls of closed-loop callers."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from rich.progress import Progress

from ..display import count
from ..load import make_calls
from .advice import AT_ONCE, Way
from .target import Target

ROUNDS = 5
"""Turns of each size and of each way to call, because a machine may be slower for a while."""
LEAST = 3
"""Least calls of each caller of a batched function in a turn."""
WARM_UP = 0.3
"""Share of the calls of a turn that do not count: callers need a moment to come together."""
TURN = 0.15
"""Time after which no more batches are begun in a turn (s)."""


def doublings(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and at last `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


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
    # a batch of items of different length might be cut short; rows of features are padded before
    settings: Any = {"length": None}
    if target.takes_features:
        settings["unpad"] = False  # learning to unpad would take calls, too
    batched = target.batched.with_options(
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
        return target.seconds[-1]

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


def ways_to_call(target: Target, callers: int, batch_size: int) -> list[Way]:
    """Return the ways to compare: first unbatched, for one caller and for all callers.

    Next comes one caller of the batched function, and then all callers, few settings first.
    """
    batched = [
        {"batch_size": batch_size, AT_ONCE: at_once, **more}
        for more in ([{}, {"length": len}] if target.has_lengths() else [{}])
        for at_once in (1, 2, 4, 8)
    ]
    unbatched = [Way(1), Way(callers)]
    return [*unbatched, Way(1, batched[0]), *(Way(callers, settings) for settings in batched)]


async def measure_loads(
    target: Target, ways: Sequence[Way], seconds: float, progress: Progress
) -> None:
    """Add rounds to all ways, of which each lasts for `seconds`. The first round does not count.

    A way in which the function may run several times at once gets the error instead, if the
    function raised.

    Raises:
        argparse.ArgumentError: the function raised.
        BatchedError: the function did not return one result per item.
    """
    async with contextlib.AsyncExitStack() as stack:
        calls: list[tuple[Any, Any]] = []
        for way in ways:
            call, arguments = target.unbatched
            if way.settings is not None:
                # without limits on the queue: a refused call would end the measurement
                batched: Any = target.batched.with_options(
                    max_queue_size=None, queue_timeout_ms=None, **way.settings
                )
                stack.push_async_callback(batched.aclose, cancel_futures=True)
                call, arguments = batched, target.arguments()
            calls.append((call, cycle(arguments)))
        for number in progress.track(range(1 + ROUNDS), description=f"{len(ways)} ways to call"):
            for way, (call, items) in zip(ways, calls, strict=True):
                if way.error:
                    continue
                turn: Any = {"until": time.perf_counter() + seconds, "warm_up": WARM_UP}
                if way.settings is not None:
                    turn["least"] = LEAST * way.callers
                try:
                    with target.report_errors(f"called by {count(way.callers, 'caller')} {way}"):
                        made = await make_calls(call, items, way.callers, **turn)
                except argparse.ArgumentError as error:
                    if not way.at_once:
                        raise
                    way.error = str(error)
                    way.rounds.clear()
                else:
                    way.rounds.extend([made] * (number > 0))
