"""aiodataloader: calls of one turn of the loop form a batch. Keys are wrapped, because the library
merges equal keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiodataloader import DataLoader

from traffic import AsyncCall, Function, awaited


@asynccontextmanager
async def for_coroutines(function: Function, batch_size: int) -> AsyncIterator[AsyncCall]:
    run, one_at_a_time = awaited(function), asyncio.Lock()

    async def load(items: list[Any]) -> list[Any]:
        async with one_at_a_time:
            return await run(items)

    yield DataLoader(load, max_batch_size=batch_size, cache=False).load
