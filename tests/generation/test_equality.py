"""The tokens of a prompt in a batch are equal to the tokens of `generate` for it alone."""

from __future__ import annotations

import copy
import random
import threading
import time
from itertools import combinations
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import numpy
import torch

from batched._generation.places import Places
from batched.generation import Generation, TextGenerator
from language_models import MODELS, VOCABULARY, alone, batches_of, full_batches, model, tokenizer

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore:Unfeasible length")]

SETTINGS: list[dict[str, Any]] = [
    {"eos_token_id": list(range(20, 60))},
    # transformers looks for stop strings in special tokens, too
    {"stop_strings": ["e", "qu", "1"], "suppress_tokens": [2]},
    {"max_new_tokens": 5},
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 12},
]
PAIRS = [{**one, **other} for one, other in combinations(SETTINGS, 2)]
SAMPLED: list[dict[str, Any]] = [
    *({"temperature": 0.5}, {"temperature": 2.0, "top_k": 7}, {"top_p": 0.6}),
    {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.2},
]
Asked = list[tuple[list[int], dict[str, Any]]]


def prompts(count: int, longest: int = 200) -> list[list[int]]:
    draw = random.Random(count)
    return [
        [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(3, longest))]
        for _ in range(count)
    ]


def expected(name: str, asked: Asked) -> list[list[int]]:
    """Return the new tokens of each prompt alone."""
    found = []
    for ids, settings in asked:
        ends = [model(name).config.eos_token_id, *settings.get("eos_token_id", [])]
        found.append(alone(model(name), ids, 24, **{**settings, "eos_token_id": ends}))
    return found


def together(generator: TextGenerator[Generation], asked: Asked) -> list[Generation]:
    """Generate all texts in one batch."""
    futures = [generator.submit(ids, **settings) for ids, settings in asked]
    return [future.result() for future in futures]


def test_greedy_tokens_with_mixed_settings_are_those_of_each_prompt_alone() -> None:
    asked = [*zip(prompts(len(PAIRS)), PAIRS, strict=True)]
    with full_batches(len(PAIRS), details=True, max_new_tokens=24) as generator:
        found = together(generator, asked)
    assert generator.stats.rows_per_step > 4
    assert [each.tokens for each in found] == expected("llama", asked)
    assert {each.finish_reason for each in found} == {"stop", "length"}
    for each, (ids, settings) in zip(found, asked, strict=True):
        assert each.prompt_tokens == len(ids)
        assert not any(stop in each.text for stop in settings.get("stop_strings", ()))


def test_a_processor_of_prompts_sees_its_own_prompt() -> None:
    settings = {"encoder_repetition_penalty": 3.0, "encoder_no_repeat_ngram_size": 2}
    asked = prompts(3, longest=40)
    with TextGenerator(model(), tokenizer(), details=True, max_new_tokens=24) as generator:
        found = [generator(ids, **settings).tokens for ids in asked]
    assert found == expected("llama", [(ids, settings) for ids in asked])


def test_without_a_cache_the_tokens_are_the_same() -> None:
    asked = [(ids, {"max_new_tokens": 2 + at}) for at, ids in enumerate(prompts(6, longest=40))]
    with TextGenerator(model(), tokenizer(), details=True, use_cache=False) as generator:
        found = together(generator, asked)
    assert [each.tokens for each in found] == expected("llama", asked)


def test_long_arrays_of_ids_are_told_apart() -> None:
    ids = prompts(1)[0]
    with TextGenerator(model(), tokenizer(), details=True, max_new_tokens=4) as generator:
        for first in (VOCABULARY // 2, 0):
            kept_out = numpy.zeros(1500, dtype=int)
            kept_out[500 : 500 + VOCABULARY // 2] = range(first, first + VOCABULARY // 2)
            found = generator(ids, suppress_tokens=kept_out).tokens
            assert not {*found} & {*kept_out.tolist()}


def test_a_seed_gives_the_same_text_alone_and_in_a_batch() -> None:
    asked = [
        (ids, {**SAMPLED[at % len(SAMPLED)], "seed": at})
        for at, ids in enumerate(prompts(10, longest=30))
    ]
    with full_batches(10, max_new_tokens=8) as generator:
        found = [future.result() for future in [generator.submit(ids, **of) for ids, of in asked]]
    assert generator.stats.steps == 8
    with TextGenerator(model(), tokenizer(), max_new_tokens=8) as generator:
        assert found == [generator(ids, **settings) for ids, settings in asked]
        ids, settings = asked[0]
        assert len({generator(ids, **{**settings, "seed": seed}) for seed in range(4)}) > 2
        assert len({generator(ids, temperature=1.0) for _ in range(4)}) > 2


def test_texts_that_run_out_of_memory_begin_again_fewer_at_once() -> None:
    def look(step: int, _: int) -> None:
        if step == 2:
            raise torch.OutOfMemoryError

    with batches_of(look) as sizes, full_batches(2, max_new_tokens=4, min_new_tokens=4) as texts:
        found = [future.result() for future in [texts.submit(ids) for ids in prompts(2)]]
    assert (sizes[:3], len(found)) == ([2, 2, 1], 2)


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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
def test_256_prompts_that_join_at_random_moments_get_the_tokens_of_each_alone(name: str) -> None:
    draw = random.Random(name)
    asked = [
        (ids, {"max_new_tokens": draw.randint(8, 128), **PAIRS[at % len(PAIRS)]})
        for at, ids in enumerate(prompts(256))
    ]
    futures: dict[int, Any] = {}
    with TextGenerator(model(name), tokenizer(), details=True) as generator:
        for at, (ids, settings) in enumerate(asked):
            futures[at] = generator.submit(ids, **settings)
            if draw.random() < 0.1:
                futures.pop(at).cancel()
            time.sleep(draw.choice([0.0, 0.0, 0.001, 0.02]))
        found = {at: future.result(300).tokens for at, future in futures.items()}
        assert generator.stats.rows_per_step > 2
    assert [*found.values()] == expected(name, [asked[at] for at in found])


@pytest.mark.parametrize("name", MODELS)
def test_texts_join_at_any_token(name: str) -> None:
    """A model whose texts have no places would wait until the first text has ended."""
    begun = threading.Event()

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        begun.set()
        return scores

    with TextGenerator(model(name), tokenizer(), max_new_tokens=300, min_new_tokens=300) as writer:
        long = writer.submit([5, 6, 7], logits_processor=[look])
        assert begun.wait(60)
        assert writer([8, 9], max_new_tokens=1, min_new_tokens=1) is not None
        assert not long.done()
        long.cancel()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_text_that_is_not_finite_spoils_no_later_text(attention: str) -> None:
    broken = copy.deepcopy(model())
    broken.set_attn_implementation(attention)
    broken.get_input_embeddings().weight.data[500] = float("nan")
    good = [5, 6, 7, 8]
    with TextGenerator(broken, tokenizer(), batch_size=2, max_new_tokens=8) as generator:
        text = generator(good)
        neighbour = generator.stream([9, 10] * 20, max_new_tokens=200, min_new_tokens=200)
        next(neighbour)
        spoiled = generator.submit([500] * 40, max_new_tokens=3)
        later = generator.submit(good)
        spoiled.result()
        assert later.result() == text
        neighbour.close()


def test_the_buffers_follow_the_texts_that_are_live() -> None:
    places = Places(model())
    with torch.no_grad():
        places.add([[5] * 480])
        places.step([6])
        assert places.room[0] * places.room[1] <= 3 * 480
        assert places.keep([]) == []
        places.add([[5] * 5 for _ in range(32)])
        places.step([6] * 32)
    assert places.room[1] == 64
    assert places.room[0] <= 40
