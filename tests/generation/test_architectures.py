"""Texts in company are the texts of each prompt alone, whatever the architecture of the model."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from architectures import VOCABULARY, WINDOW, architectures, model_of
from batched.generation import TextGenerator
from language_models import alone, tokenizer

pytestmark = pytest.mark.model

ENDS = [7, 8, 9]
LENGTHS = [1, 2, 3, 5, 9, 17, WINDOW - 1, WINDOW, WINDOW + 1, 40, 60, 90]


def asked_of(name: str, count: int) -> list[tuple[list[int], int]]:
    """Return prompts, some longer than any window, with the most new tokens of each."""
    draw = random.Random(name)
    lengths = [90, *(draw.choice(LENGTHS) for _ in range(count - 1))]
    return [
        ([draw.randrange(10, VOCABULARY) for _ in range(length)], draw.randint(1, 30))
        for length in lengths
    ]


WAYS = {
    "gpt_neo": "together",  # a mask of its own for local layers
    "falcon_h1": "together",  # attention and states in one layer
    "mamba": "together",  # states alone
    "gemma3_text": "together",  # windows in places
    "recurrent_gemma": "one by one",  # wrong beyond its window
    "doge": "one by one",  # wrong beyond its window, if longer texts are near
    "bart": "one by one",  # positions that count the padding
}


def check(model: Any, name: str, count: int) -> None:
    """Compare texts that join and leave at random with the same texts alone."""
    asked = asked_of(name, count)
    draw = random.Random(name)
    try:
        expected = [alone(model, *each, eos_token_id=ENDS) for each in asked]
    except RuntimeError as error:
        pytest.skip(f"its own generate fails: {error}")
    with TextGenerator(
        model, tokenizer(), details=True, batch_size=6, eos_token_id=ENDS
    ) as generator:
        futures: list[Any] = []
        for ids, limit in asked:
            futures.append(generator.submit(ids, max_new_tokens=limit))
            if draw.random() < 0.3:  # the next ones join later
                futures[draw.randrange(len(futures))].result(300)
        found = [future.result(300).tokens for future in futures]
        steps = generator.stats.rows_per_step
    assert found == expected
    way = "one by one" if steps == 1 else "together"
    assert WAYS.get(name, way) == way


@pytest.mark.parametrize("name", ["gpt_neo", "falcon_h1", "bart"])
def test_texts_in_company_are_those_of_each_prompt_alone(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    check(model_of(name), name, 8)
    warnings = [each for each in caplog.messages if "one text at a time" in each]
    assert len(warnings) == (WAYS[name] == "one by one")


def test_positions_that_depend_on_the_longest_text_lead_to_one_text_at_a_time() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = model_of("llama", rope_parameters=rope, max_position_embeddings=64)
    with TextGenerator(model, tokenizer(), details=True, eos_token_id=ENDS) as generator:
        short, long = [5, 6, 7], [*range(10, 50)]
        futures: list[Any] = [generator.submit(ids, max_new_tokens=8) for ids in (long, short)]
        assert [future.result().tokens for future in futures] == [
            alone(model, ids, 8, eos_token_id=ENDS) for ids in (long, short)
        ]
        assert generator.stats.rows_per_step == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", architectures())
def test_every_architecture_that_a_configuration_builds(name: str) -> None:
    try:
        model = model_of(name)
        alone(model, [10, 11, 12], 4, eos_token_id=ENDS)
    except Exception as error:
        pytest.skip(f"its tiny configuration fails alone: {error!r:.150}")
    check(model, name, 14)
