"""What does batching itself cost? Calls of a function that does nothing, beside what threads and
asyncio cost without any library.

Run: python benchmarks/overhead.py [--check] [--quick] [--save]
"""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import batched
from report import Figure, conclude, options

ITEMS = 20_000
LONE_CALLS = 1000
THREADS = 64


def nothing(items: list[int]) -> list[int]:
    return items


async def nothing_async(items: list[int]) -> list[int]:
    return items


def list_call(batch_size: int) -> Callable[[], float]:
    fn = batched.dynamically(batch_size=batch_size)(nothing)
    items = list(range(ITEMS))

    def measure() -> float:
        start = time.perf_counter()
        fn(items)
        return (time.perf_counter() - start) / ITEMS * 1e6

    return measure


def lone_caller() -> float:
    with batched.dynamically(nothing) as fn:
        fn(0)
        start = time.perf_counter()
        for i in range(LONE_CALLS):
            fn(i)
        return (time.perf_counter() - start) / LONE_CALLS * 1e6


def by_threads() -> float:
    """From that many threads, each with one call after another."""
    with batched.dynamically(batch_size=THREADS)(nothing) as fn:

        def caller() -> None:
            for i in range(ITEMS // THREADS):
                fn(i)

        threads = [threading.Thread(target=caller) for _ in range(THREADS)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (time.perf_counter() - start) / (ITEMS // THREADS * THREADS) * 1e6


def hand_off() -> float:
    """From one thread to another and back, through two locks: what any design pays whose function
    has a thread of its own.
    """
    there, back = threading.Lock(), threading.Lock()
    there.acquire()
    back.acquire()

    def worker() -> None:
        for _ in range(LONE_CALLS):
            there.acquire()
            back.release()

    thread = threading.Thread(target=worker)
    thread.start()
    start = time.perf_counter()
    for _ in range(LONE_CALLS):
        there.release()
        back.acquire()
    took = (time.perf_counter() - start) / LONE_CALLS * 1e6
    thread.join()
    return took


def gathered(call: Callable[[int], Awaitable[Any]]) -> Callable[[], float]:
    async def main() -> float:
        start = time.perf_counter()
        await asyncio.gather(*(call(i) for i in range(ITEMS)))
        return (time.perf_counter() - start) / ITEMS * 1e6

    return lambda: asyncio.run(main())


def floor() -> float:
    """A coroutine per item that queues a bare future and awaits it, and a task that resolves them:
    what any design pays on asyncio.
    """

    async def main() -> float:
        loop = asyncio.get_running_loop()
        queue: collections.deque[asyncio.Future[int]] = collections.deque()

        async def one() -> int:
            future: asyncio.Future[int] = loop.create_future()
            queue.append(future)
            return await future

        async def resolve() -> None:
            answered = 0
            while answered < ITEMS:
                await asyncio.sleep(0)
                while queue:
                    queue.popleft().set_result(answered)
                    answered += 1

        start = time.perf_counter()
        await asyncio.gather(resolve(), *(one() for _ in range(ITEMS)))
        return (time.perf_counter() - start) / ITEMS * 1e6

    return asyncio.run(main())


def main() -> None:
    arguments = options(__doc__ or "")
    acall, aio = (
        batched.dynamically(batch_size=256)(nothing),
        batched.aio.dynamically(batch_size=256)(nothing_async),
    )
    measures = {
        "list call of 20,000, batch_size=256, per item": list_call(256),
        "list call of 20,000, batch_size=32, per item": list_call(32),
        "lone synchronous call": lone_caller,
        "floor: from a thread to another and back": hand_off,
        "64 threads, per item": by_threads,
        "floor: a coroutine and a future, per item": floor,
        "aio gather of 20,000, per item": gathered(aio),
        "acall gather of 20,000, per item": gathered(acall.acall),
    }
    bounds = dict(zip(measures, (0.03, 0.1, 60.0), strict=False))
    runs: dict[str, list[float]] = {name: [] for name in measures}
    # in turns, for the machine may be slower for a while
    for _ in range(1 + (5 if arguments.quick else 15)):
        for name, measure in measures.items():
            runs[name].append(measure())
    runs = {name: each[1:] for name, each in runs.items()}
    of_aio, of_acall = (
        [
            took / least
            for took, least in zip(
                runs[f"{way} gather of 20,000, per item"],
                runs["floor: a coroutine and a future, per item"],
                strict=True,
            )
        ]
        for way in ("aio", "acall")
    )
    conclude(
        [
            *(Figure(name, runs[name], "us", bounds.get(name)) for name in measures),
            Figure("aio gather", of_aio, "floors", 1.3),
            Figure("acall gather", of_acall, "floors", 1.4),
        ],
        arguments,
    )


if __name__ == "__main__":
    main()
