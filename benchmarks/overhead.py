"""What does batching itself cost?

Calls of an empty function are compared with a bare loop, bare threads and bare asyncio; calls with
tensors, also with padding and copying them. The import is measured, too.

Run: python benchmarks/overhead.py [--check] [--quick] [--save]

Times are CPU times on one core, which depend little on other processes and on the placement of
threads. `closed_loop.py` measures the waits of callers.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

import batched
from peers.bare import for_threads
from report import Figure, Result, conclude, options

GATHERED = 20_000
LISTED = 100_000
LOOPS = 8
"""Runs of the bare loop, which is short, for one run of a list call."""
LONE_CALLS = 1000
THREADS, CALLS_OF_THREAD = 64, 100
ROWS_OF_TOKENS = 64
"""Calls in a batch of tensors, each with a row of 5 to 128 tokens."""
FEATURES = ("input_ids", "attention_mask", "token_type_ids")

Step = Callable[[], object]


def nothing(items: list[int]) -> list[int]:
    return items


async def nothing_async(items: list[int]) -> list[int]:
    return items


def timed(step: Step, times: int) -> float:
    """Return the CPU time of all threads in a step, divided by `times` (us)."""
    start = time.process_time()
    step()
    return (time.process_time() - start) / times * 1e6


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this process on one core, if the system allows it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def list_call(batch_size: int) -> float:
    fn = batched.dynamically(batch_size=batch_size)(nothing)
    items = list(range(LISTED))
    fn(items[:batch_size])
    return timed(lambda: fn(items), LISTED)


def bare_loop(batch_size: int) -> float:
    """Cut, call, time and join batches, with a lock before and after each."""
    items, lock, spent = list(range(LISTED)), threading.Lock(), 0.0

    def run() -> None:
        nonlocal spent
        results: list[int] = []
        for first in range(0, LISTED, batch_size):
            batch = items[first : first + batch_size]
            with lock:
                began = time.perf_counter()
            found = nothing(batch)
            with lock:
                spent += time.perf_counter() - began
            results.extend(found)

    def runs() -> None:
        for _ in range(LOOPS):
            run()

    return timed(runs, LOOPS * LISTED)


def lone_caller() -> float:
    with batched.dynamically(nothing) as fn:
        fn(0)
        return timed(lambda: [fn(i) for i in range(LONE_CALLS)], LONE_CALLS)


def hand_off() -> float:
    """Hand control to another thread and back, through two locks.

    A library that calls the function on a thread of its own cannot cost less.
    """
    there, back = threading.Lock(), threading.Lock()
    there.acquire()
    back.acquire()

    def worker() -> None:
        for _ in range(LONE_CALLS):
            there.acquire()
            back.release()

    def call() -> None:
        for _ in range(LONE_CALLS):
            there.release()
            back.acquire()

    thread = threading.Thread(target=worker)
    thread.start()
    took = timed(call, LONE_CALLS)
    thread.join()
    return took


def from_threads(call: Callable[[int], object]) -> float:
    def caller() -> None:
        for i in range(CALLS_OF_THREAD):
            call(i)

    def run() -> None:
        threads = [threading.Thread(target=caller) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return timed(run, THREADS * CALLS_OF_THREAD)


def by_threads() -> float:
    with batched.dynamically(batch_size=THREADS)(nothing) as fn:
        return from_threads(fn)


def bare_threads() -> float:
    with for_threads(nothing, THREADS, callers=THREADS) as call:
        return from_threads(call)


def python_calls(make: Callable[[], Any], run: Callable[[Any, int], object], times: int) -> float:
    """Return the number of calls of Python functions in all threads, divided by `times`."""
    count = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    threading.setprofile(note)  # before the worker starts
    fn = make()
    run(fn, 100)
    sys.setprofile(note)
    before = count
    run(fn, times)
    sys.setprofile(None)
    threading.setprofile(None)
    return (count - before) / times


def calls_of_a_list() -> float:
    return python_calls(
        lambda: batched.dynamically(batch_size=32)(nothing),
        lambda fn, batches: fn(list(range(32 * batches))),
        2000,
    )


def calls_of_a_lone_call() -> float:
    return python_calls(
        lambda: batched.dynamically(nothing), lambda fn, calls: [fn(i) for i in range(calls)], 2000
    )


def gathered(call: Callable[[int], Awaitable[Any]]) -> float:
    async def main() -> None:
        await asyncio.gather(*(call(i) for i in range(GATHERED)))

    return timed(lambda: asyncio.run(main()), GATHERED)


def bare_gather() -> float:
    """Await a bare future in a coroutine per item; one task resolves all futures.

    A library on asyncio cannot cost less.
    """
    queue: deque[asyncio.Future[int]] = deque()

    async def one(_: int) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        queue.append(future)
        return await future

    async def resolve() -> None:
        answered = 0
        while answered < GATHERED:
            await asyncio.sleep(0)
            while queue:
                queue.popleft().set_result(answered)
                answered += 1

    async def main() -> None:
        await asyncio.gather(resolve(), *(one(i) for i in range(GATHERED)))

    return timed(lambda: asyncio.run(main()), GATHERED)


chance = random.Random(0)
TENSORS = [
    {name: torch.randint(1, 30_000, (1, length)) for name in FEATURES}
    for length in [chance.randint(5, 128) for _ in range(ROWS_OF_TOKENS)]
]
TIMES = 20


def with_tensors() -> float:
    """Call with tensors, one row a call; each caller gets its row of tokens back."""

    @batched.aio.inference.dynamically(batch_size=ROWS_OF_TOKENS)
    async def fn(features: dict[str, torch.Tensor]) -> torch.Tensor:
        return features["input_ids"]

    async def main() -> None:
        for _ in range(TIMES):
            await asyncio.gather(*map(fn, TENSORS))

    return timed(lambda: asyncio.run(main()), TIMES * ROWS_OF_TOKENS)


def padded_and_copied() -> float:
    """Call without tensors; pad the rows of each feature, and copy each row of one."""

    async def main() -> None:
        for _ in range(TIMES):
            await asyncio.gather(*map(AIO, range(ROWS_OF_TOKENS)))
            for name in FEATURES:
                pad_sequence([each[name][0] for each in TENSORS], batch_first=True)
            for each in TENSORS:
                each["input_ids"].clone()

    return timed(lambda: asyncio.run(main()), TIMES * ROWS_OF_TOKENS)


def in_new_interpreter(code: str) -> float:
    """Return the number that `code` prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)


def import_time(modules: str) -> float:
    """Return the CPU time of the import of `modules` (ms)."""
    return 1e3 * in_new_interpreter(
        f"import time; t = time.process_time(); import {modules}; print(time.process_time() - t)"
    )


def modules_loaded(modules: str) -> float:
    return in_new_interpreter(f"import sys, {modules}; print(len(sys.modules))")


STDLIB = "asyncio, concurrent.futures.thread, inspect"
"""Modules that every library with decorators for threads and coroutines imports."""
MODULES = 100
"""Modules that `batched` may load beyond `STDLIB`, its own included."""
IMPORT = 3.4
"""Largest ratio of the import time of `batched` to the import time of `STDLIB`."""

ACALL = batched.dynamically(batch_size=256)(nothing).acall
AIO = batched.aio.dynamically(batch_size=256)(nothing_async)

NOTES = (
    "List calls are bounded at 17 (measured: 12 to 16.5); of 100 modules, 77 are small and ours.",
)

Measure = Callable[[], float]
ROWS: dict[str, tuple[Measure, str, Measure, float]] = {
    f"list call of {LISTED:,}, batch_size=256, per item": (
        *(lambda: list_call(256), "bare loop", lambda: bare_loop(256), 17),
    ),
    f"list call of {LISTED:,}, batch_size=32, per item": (
        *(lambda: list_call(32), "bare loop", lambda: bare_loop(32), 17),
    ),
    "lone call": (lone_caller, "to another thread and back", hand_off, 4.5),
    f"{THREADS} threads, per call": (by_threads, "bare locks", bare_threads, 1.9),
    f"aio, gather of {GATHERED:,}, per call": (
        *(lambda: gathered(AIO), "coroutine and future", bare_gather, 1.7),
    ),
    f"acall, gather of {GATHERED:,}, per call": (
        *(lambda: gathered(ACALL), "coroutine and future", bare_gather, 1.9),
    ),
    f"aio, gather of {ROWS_OF_TOKENS} with three features, per call": (
        *(with_tensors, "items, padding and copies", padded_and_copied, 1.6),
    ),
}
"""Measurement, name of its floor, the floor, and the largest ratio to the floor."""

CALLS = {
    "list call, batch_size=32": ("calls_of_a_list()", "Python calls a batch", 27.0),
    "lone call": ("calls_of_a_lone_call()", "Python calls", 45.0),
}
"""Python calls of all threads, calls of the batch function included, and their bounds. Every 256th
batch also counts the statistics.
"""


def measured(rounds: int) -> Result:
    runs: dict[str, list[float]] = {name: [] for name in ROWS}
    floors: dict[str, list[float]] = {name: [] for name in ROWS}
    with one_core():
        for counts in [False] + [True] * rounds:  # one round does not count
            for name, (measure, _, floor, _) in ROWS.items():
                found = measure(), floor()
                if counts:
                    runs[name].append(found[0])
                    floors[name].append(found[1])
        imports = [(import_time("batched"), import_time(STDLIB)) for _ in range(rounds)]
    figures = [
        Figure(name, runs[name], "us", Figure(of, floors[name], "us"), at_most=bound)
        for name, (_, of, _, bound) in ROWS.items()
    ]
    ours, stdlib = map(list, zip(*imports, strict=True))
    beyond = modules_loaded("batched") - modules_loaded(STDLIB)
    figures += [
        Figure("import batched", ours, "ms", Figure(STDLIB, stdlib, "ms"), at_most=IMPORT),
        Figure(f"import batched, beyond {STDLIB}", [beyond], "modules", at_most=MODULES),
    ]
    figures += [
        Figure(
            name,
            [in_new_interpreter(f"import overhead; print(overhead.{code})")],
            unit,
            at_most=bound,
        )
        for name, (code, unit, bound) in CALLS.items()
    ]
    return Result(figures, ("torch",), notes=NOTES)


def main() -> None:
    arguments = options(__doc__ or "")
    conclude(lambda: measured(7 if arguments.quick else 21), arguments)


if __name__ == "__main__":
    main()
