"""BentoML: the dispatcher behind `@bentoml.api(batchable=True)`, and a server of its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

os.environ["BENTOML_DO_NOT_TRACK"] = "True"
from bentoml._internal.marshal.dispatcher import CorkDispatcher  # it reads the line above

from traffic import AsyncCall, Function, awaited

LATENCY = 60_000
"""Default of `max_latency_ms`; longer calls are refused."""


@asynccontextmanager
async def for_coroutines(function: Function, batch_size: int) -> AsyncIterator[AsyncCall]:
    run = awaited(function)

    async def all_of(items: tuple[Any, ...]) -> list[Any]:  # it passes a tuple
        return await run(list(items))

    def refused() -> NoReturn:
        raise RuntimeError("refused")

    dispatcher = CorkDispatcher(LATENCY, batch_size, fallback=refused, get_batch_size=lambda _: 1)
    try:
        yield dispatcher(all_of)
    finally:
        dispatcher.shutdown()


def serve(port: int) -> None:
    """Serve from one process, as `bentoml serve --development` does."""
    import uvicorn

    from peers.bento_service import Embedder

    service: Any = Embedder
    uvicorn.run(service.to_asgi(), port=port, log_level="warning")
