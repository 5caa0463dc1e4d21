"""A server without a framework, as a user types it."""

from __future__ import annotations

from typing import Any

import batched
from batched.asgi import BatchedMiddleware


@batched.aio.dynamically(batch_size=64, length=len, max_queue_size=1000, on_full="raise")
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


@BatchedMiddleware
async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await receive()  # the start
        async with shout:
            await shout("warm up")
            await send({"type": "lifespan.startup.complete"})
            await receive()  # the end
        await send({"type": "lifespan.shutdown.complete"})
        return
    found = scope["path"].startswith("/shout/")
    body = await shout(scope["path"].removeprefix("/shout/")) if found else "Not Found"
    await send({"type": "http.response.start", "status": 200 if found else 404, "headers": []})
    await send({"type": "http.response.body", "body": body.encode()})
