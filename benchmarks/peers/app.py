"""A FastAPI application in front of a library for coroutines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from peers.model import BATCH_SIZE, load


class Body(BaseModel):
    texts: list[str]


def app(peer: ModuleType, settings: dict[str, Any]) -> FastAPI:
    """Return an application that embeds the first of the texts of a request."""

    @asynccontextmanager
    async def lifespan(made: FastAPI) -> AsyncIterator[None]:
        async with peer.for_coroutines(load(), BATCH_SIZE, **settings) as made.state.call:
            yield

    made = FastAPI(lifespan=lifespan)

    @made.post("/embed")
    async def embed(body: Body) -> list[list[float]]:
        return [(await made.state.call(body.texts[0])).tolist()]

    return made
