"""Patterns of Beam's guide to RunInference, with the model handler of this package.

The guide is beam.apache.org/documentation/ml/about-ml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("apache_beam")

from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping, MaybeKeyedModelHandler

from batched.beam import ModelHandler
from beam_pipelines import run


def invert(numbers: list[int]) -> list[float]:
    return [1 / number for number in numbers]


class Divider:
    def __init__(self, dividend: int) -> None:
        self._dividend = dividend

    def __call__(self, numbers: list[int]) -> list[float]:
        return [self._dividend / number for number in numbers]


def keyed_inference(element: tuple[str, Any]) -> tuple[str, float]:
    key, result = element
    return key, result.inference


@pytest.mark.parametrize("per_key", [False, True])
def test_one_bad_element_with_a_key_fails_alone(per_key: bool) -> None:
    models = [
        KeyModelMapping([key], ModelHandler(Divider, args=(dividend,)))
        for key, dividend in (("one", 1), ("two", 2))
    ]
    handler = KeyedModelHandler(models if per_key else ModelHandler(invert))
    elements = [(key, number) for number in range(16) for key in ("one", "two")]
    outcome = run(handler, elements)
    assert outcome.failed_batches == []
    assert len(outcome.results) == 32
    for key, result in outcome.results:
        if result.example:
            assert result.inference == (2 if per_key and key == "two" else 1) / result.example
        else:
            with pytest.raises(ZeroDivisionError):
                _ = result.inference


def test_a_function_after_a_keyed_handler_makes_dead_letters() -> None:
    handler = KeyedModelHandler(ModelHandler(invert)).with_postprocess_fn(keyed_inference)
    outcome = run(handler, [("a", 0), ("b", 1)])
    assert outcome.results == [("b", 1.0)]
    (((key, failed), (kind, _, _)),) = outcome.failed_after[0]
    assert (key, failed.example, kind) == ("a", 0, ZeroDivisionError)
    assert outcome.counters["failed_elements_counter"] == 1


@pytest.mark.parametrize("keyed", [False, True])
def test_keys_may_be_left_out(keyed: bool) -> None:
    elements = [("a", 0), ("b", 2)] if keyed else [0, 2]
    outcome = run(MaybeKeyedModelHandler(ModelHandler(invert)), elements)
    (result,) = outcome.results
    assert (result[1].inference if keyed else result.inference) == 0.5
    assert len(outcome.failed_after[0]) == 1


def halve(result: Any) -> float:
    if result.inference == 1:
        raise ValueError("one")
    half: float = result.inference / 2
    return half


def test_functions_before_and_after_inference_have_dead_letters_of_their_own() -> None:
    handler = ModelHandler(invert).with_preprocess_fn(int).with_postprocess_fn(halve)
    outcome = run(handler, ["2", "1", "0", "none"])
    assert outcome.results == [0.25]
    ((before,),) = outcome.failed_before
    (function,), (after,) = outcome.failed_after
    assert (before[0], before[1][0]) == ("none", ValueError)
    assert (function[0].example, function[1][0]) == (0, ZeroDivisionError)
    assert (after[0].example, after[1][0]) == (1, ValueError)


def test_elements_may_be_batches_already() -> None:
    outcome = run(ModelHandler(invert).with_no_batching(), [[1, 0], [2]])
    assert sorted(result.inference for result in outcome.results) == [0.5, 1.0]
    assert [failed.example for failed, _ in outcome.failed_after[0]] == [0]


PAGE = Path(__file__).parents[3] / "docs" / "beam.md"


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    printed = []
    for example in examples:
        exec(compile(example, PAGE.name, "exec", dont_inherit=True), {"__name__": "page"})
        printed.append(sorted(capsys.readouterr().out.splitlines()))
    assert printed == [
        ["good [4.0, 1.0]", "not so good [11.0, 1.0]"],
        [
            "('de', {'caption': 'German: gut', 'score': 0.5})",
            "('us', {'caption': 'English: good', 'score': 0.5})",
        ],
    ]
