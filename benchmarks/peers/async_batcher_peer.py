"""async-batcher."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from async_batcher.batcher import AsyncBatcher

from traffic import AsyncCall, Function, awaited


@asynccontextmanager
async def for_coroutines(
    function: Function, batch_size: int, *, wait_ms: float
) -> AsyncIterator[AsyncCall]:
    run = awaited(function)

    class Batcher(AsyncBatcher):  # type: ignore[misc]  # its types are not here
        async def process_batch(self, batch: list[Any]) -> list[Any]:
            return await run(batch)

    batcher = Batcher(max_batch_size=batch_size, max_queue_time=wait_ms / 1e3)
    try:
        yield batcher.process
    finally:
        await batcher.stop(force=True)
