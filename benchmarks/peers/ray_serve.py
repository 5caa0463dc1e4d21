"""Ray Serve: callers and their function share a replica, because `@serve.batch` works nowhere
else.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"})
import ray  # it reads the lines above
from ray import serve as ray_serve

from peers import questions
from peers.model import BATCH_SIZE, load
from traffic import AsyncCall, Function, awaited

CORES = os.cpu_count() or 1
ONGOING = 100_000
"""Most requests that a replica takes at once: practically no limit."""


@asynccontextmanager
async def for_coroutines(
    function: Function, batch_size: int, *, wait_ms: float
) -> AsyncIterator[AsyncCall]:
    run = awaited(function)

    async def all_of(items: list[Any]) -> list[Any]:
        return await run(items)

    yield ray_serve.batch(max_batch_size=batch_size, batch_wait_timeout_s=wait_ms / 1e3)(all_of)


class Replica:
    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        from peers import ray_serve as module  # here, because what is pickled cannot hold it

        return await questions.answered(module, question)


class Embedder:
    """Replica of a server."""

    def __init__(self, wait_ms: float) -> None:
        encode = awaited(load())

        async def vectors(texts: list[str]) -> list[Any]:
            return await encode(texts)

        self._vector = ray_serve.batch(
            max_batch_size=BATCH_SIZE, batch_wait_timeout_s=wait_ms / 1e3
        )(vectors)

    async def __call__(self, request: Any) -> list[list[float]]:
        body = await request.json()
        return [(await self._vector(body["texts"][0])).tolist()]


def _start(deployment: type, *arguments: Any, port: int | None = None) -> Any:
    ray.init(
        num_cpus=CORES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        configure_logging=False,
    )
    if port is None:
        ray_serve.start(proxy_location="Disabled")
    else:
        ray_serve.start(http_options={"host": "127.0.0.1", "port": port})
    # a model gets one thread otherwise
    options = {"max_ongoing_requests": ONGOING, "ray_actor_options": {"num_cpus": CORES}}
    bound = ray_serve.deployment(**options)(deployment).bind(*arguments)
    return ray_serve.run(bound, route_prefix="/embed")


def answer_all(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    handle = _start(Replica)
    try:
        return [handle.answer.remote(question).result() for question in asked]
    finally:
        ray_serve.shutdown()
        ray.shutdown()


def serve(port: int, *, wait_ms: float) -> None:
    _start(Embedder, wait_ms, port=port)
    while True:  # until it is killed
        time.sleep(3600)
