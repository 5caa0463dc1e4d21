"""What does batching itself cost? Calls of a function that does nothing, beside what asyncio's own futures cost in the same run.

Run: python benchmarks/overhead.py [--check] [--quick]
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Awaitable, Callable
from typing import Any

import batched
from report import Figure, conclude, options, repeated

ITEMS = 20_000


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
    fn = batched.dynamically(nothing)
    fn(0)
    start = time.perf_counter()
    for i in range(1000):
        fn(i)
    took = (time.perf_counter() - start) / 1000 * 1e6
    fn.shutdown()
    return took


def gathered(call: Callable[[int], Awaitable[Any]]) -> Callable[[], float]:
    async def main() -> float:
        start = time.perf_counter()
        await asyncio.gather(*(call(i) for i in range(ITEMS)))
        return (time.perf_counter() - start) / ITEMS * 1e6

    return lambda: asyncio.run(main())


def floor() -> float:
    """A coroutine per item that queues a bare future and awaits it, and a task that resolves them: what any design pays on asyncio."""

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
    runs = 3 if arguments.quick else 9
    acall, aio = batched.dynamically(batch_size=256)(nothing), batched.aio.dynamically(batch_size=256)(nothing_async)
    conclude(
        [
            Figure("list call of 20,000, batch_size=256, per item", repeated(list_call(256), runs), "us", 0.05),
            Figure("list call of 20,000, batch_size=32, per item", repeated(list_call(32), runs), "us"),
            Figure("lone synchronous call", repeated(lone_caller, runs), "us"),
            Figure("asyncio floor: a coroutine and a future, per item", repeated(floor, runs), "us"),
            Figure("aio gather of 20,000, per item", repeated(gathered(aio), runs), "us"),
            Figure("acall gather of 20,000, per item", repeated(gathered(acall.acall), runs), "us"),
        ],
        arguments,
    )


if __name__ == "__main__":
    main()
