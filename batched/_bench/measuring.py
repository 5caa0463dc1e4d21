"""What a batch function comes to: the times of batches by size, and what closed-loop callers
get.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle
from typing import Any

import numpy as np

from .. import AsyncBatched
from .._closed_loop import Calls, by_coroutines, by_threads
from .advice import BatchTime
from .subject import Face, Subject

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
"""With one batch."""
LEAST_TIME = 1e-9
"""What a call takes (s) where the clock has not moved on."""

WARM_UP = 0.2
"""The part of `seconds` for which callers warm up."""


def doublings(most: int) -> list[int]:
    """1, 2, 4 and so on, and at last `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


class Watch:
    """A batch function, `func`, that is called several times for each batch, and the times that
    this took.
    """

    def __init__(self, face: Face) -> None:
        func: Callable[..., Any] = face._function.func
        self.calls = 1  # of the function for each batch
        self.seconds: list[float] = []  # of each call

        @functools.wraps(func)
        def watched(*args: Any, **kwargs: Any) -> Any:
            output: Any = None
            for call_args in self._calls(args):
                started = time.perf_counter()
                output = func(*call_args, **kwargs)
                finish_on_gpu()
                self._note(started)
            return output

        @functools.wraps(func)
        async def watched_async(*args: Any, **kwargs: Any) -> Any:
            output: Any = None
            for call_args in self._calls(args):
                started = time.perf_counter()
                output = await func(*call_args, **kwargs)
                self._note(started)
            return output

        self.func = watched_async if face._function.coroutine else watched

    def _note(self, started: float) -> None:
        self.seconds.append(max(time.perf_counter() - started, LEAST_TIME))

    def _calls(self, args: tuple[Any, ...]) -> Iterator[list[Any]]:
        """The arguments of each call, which gets a list or dict of its own: it may change it."""
        for _ in range(self.calls):
            yield [type(arg)(arg) if type(arg) in (list, dict) else arg for arg in args]


def finish_on_gpu() -> None:
    """Waits for what a GPU has been told to do, which is part of what was asked for."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@dataclasses.dataclass(frozen=True)
class Timing:
    """All calls of the function with batches of one size."""

    size: int
    seconds: list[float]

    @property
    def median(self) -> BatchTime:
        return BatchTime(self.size, statistics.median(self.seconds))

    @property
    def rate(self) -> float:
        """Items per second, one call after the other."""
        return self.size * len(self.seconds) / sum(self.seconds)

    def percentile(self, percent: int) -> float:
        """Of the calls (s)."""
        return float(np.percentile(self.seconds, percent))


async def batch_times(
    subject: Subject, sizes: list[int], advance: Callable[[], object]
) -> list[Timing]:
    """How long the function takes for batches of each size, called where it will run, and not timed
    with anything around it.

    Each batch goes through a batcher, which makes the arguments and checks what the function
    returns; the first of each size does not count.

    Raises:
        argparse.ArgumentError: the function raised, or did not return one result per item.
    """
    watch = Watch(subject.face)
    function = dataclasses.replace(subject.face._function, func=watch.func)
    plain: Face = type(subject.face)(function, owner=subject.face._owner)
    # a batch of items of different length might be cut short; rows of features are padded before
    settings: Any = {"length": None}
    if subject.takes_features:
        settings["unpad"] = False  # learning how to would take calls, too
    face = plain.with_options(
        batch_size=sizes[-1],
        max_batch_tokens=None,
        flush="eager",
        isolate_errors=False,
        on_oom="raise",
        on_batch=None,
        **settings,
    )
    batches = {size: subject.batches(size) for size in sizes}
    timings = {size: Timing(size, []) for size in sizes}
    calls = dict.fromkeys(sizes, 1)

    async def run_batch(size: int) -> list[float]:
        watch.calls, watch.seconds = calls[size], []
        with subject.blamed(f"given a batch of {size}"):
            await face.acall(next(batches[size]))
        return watch.seconds

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
        await face.aclose(cancel_futures=True)
    return list(timings.values())


class Load(Calls[Any, Any]):
    """What some callers come to who make calls for a while."""

    def __init__(self, arguments: list[Any], callers: int, seconds: float) -> None:
        super().__init__(Until(time.perf_counter() + seconds, arguments))
        self.callers = callers
        self.mean_batch = 0.0  # items


class Until:
    """Numbered items, over and over, until a moment on `perf_counter`; threads may share it."""

    def __init__(self, end: float, items: list[Any]) -> None:
        self._end = end
        self._items = zip(count(), cycle(items))  # neither ends

    def __iter__(self) -> Until:
        return self

    def __next__(self) -> tuple[int, Any]:
        if time.perf_counter() >= self._end:
            raise StopIteration
        return next(self._items)


async def load(subject: Subject, callers: int, batch_size: int, seconds: float) -> Load:
    """What that many callers get, after a warm-up; coroutines if they await the function, else
    threads.

    Raises:
        argparse.ArgumentError: the function raised, or did not return one result per item.
    """
    # As the user has it, but for what turns callers away: that would count as answers here.
    face: Face = subject.face.with_options(
        batch_size=batch_size, max_queue_size=None, queue_timeout_ms=None
    )
    arguments = subject.arguments()

    async def calls(seconds: float) -> Load:
        made = Load(arguments, callers, seconds)
        started = time.perf_counter()
        with subject.blamed(f"called by {callers} {'callers' if callers > 1 else 'caller'}"):
            if isinstance(face, AsyncBatched):
                await by_coroutines(face, made, callers)
            else:
                await asyncio.to_thread(by_threads, face, made, callers)
        made.seconds = time.perf_counter() - started
        return made

    try:
        await calls(WARM_UP * seconds)
        face.reset_stats()
        measured = await calls(seconds)
        measured.mean_batch = face.stats.avg_batch_size
        return measured
    finally:
        await face.aclose(cancel_futures=True)
