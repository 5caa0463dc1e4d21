"""Texts that keep to a schema."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")
import pydantic

from batched.generation import Generation, TextGenerator
from language_models import END, model, tokenizer

pytestmark = pytest.mark.model


class Colour(pydantic.BaseModel):
    name: Literal["red", "green", "blue"]
    hue: int = pydantic.Field(ge=0, le=360)
    warm: bool


LIST = {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 2, "maxItems": 3}


def generator(**settings: Any) -> TextGenerator[Any]:
    return TextGenerator(model(), tokenizer(), **{"max_new_tokens": 100, **settings})


def test_the_result_is_an_instance_of_the_class_or_the_value_of_the_json() -> None:
    with generator(schema=Colour) as colours:
        futures = [
            colours.submit("it", temperature=2.0, seed=seed, schema=LIST if seed > 7 else Colour)
            for seed in range(16)
        ]
        found = [future.result() for future in futures]
    assert all(isinstance(each, Colour) for each in found[:8])
    assert len({each.model_dump_json() for each in found[:8]}) > 2
    assert {len(each) for each in found[8:]} == {2, 3}
    assert {entry for each in found[8:] for entry in each} == {"a", "bc"}


def test_texts_with_and_without_a_schema_share_steps_and_change_nothing_in_each_other() -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"schema": Colour},
        {"schema": LIST, "temperature": 1.5, "seed": 3},
        {"temperature": 1.5, "seed": 4},
    ]
    with generator(max_new_tokens=50) as texts:
        alone = [texts(f"the fox {at}", **of) for at, of in enumerate(asked)]
        futures = [texts.submit(f"the fox {at}", **of) for at, of in enumerate(asked)]
        assert [future.result() for future in futures] == alone
    assert isinstance(alone[0], str)
    assert isinstance(alone[1], Colour)


def test_details_have_the_text_and_the_value() -> None:
    with generator(details=True) as texts:
        found: Generation = texts("a colour", schema=Colour)
    assert Colour.model_validate_json(found.text) == found.value
    assert (found.finish_reason, found.tokens[-1]) == ("stop", END)


def test_a_stream_has_the_pieces_of_the_json() -> None:
    with generator() as texts:
        pieces = texts.stream("a list", schema=LIST)
        assert json.loads("".join(pieces)) == texts("a list", schema=LIST)


def test_a_text_that_is_cut_off_is_an_error_of_its_caller() -> None:
    with generator(schema=Colour) as texts, pytest.raises(ValueError, match="was cut off: raise"):
        texts("a colour", max_new_tokens=4)


class Odd(pydantic.BaseModel):
    warm: bool

    @pydantic.field_validator("warm")
    @classmethod
    def refuse(cls, warm: bool) -> bool:
        raise KeyError(warm)


def test_an_error_at_the_end_of_a_text_is_an_error_of_its_caller() -> None:
    with generator(max_new_tokens=60) as texts:
        other = texts.submit([5, 6, 7], min_new_tokens=60)
        odd = texts.submit([8, 9], schema=Odd)
        assert isinstance(odd.exception(60), KeyError)
        assert other.result() == texts([5, 6, 7], min_new_tokens=60)


def test_wrong_schemas_are_told_at_once() -> None:
    with pytest.raises(TypeError, match="schema must be a class of pydantic or a JSON schema"):
        generator(schema=int)
    with pytest.raises(ValueError, match="schema cannot be followed"):
        generator(schema={"type": "nothing"})


def test_the_schema_is_part_of_the_meaning() -> None:
    meanings = {generator(**of).meaning for of in ({}, {"schema": Colour}, {"schema": LIST})}
    assert len(meanings) == 3
