"""Hand-off without any library: each caller waits on a lock or a future, and one thread or task
answers all callers.

The number of callers is given. Calls must be a multiple of a full batch, because a smaller batch
never leaves.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from queue import SimpleQueue
from typing import Any

from traffic import AsyncCall, Call, Function

Waiting = list[tuple[Any, threading.Lock]]
Awaiting = list[tuple[Any, asyncio.Future[None]]]


@contextmanager
def for_threads(function: Function, batch_size: int, *, callers: int) -> Iterator[Call]:
    full = min(batch_size, callers)
    mutex, ready = threading.Lock(), SimpleQueue[Waiting]()
    waiting: Waiting = []

    def call(item: Any) -> None:
        nonlocal waiting
        answered = threading.Lock()
        answered.acquire()
        with mutex:
            waiting.append((item, answered))
            if len(waiting) == full:
                ready.put(waiting)
                waiting = []
        answered.acquire()

    def work() -> None:
        while batch := ready.get():
            function([item for item, _ in batch])
            for _, answered in batch:
                answered.release()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield call
    finally:
        ready.put([])
        worker.join()


@asynccontextmanager
async def for_coroutines(
    function: Function, batch_size: int, *, callers: int
) -> AsyncIterator[AsyncCall]:
    full = min(batch_size, callers)
    loop, ready = asyncio.get_running_loop(), asyncio.Queue[Awaiting]()
    waiting: Awaiting = []

    async def call(item: Any) -> None:
        nonlocal waiting
        answered = loop.create_future()
        waiting.append((item, answered))
        if len(waiting) == full:
            ready.put_nowait(waiting)
            waiting = []
        await answered

    async def work() -> None:
        while batch := await ready.get():
            await function([item for item, _ in batch])
            for _, answered in batch:
                answered.set_result(None)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work())
        yield call
        ready.put_nowait([])
