"""No library: a queue, and one thread or task that takes the waiting items."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from queue import SimpleQueue
from typing import Any

from traffic import AsyncCall, Call, Function, awaited


@contextmanager
def for_threads(function: Function, batch_size: int) -> Iterator[Call]:
    queue = SimpleQueue[Any]()

    def call(item: Any) -> Any:
        queue.put((item, answer := Future[Any]()))
        return answer.result()

    def work() -> None:
        while first := queue.get():
            batch = [first]
            while len(batch) < batch_size and not queue.empty():
                batch.append(queue.get())
            results = function([item for item, _ in batch])
            for (_, answer), result in zip(batch, results, strict=True):
                answer.set_result(result)

    worker = threading.Thread(target=work)
    worker.start()
    yield call
    queue.put(None)
    worker.join()


@asynccontextmanager
async def for_coroutines(function: Function, batch_size: int) -> AsyncIterator[AsyncCall]:
    queue, run = asyncio.Queue[Any](), awaited(function)

    async def call(item: Any) -> Any:
        queue.put_nowait((item, answer := asyncio.get_running_loop().create_future()))
        return await answer

    async def work() -> None:
        while first := await queue.get():
            batch = [first]
            while len(batch) < batch_size and not queue.empty():
                batch.append(queue.get_nowait())
            results = await run([item for item, _ in batch])
            for (_, answer), result in zip(batch, results, strict=True):
                answer.set_result(result)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work())
        yield call
        queue.put_nowait(None)
