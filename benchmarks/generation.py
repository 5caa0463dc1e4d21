"""How many tokens a second do callers with one prompt each get from a causal language model?

Run: python benchmarks/generation.py [--check] [--quick] [--save]

The model is a Llama with 31 million random weights on the CPU, in float32. 64 prompts have 3 to
200 tokens and get 8 to 128 new tokens each, seeded. Only requested new tokens count. There are six
ways, in turns, each in a process of its own: threads of OpenMP belong to the thread that computes,
and each further thread that computes slows the rest down.

- ours, called from 64 threads;
- ours, with texts that join only once all texts have ended: what the cache of places gives alone;
- continuous batching of transformers, with attention "paged|sdpa" and 256 blocks of memory;
- transformers' pipeline with a `batch_size`, which runs to the longest text of each batch;
- the model's `generate` on right-padded batches in the order of arrival, a common mistake: its
  texts are wrong (see the last lines of the table);
- `generate` one by one.

Then 32 coroutines read streams, one text after another: the time to the first piece of a text, and
to its last piece.
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
    pipeline,
)
from transformers.generation import ContinuousBatchingConfig

import batched
from batched.generation import Generation, TextGenerator
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

LEAST_OF_PIPELINE = 1.3
LEAST_OF_PAGED = 1.2
LEAST_OF_ONE_BY_ONE = 3.0


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


def make_work(count: int) -> Work:
    draw = random.Random(SEED)
    return [
        (
            [draw.randrange(FIRST, VOCABULARY) for _ in range(draw.randint(3, 200))],
            draw.randint(8, 128),
        )
        for _ in range(count)
    ]


class Waves:
    """Rows that join only once all rows have left."""

    def __init__(self, rows: batched.Rows[Any, Generation, str]) -> None:
        self._rows = rows

    def __bool__(self) -> bool:
        return bool(self._rows)

    def join(self) -> Any:
        return [] if len(self._rows) else self._rows.join()

    def leave(self) -> list[int]:
        return self._rows.leave()


class Ways:
    """Ways to generate the same texts."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._model = make_model()
        tokenizer = make_tokenizer()
        self._texts = [" ".join(f"w{token}" for token in ids) for ids, _ in work]
        self._generator = TextGenerator(self._model, tokenizer, details=True, batch_size=BATCH_SIZE)
        self._prepare = self._generator._reader.prepare
        self._in_waves = batched.continuously(batch_size=BATCH_SIZE)(self._waves)
        self._pipeline = pipeline(
            "text-generation", model=self._model, tokenizer=tokenizer, batch_size=BATCH_SIZE
        )
        tokenizer.padding_side = "left"

    def ours(self) -> Tokens:
        with ThreadPoolExecutor(THREADS) as callers:
            found = callers.map(
                lambda one: self._generator(one[0], max_new_tokens=one[1]), self._work
            )
            return [generation.tokens for generation in found]

    def _waves(self, rows: batched.Rows[Any, Generation, str]) -> None:
        self._generator.__wrapped__(Waves(rows))

    def in_waves(self) -> Tokens:
        with ThreadPoolExecutor(THREADS) as callers:
            found = callers.map(
                lambda one: self._in_waves(self._prepare(one[0], {"max_new_tokens": one[1]})),
                self._work,
            )
            return [generation.tokens for generation in found]

    def paged(self) -> Tokens:
        config = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1)
        self._model.set_attn_implementation("paged|sdpa")
        manager = self._model.init_continuous_batching(
            config, ContinuousBatchingConfig(num_blocks=256)
        )
        manager.start()
        names = [manager.add_request(ids, max_new_tokens=limit) for ids, limit in self._work]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=120)
            found[result.request_id] = result.generated_tokens
        manager.stop(block=True)
        return [found[name] for name in names]

    def streams(self) -> list[tuple[float, float]]:
        """Return the times to the first and to the last piece of each text (s)."""
        times: list[tuple[float, float]] = []
        work = iter(self._work)

        async def read() -> None:
            for ids, limit in work:
                began, first = time.perf_counter(), 0.0
                async for _ in self._generator.stream(ids, max_new_tokens=limit):
                    first = first or time.perf_counter() - began
                times.append((first, time.perf_counter() - began))

        async def main() -> None:
            await asyncio.gather(*[read() for _ in range(READERS)])

        asyncio.run(main())
        return times

    def pipeline(self) -> Tokens:
        found: Tokens = []
        for first in range(0, len(self._work), BATCH_SIZE):
            part = slice(first, first + BATCH_SIZE)
            new = [limit for _, limit in self._work[part]]
            made: Any = self._pipeline(
                self._texts[part], max_new_tokens=max(new), return_tensors=True, do_sample=False
            )
            for each, (_, limit) in zip(made, self._work[part], strict=True):
                tokens = each[0]["generated_token_ids"]
                found.append(tokens[len(tokens) - max(new) :][:limit])
        return found

    def right_padded(self) -> Tokens:
        found: Tokens = []
        for first in range(0, len(self._work), BATCH_SIZE):
            some = self._work[first : first + BATCH_SIZE]
            width = max(len(ids) for ids, _ in some)
            padded = torch.tensor([ids + [PAD] * (width - len(ids)) for ids, _ in some])
            made = self._model.generate(
                padded,
                attention_mask=(padded != PAD).long(),
                max_new_tokens=max(limit for _, limit in some),
            )
            found += [
                row[width:][:limit].tolist() for row, (_, limit) in zip(made, some, strict=True)
            ]
        return found

    def one_by_one(self) -> Tokens:
        return [
            self._model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=limit,
            )[0, len(ids) :].tolist()
            for ids, limit in self._work
        ]


NAMES = {
    "ours": "ours",
    "ours, without joins": "in_waves",
    "continuous batching of transformers": "paged",
    "pipeline": "pipeline",
    "right-padded batches": "right_padded",
    "one by one": "one_by_one",
}
"""Method of `Ways` for each way."""


@functools.cache
def ways_of(count: int) -> Ways:
    return Ways(make_work(count))


def run_way(method: str, count: int) -> tuple[float, Any]:
    """Return the time of one run (s), and its texts or times. Runs in a process of its own."""
    ways = ways_of(count)
    began = time.perf_counter()
    found = getattr(ways, method)()
    return time.perf_counter() - began, found


def measured(arguments: argparse.Namespace) -> Result:
    work = make_work(QUICK_PROMPTS if arguments.quick else PROMPTS)
    wanted = sum(limit for _, limit in work)
    context = multiprocessing.get_context("spawn")
    processes = {name: ProcessPoolExecutor(1, context) for name in NAMES}

    def run(name: str, method: str) -> tuple[float, Any]:
        return processes[name].submit(run_way, method, len(work)).result()

    rates: dict[str, list[float]] = {name: [] for name in NAMES}
    first: list[float] = []
    whole: list[float] = []
    right: dict[str, int] = {}
    for _ in range(1 if arguments.quick or arguments.check else 2):
        texts: dict[str, Tokens] = {}
        for name, method in NAMES.items():
            seconds, texts[name] = run(name, method)
            rates[name].append(wanted / seconds)
        _, times = run("ours", "streams")
        first.append(1e3 * statistics.median([each for each, _ in times]))
        whole.append(1e3 * statistics.mean([each for _, each in times]))
        for name, found in texts.items():
            same = zip(found, texts["one by one"], strict=True)
            right[name] = sum(mine == alone for mine, alone in same)
    bounded = not arguments.quick
    baseline = {
        "ours, without joins": None,
        "continuous batching of transformers": LEAST_OF_PAGED if bounded else None,
        "pipeline": LEAST_OF_PIPELINE if bounded else None,
        "right-padded batches": None,
        "one by one": LEAST_OF_ONE_BY_ONE if bounded else None,
    }
    return Result(
        [
            *(
                Figure(
                    f"ours vs {name}",
                    rates["ours"],
                    "tokens/s",
                    Figure(name, rates[name], "tokens/s"),
                    at_least=bound,
                )
                for name, bound in baseline.items()
            ),
            *(
                Figure(
                    f"{name}: texts that are those of prompts alone",
                    [float(right[name])],
                    f"of {len(work)}",
                    at_least=float(len(work)) if name == "ours" else None,
                )
                for name in right
            ),
            Figure("stream, median time to the first piece", first, "ms"),
            Figure("stream, mean time to the last piece", whole, "ms"),
        ],
        ("torch", "transformers"),
        notes=[
            f"{len(work)} prompts of 3 to 200 tokens, 8 to 128 new ones each; {wanted:,} in all."
        ],
    )


def main() -> None:
    arguments = options(__doc__ or "")
    conclude(lambda: measured(arguments), arguments)


if __name__ == "__main__":
    main()
