"""A server with Starlette, as a user types it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import batched
from batched.asgi import BatchedMiddleware


@batched.aio.dynamically(batch_size=64, length=len, max_queue_size=1000, on_full="raise")
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with shout:
        await shout("warm up")
        yield


async def endpoint(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await shout(request.path_params["text"]))


app = Starlette(
    routes=[Route("/shout/{text}", endpoint)],
    middleware=[Middleware(BatchedMiddleware)],
    lifespan=lifespan,
)
