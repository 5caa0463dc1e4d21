"""A prompt in company gets the tokens that `generate` gives it alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import numpy
import torch
from transformers import SynthIDTextWatermarkingConfig

from batched import BatchRecord
from batched.generation import Generation, TextGenerator
from language_models import END, MODELS, VOCABULARY, model, tokenizer

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore:Unfeasible length")]

THREADS = 32
SETTINGS: list[dict[str, Any]] = [
    {"eos_token_id": list(range(20, 60))},
    {"stop_strings": ["e", "qu", "1"]},
    {"max_new_tokens": 5},
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 12},
]
PAIRS = [{**one, **other} for one, other in combinations(SETTINGS, 2)]
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 2.0, "top_k": 7},
    {"top_p": 0.6},
    {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.2},
]


def prompts(count: int, longest: int = 200) -> list[list[int]]:
    draw = random.Random(count)
    return [
        [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(3, longest))]
        for _ in range(count)
    ]


def alone(name: str, ids: list[int], settings: Mapping[str, Any]) -> list[int]:
    """New tokens of one prompt, as transformers itself generates them."""
    ends = [END, *settings.get("eos_token_id", [])]
    made = model(name).generate(
        torch.tensor([ids]),
        pad_token_id=0,
        tokenizer=tokenizer(),
        **{"max_new_tokens": 24, **settings, "eos_token_id": ends},
    )
    tokens: list[int] = made[0, len(ids) :].tolist()
    return tokens


def together(
    generator: TextGenerator[Generation], asked: list[tuple[list[int], dict[str, Any]]]
) -> list[Generation]:
    with ThreadPoolExecutor(THREADS) as callers:
        return list(callers.map(lambda each: generator(each[0], **each[1]), asked))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_a_prompt_alone_whatever_the_settings_of_all(name: str) -> None:
    asked = [(ids, PAIRS[at % len(PAIRS)]) for at, ids in enumerate(prompts(64))]
    records: list[BatchRecord] = []
    generator = TextGenerator(
        model(name), tokenizer(), details=True, max_new_tokens=24, on_batch=records.append
    )
    with generator:
        found = together(generator, asked)
    wanted = [alone(name, ids, settings) for ids, settings in asked]
    assert [each.tokens for each in found] == wanted
    assert max(record.size for record in records) > len(PAIRS)  # of several settings
    assert {each.finish_reason for each in found} == {"stop", "length"}
    for each, (ids, settings) in zip(found, asked, strict=True):
        assert each.prompt_tokens == len(ids)
        assert not any(stop in each.text for stop in settings.get("stop_strings", ()))


@pytest.mark.parametrize(
    "settings",
    [{"encoder_repetition_penalty": 3.0}, {"encoder_no_repeat_ngram_size": 1}],
    ids=str,
)
def test_a_setting_that_looks_at_the_prompt_looks_at_its_own(settings: dict[str, Any]) -> None:
    asked = [(ids, settings) for ids in prompts(6, longest=40)]
    with TextGenerator(model(), tokenizer(), details=True, max_new_tokens=24) as generator:
        found = [generator(ids, **settings).tokens for ids, _ in asked]
    assert found == [alone("llama", ids, settings) for ids, _ in asked]


def test_a_watermark_of_one_text_does_not_depend_on_others() -> None:
    mark = SynthIDTextWatermarkingConfig(keys=list(range(1, 31)), ngram_len=5)
    with TextGenerator(model(), tokenizer(), max_new_tokens=24) as generator:
        texts = {
            generator([5, 6], temperature=1.0, seed=1, watermarking_config=mark) for _ in range(3)
        }
    assert len(texts) == 1


def test_without_a_cache_the_tokens_are_the_same() -> None:
    asked = [(ids, {"max_new_tokens": 2 + at}) for at, ids in enumerate(prompts(6, longest=40))]
    with TextGenerator(model(), tokenizer(), details=True, use_cache=False) as generator:
        found = together(generator, asked)
    assert [each.tokens for each in found] == [alone("llama", *each) for each in asked]


def test_a_long_array_of_ids_is_not_taken_for_another_one() -> None:
    ids = prompts(1)[0]
    with TextGenerator(model(), tokenizer(), details=True, max_new_tokens=4) as generator:
        for first in (VOCABULARY // 2, 0):
            kept_out = numpy.zeros(1500, dtype=int)
            kept_out[500 : 500 + VOCABULARY // 2] = range(first, first + VOCABULARY // 2)
            found = generator(ids, suppress_tokens=kept_out).tokens
            assert not {*found} & {*kept_out.tolist()}


def test_a_seed_gives_the_same_text_alone_and_in_company() -> None:
    asked = [
        (ids, {**SAMPLED[at % len(SAMPLED)], "seed": at})
        for at, ids in enumerate(prompts(40, longest=30))
    ]
    records: list[BatchRecord] = []
    generator = TextGenerator(
        model(), tokenizer(), max_new_tokens=16, batch_size=40, on_batch=records.append
    )
    with generator:
        found = [future.result() for future in [generator.submit(ids, **of) for ids, of in asked]]
        assert len(records) < 5  # whatever their settings
        assert all(record.attempts == 1 for record in records)
        assert found == [generator(ids, **settings) for ids, settings in asked]
        ids, settings = asked[0]
        assert len({generator(ids, **{**settings, "seed": seed}) for seed in range(8)}) > 4
        assert len({generator(ids, temperature=1.0) for _ in range(8)}) > 4


def test_sampling_follows_the_probabilities() -> None:
    ids = prompts(1)[0]
    generator = TextGenerator(model(), tokenizer(), details=True, max_new_tokens=1, batch_size=500)
    with generator:
        futures = [
            generator.submit(ids, seed=seed, temperature=2.0, top_k=3) for seed in range(500)
        ]
        drawn = [future.result().tokens[0] for future in futures]
    with torch.no_grad():
        scores, best = (model()(torch.tensor([ids])).logits[0, -1] / 2.0).topk(3)
    for token, share in zip(best.tolist(), scores.softmax(-1).tolist(), strict=True):
        assert drawn.count(token) == pytest.approx(500 * share, abs=60)
    assert set(drawn) == set(best.tolist())


def test_rows_that_end_leave_their_batch() -> None:
    sizes: list[int] = []
    handle = model().register_forward_pre_hook(
        lambda _, __, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True
    )
    limits = [1, 1, 2, 4, 4, 4, 9, 9]
    generator = TextGenerator(
        model(), tokenizer(), batch_size=len(limits), flush="window", timeout_ms=60_000
    )
    try:
        with generator:
            futures = [
                generator.submit(ids, max_new_tokens=limit, min_new_tokens=limit)
                for ids, limit in zip(prompts(8, longest=9), limits, strict=True)
            ]
            for future in futures:
                future.result()
    finally:
        handle.remove()
    steps = [sum(limit > step for limit in limits) for step in range(max(limits))]
    assert sizes == steps
