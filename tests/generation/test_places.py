"""Places of texts in the KV cache."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import pydantic
import torch

from batched._generation.places import Places
from batched.generation import TextGenerator
from language_models import model, tokenizer

pytestmark = pytest.mark.model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_text_that_is_not_finite_spoils_no_later_text(attention: str) -> None:
    broken = copy.deepcopy(model())
    broken.set_attn_implementation(attention)
    broken.get_input_embeddings().weight.data[500] = float("nan")
    good = [5, 6, 7, 8]
    with TextGenerator(broken, tokenizer(), batch_size=2, max_new_tokens=8) as generator:
        alone = generator(good)
        neighbour = generator.stream([9, 10] * 20, max_new_tokens=200, min_new_tokens=200)
        next(neighbour)
        spoiled = generator.submit([500] * 40, max_new_tokens=3)
        later = generator.submit(good)
        spoiled.result()
        assert later.result() == alone
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


class Odd(pydantic.BaseModel):
    warm: bool

    @pydantic.field_validator("warm")
    @classmethod
    def refuse(cls, warm: bool) -> bool:
        raise KeyError(warm)


@pytest.mark.parametrize(
    "settings",
    [{"schema": Odd}, {"stop_strings": json.loads('["\\ud800"]')}],
    ids=["schema", "stop"],
)
def test_an_error_at_the_end_of_a_text_is_an_error_of_its_caller(settings: Any) -> None:
    with TextGenerator(model(), tokenizer(), max_new_tokens=60) as generator:
        other = generator.submit([5, 6, 7], min_new_tokens=60)
        odd = generator.submit([8, 9], **settings)
        assert ("schema" in settings) == isinstance(odd.exception(60), KeyError)
        assert other.result() == generator([5, 6, 7], min_new_tokens=60)


def test_memory_that_a_processor_of_the_caller_lacks_is_its_own_error() -> None:
    def lacking(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise MemoryError("mine")

    with TextGenerator(model(), tokenizer(), max_new_tokens=150) as generator:
        stream = generator.stream([5, 6, 7], min_new_tokens=150)
        next(stream)
        with pytest.raises(MemoryError, match="mine"):
            generator([8, 9], logits_processor=[lacking])
        assert len("".join(stream)) > 0
        assert generator.stats.memory_errors == 0
