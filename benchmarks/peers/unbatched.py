"""No batching: a model that takes one item at a time, in a thread of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from traffic import AsyncCall, Function, awaited


@asynccontextmanager
async def for_coroutines(function: Function, batch_size: int) -> AsyncIterator[AsyncCall]:  # noqa: ARG001  # all take it
    run = awaited(function)

    async def call(item: Any) -> Any:
        return (await run([item]))[0]

    yield call
