"""Containers of outputs, and outputs that cannot be split."""

from __future__ import annotations

import functools
from collections import UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import pytest

from batched.errors import BatchFunctionError
from feature_stage import Make, tokens


class Pair(NamedTuple):
    tokens: Any
    pooled: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    tokens: Any
    pooled: Any


def default_dict(tokens: Any, pooled: Any) -> Any:
    return defaultdict(list, {"tokens": tokens, "pooled": pooled})


def parts(output: Any) -> list[Any]:
    """Return tokens and pooled, in this order, of any of the containers."""
    if isinstance(output, Frozen):
        return [output.tokens, output.pooled]
    return list(output.values() if isinstance(output, dict) else output)


@pytest.mark.parametrize("container", [Pair, default_dict, Frozen])
def test_each_caller_gets_its_rows_in_the_container_of_the_output(
    together: Make, container: Callable[[Any, Any], Any]
) -> None:
    returned: list[Any] = []

    def compute(features: dict[str, Any]) -> Any:
        ids = features["ids"]
        returned.append(container(ids * 10, ids.sum(1)))
        return returned[-1]

    two = together(compute, batch_size=3)
    two.fn(tokens(4))
    results = two.results(tokens(2), tokens(1, 3, first=3))
    assert [type(result) for result in results] == [type(returned[0])] * 2
    assert [[part.tolist() for part in parts(result)] for result in results] == [
        [[[10, 20]], [3]],
        [[[30, 0, 0], [40, 50, 60]], [3, 15]],
    ]
    assert len(parts(returned[1])[0]) == 3, "the function may have kept its output"
    for call in (tokens(2, 2), tokens(2, 1, 2, 2)):  # alone, and split
        (result,) = two.results(call)
        assert type(result) is type(returned[0])
        assert [len(part) for part in parts(result)] == [len(call["ids"])] * 2


@pytest.mark.parametrize("container", [MappingProxyType, UserDict])
def test_a_mapping_that_is_no_dict_becomes_a_dict(
    together: Make, container: Callable[[Any], Any]
) -> None:
    two = together(lambda features: container({"ids": features["ids"] * 2}))
    results = two.results(tokens(2), tokens(2, first=3))
    assert [type(result) for result in results] == [dict, dict]
    assert [result["ids"].tolist() for result in results] == [[[2, 4]], [[6, 8]]]


@dataclass
class Labelled:
    logits: Any

    def __post_init__(self) -> None:
        self.labels = self.logits.argmax(1)

    @functools.cached_property
    def most(self) -> Any:
        return self.logits.max(1)


def test_attributes_with_data_of_the_whole_batch_reach_no_caller(together: Make) -> None:
    def labelled(features: dict[str, Any]) -> Any:
        output = Labelled(features["x"])
        assert len(output.most) == len(features["x"])
        return output

    calls = [{"x": numpy.full((1, 2), number)} for number in range(3)]
    for number, result in enumerate(together(labelled).results(*calls)):
        assert result.logits.tolist() == [[number] * 2]
        assert result.most.tolist() == [number]
        assert not hasattr(result, "labels")


@pytest.mark.parametrize("kind", [tuple, list, Pair._make])
def test_two_outputs_of_a_batch_of_two_are_not_taken_for_rows(
    together: Make, kind: Callable[[Any], Any]
) -> None:
    two = together(lambda features: kind([features["ids"].sum(1), -features["ids"].sum(1)]))
    first, second = two.results(tokens(2), tokens(2, first=3))
    assert (type(first), type(second)) == (type(kind([1, 2])),) * 2
    totals = [[output.tolist() for output in each] for each in (first, second)]
    assert totals == [[[3], [-3]], [[7], [-7]]]


class DynamicCache:
    """Named as the cache of transformers."""


@pytest.mark.once
@pytest.mark.parametrize(
    ("output", "said"),
    [
        (lambda ids: {"logits": ids, "loss": 0.5}, ["'loss'", "float"]),
        (lambda ids: {"logits": ids, "loss": numpy.array(0.5)}, ["'loss'", "single value"]),
        (lambda ids: {"logits": ids, "labels": ["a", "b"]}, ["'labels.0'", "str", "tolist()"]),
        (lambda ids: ids.tolist(), ["'0.0'", "int", "return an array or tensor"]),
        (
            lambda ids: {"a": [ids, {"b": DynamicCache()}]},
            ["'a.1.b'", "DynamicCache", "use_cache=False"],
        ),
        (lambda ids: Frozen(ids, "text"), ["'pooled'", "str"]),
        (lambda ids: Frozen, ["type"]),
        (lambda ids: numpy.array(1.0), ["single value"]),
        (lambda ids: None, ["NoneType"]),
        (lambda ids: {"a": None, "b": ()}, ["dict"]),
    ],
)
@pytest.mark.parametrize("callers", [1, 2])
def test_an_output_that_cannot_be_split_is_an_error_with_its_path(
    together: Make, output: Any, said: list[str], callers: int
) -> None:
    wrong = [True]
    some = together(
        lambda features: output(features["ids"]) if wrong else features["ids"], name="shop.embed"
    )
    for answer in some.answers(*[tokens(2)] * callers):
        assert type(answer) is BatchFunctionError, repr(answer)
        for part in ["shop.embed", *said]:
            assert part in str(answer)
    wrong.clear()
    assert some.fn(tokens(2)).tolist() == [[1, 2]]


@pytest.mark.model
def test_sparse_and_nested_tensors_are_refused_with_their_path(together: Make) -> None:
    torch = pytest.importorskip("torch")
    for odd in (
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2)] * 2, layout=torch.jagged),
    ):
        two = together(lambda _, odd=odd: {"weights": odd})
        for answer in two.answers(*[{"x": torch.ones(1, 2)}] * 2):
            assert type(answer) is BatchFunctionError, repr(answer)[:200]
            assert "'weights' in the output is a sparse or nested tensor" in str(answer)
