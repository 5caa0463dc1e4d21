"""batchlet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from batchlet import AsyncBatcher, BatchPolicy

from traffic import AsyncCall, Function, awaited


@asynccontextmanager
async def for_coroutines(function: Function, batch_size: int) -> AsyncIterator[AsyncCall]:
    async with AsyncBatcher(awaited(function), policy=BatchPolicy(max_items=batch_size)) as batcher:
        yield batcher.submit
