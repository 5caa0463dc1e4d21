"""How many tokens a second do callers with one prompt each get from a causal language model?

Run: python benchmarks/generation.py [--check] [--quick] [--save]

The model is a Llama with some million random weights on the CPU, in float32. 256 prompts have 3 to
200 tokens and get 8 to 128 new tokens each, seeded. Only requested new tokens count. There are four
ways, in turns:

- ours, called from 32 threads;
- transformers' pipeline with a `batch_size`, which runs to the longest text of each batch;
- the model's `generate` on right-padded batches in the order of arrival, a common mistake: its
  texts are wrong (see the last lines of the table);
- `generate` one by one.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

from batched.generation import TextGenerator
from report import Figure, Result, conclude, options

PROMPTS, QUICK_PROMPTS = 256, 32
BATCH_SIZE = 32
THREADS = 64
VOCABULARY = 2048
PAD, END = 0, 1
FIRST: Final = 4
"""First token that is not special."""
SEED = 1

Work = list[tuple[list[int], int]]
"""Prompts as ids, and the new tokens of each."""
Tokens = list[list[int]]

LEAST_OF_PIPELINE = 1.3
LEAST_OF_ONE_BY_ONE = 3.0


def make_model() -> Any:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
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


class Ways:
    """Ways to generate the same texts."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._model = make_model()
        tokenizer = make_tokenizer()
        self._texts = [" ".join(f"w{token}" for token in ids) for ids, _ in work]
        self._generator = TextGenerator(self._model, tokenizer, details=True, batch_size=BATCH_SIZE)
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


def measured(arguments: argparse.Namespace) -> Result:
    work = make_work(QUICK_PROMPTS if arguments.quick else PROMPTS)
    wanted = sum(limit for _, limit in work)
    ways = Ways(work)
    named: dict[str, Callable[[], Tokens]] = {
        "ours": ways.ours,
        "pipeline": ways.pipeline,
        "right-padded batches": ways.right_padded,
        "one by one": ways.one_by_one,
    }
    rates: dict[str, list[float]] = {name: [] for name in named}
    right: dict[str, int] = {}
    for _ in range(1 if arguments.quick or arguments.check else 2):
        texts: dict[str, Tokens] = {}
        for name, way in named.items():
            began = time.perf_counter()
            texts[name] = way()
            rates[name].append(wanted / (time.perf_counter() - began))
        for name, found in texts.items():
            same = zip(found, texts["one by one"], strict=True)
            right[name] = sum(mine == alone for mine, alone in same)
    bounded = not arguments.quick
    baseline = {
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
