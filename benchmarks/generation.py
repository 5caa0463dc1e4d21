"""How many tokens a second do callers with one prompt each get from a causal language model?

Run: python benchmarks/generation.py [--check] [--quick] [--save]

The model is a Llama with 31 million random weights on the CPU, in float32. There are three sets of
64 prompts, seeded: short (3 to 12 tokens, and 4 to 8 new), equal (64 tokens, and 64 new), and mixed
(3 to 200 tokens, and 8 to 128 new). Only requested new tokens count. There are three ways, in
turns, each in a process of its own, because threads of OpenMP belong to the thread that computes.
Each process has run each set once before it is measured.

- ours, called from 64 threads;
- the model's `generate` on left-padded batches in the order of arrival, each to its longest text;
- continuous batching of transformers, with attention "paged|sdpa", 256 blocks of memory, and one
  manager that stays.

Our texts are compared with the texts of each prompt alone. Then 32 coroutines read streams of
the mixed prompts, one after another: the time to the first piece of a text.

Short and equal texts are bounded below 1: a text that joins alone costs a pass of its own, and
passes of `generate` have more rows.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import multiprocessing
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, Final

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.generation import ContinuousBatchingConfig

from batched.generation import TextGenerator
from report import Figure, Result, conclude, options

PROMPTS, QUICK_PROMPTS = 64, 16
BATCH_SIZE = 32
THREADS = 64
READERS = 32
VOCABULARY = 8192
PAD, END = 0, 1
FIRST: Final = 4
"""First token that is not special."""
SEED = 1

Work = list[tuple[list[int], int]]
"""Prompts as ids, and the new tokens of each."""
Tokens = list[list[int]]

SETS: Final = {
    "short": ((3, 12), (4, 8)),
    "equal": ((64, 64), (64, 64)),
    "mixed": ((3, 200), (8, 128)),
}
"""Least and most tokens of the prompts, and of the new tokens, of each set."""
WAYS: Final = {
    "ours": "ours",
    "padded batches of generate": "padded",
    "continuous batching of transformers": "paged",
}
"""Method of `Ways` for each way."""
LEAST_OF_GENERATE: Final = {"short": 0.75, "equal": 0.85, "mixed": 1.7}


def make_model() -> Any:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.1,
        pad_token_id=PAD,
        eos_token_id=None,  # texts are as long as was asked for
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def make_tokenizer() -> Any:
    """Return a tokenizer with a word for each id, so that prompts have the planned lengths."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0")


def make_work(kind: str, count: int) -> Work:
    draw = random.Random(SEED)
    sizes, limits = SETS[kind]
    return [
        (
            [draw.randrange(FIRST, VOCABULARY) for _ in range(draw.randint(*sizes))],
            draw.randint(*limits),
        )
        for _ in range(count)
    ]


class Ways:
    """Ways to generate the same texts."""

    def __init__(self) -> None:
        self._model = make_model()
        self._manager: Any = None

    @functools.cached_property
    def _generator(self) -> Any:
        return TextGenerator(self._model, make_tokenizer(), details=True, batch_size=BATCH_SIZE)

    def ours(self, work: Work) -> Tokens:
        with ThreadPoolExecutor(THREADS) as callers:
            found = callers.map(lambda one: self._generator(one[0], max_new_tokens=one[1]), work)
            return [generation.tokens for generation in found]

    def padded(self, work: Work) -> Tokens:
        found: Tokens = []
        for first in range(0, len(work), BATCH_SIZE):
            some = work[first : first + BATCH_SIZE]
            width = max(len(ids) for ids, _ in some)
            padded = torch.tensor([[PAD] * (width - len(ids)) + ids for ids, _ in some])
            made = self._model.generate(
                padded,
                attention_mask=(padded != PAD).long(),
                max_new_tokens=max(limit for _, limit in some),
            )
            found += [
                row[width:][:limit].tolist() for row, (_, limit) in zip(made, some, strict=True)
            ]
        return found

    def paged(self, work: Work) -> Tokens:
        if self._manager is None:
            config = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1)
            self._model.set_attn_implementation("paged|sdpa")
            self._manager = self._model.init_continuous_batching(
                config, ContinuousBatchingConfig(num_blocks=256)
            )
            self._manager.start()
        names = [self._manager.add_request(ids, max_new_tokens=limit) for ids, limit in work]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = self._manager.get_result(timeout=120)
            found[result.request_id] = result.generated_tokens
        return [found[name] for name in names]

    def stop(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True)

    def alone(self, work: Work) -> Tokens:
        return [
            self._model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=limit,
            )[0, len(ids) :].tolist()
            for ids, limit in work
        ]

    def streams(self, work: Work) -> list[float]:
        """Return the time to the first piece of each text (s)."""
        times: list[float] = []
        texts = iter(work)

        async def read() -> None:
            for ids, limit in texts:
                began, first = time.perf_counter(), 0.0
                async for _ in self._generator.stream(ids, max_new_tokens=limit):
                    first = first or time.perf_counter() - began
                times.append(first)

        async def main() -> None:
            await asyncio.gather(*[read() for _ in range(READERS)])

        asyncio.run(main())
        return times


@functools.cache
def ways() -> Ways:
    return Ways()


def run_way(method: str, *work: Work) -> tuple[float, Any]:
    """Return the time of one run (s), and its texts or times. Runs in a process of its own."""
    began = time.perf_counter()
    found = getattr(ways(), method)(*work)
    return time.perf_counter() - began, found


def measured(arguments: argparse.Namespace) -> Result:
    count = QUICK_PROMPTS if arguments.quick else PROMPTS
    sets = {kind: make_work(kind, count) for kind in SETS}
    context = multiprocessing.get_context("spawn")
    processes = {name: ProcessPoolExecutor(1, context) for name in WAYS}

    def run(name: str, method: str, *work: Work) -> tuple[float, Any]:
        return processes[name].submit(run_way, method, *work).result()

    right = 0
    for work in sets.values():  # the first round is not measured
        texts = {name: run(name, method, work)[1] for name, method in WAYS.items()}
        alone = run("padded batches of generate", "alone", work)[1]
        right += sum(mine == own for mine, own in zip(texts["ours"], alone, strict=True))
    rates: dict[tuple[str, str], list[float]] = {}
    first: list[float] = []
    for _ in range(1 if arguments.quick else 3):
        for kind, work in sets.items():
            wanted = sum(limit for _, limit in work)
            for name, method in WAYS.items():
                seconds, _ = run(name, method, work)
                rates.setdefault((kind, name), []).append(wanted / seconds)
        _, times = run("ours", "streams", sets["mixed"])
        first.append(1e3 * statistics.median(times))
    run("continuous batching of transformers", "stop")
    for process in processes.values():
        process.shutdown()
    figures = [
        Figure(
            f"{kind}: ours vs {name}",
            rates[kind, "ours"],
            "tokens/s",
            Figure(name, rates[kind, name], "tokens/s"),
            at_least=None
            if arguments.quick or name.startswith("continuous")
            else LEAST_OF_GENERATE[kind],
        )
        for kind in SETS
        for name in list(WAYS)[1:]
    ]
    return Result(
        [
            *figures,
            Figure(
                "texts of ours that are those of prompts alone",
                [float(right)],
                f"of {len(SETS) * count}",
                at_least=float(len(SETS) * count),
            ),
            Figure("mixed: stream, median time to the first piece", first, "ms"),
        ],
        ("torch", "transformers"),
        notes=[f"{count} prompts in each set."],
    )


def main() -> None:
    arguments = options(__doc__ or "")
    conclude(lambda: measured(arguments), arguments)


if __name__ == "__main__":
    main()
