"""This project."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import batched
from traffic import AsyncCall, Call, Function


def _settings(batch_size: int, flush: str, by_length: bool) -> dict[str, Any]:
    return {"batch_size": batch_size, "flush": flush} | ({"length": len} if by_length else {})


@contextmanager
def for_threads(
    function: Function, batch_size: int, *, flush: str = "auto", by_length: bool = False
) -> Iterator[Call]:
    with batched.dynamically(**_settings(batch_size, flush, by_length))(function) as fn:
        yield fn


@asynccontextmanager
async def for_coroutines(
    function: Function, batch_size: int, *, flush: str = "auto", by_length: bool = False
) -> AsyncIterator[AsyncCall]:
    async with batched.aio.dynamically(**_settings(batch_size, flush, by_length))(function) as fn:
        yield fn
