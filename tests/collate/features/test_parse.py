"""Features as callers pass them, refusals, and lengths of rows."""

from __future__ import annotations

import asyncio
import sys
import types
from collections import UserDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy
import pytest

import batched
from batched.errors import CollationError
from feature_stage import Make, to_lists, tokens

ROW = numpy.zeros(3, numpy.int64)


@pytest.mark.parametrize("make", [UserDict, MappingProxyType])
def test_the_function_gets_a_dict_for_any_mapping(
    together: Make, make: Callable[[Any], Any]
) -> None:
    two = together()
    results = two.results(make({"x": numpy.array([1])}), make({"x": numpy.array([2])}))
    assert [result["x"].tolist() for result in results] == [[1], [2]]
    two.fn(make({"x": numpy.array([1])}))
    assert [type(features) for features in two.seen] == [dict, dict]


def test_features_may_be_passed_by_keyword_and_a_mapping_by_the_name_of_the_parameter() -> None:
    fn: Any = batched.inference.dynamically(
        lambda features, scale=1: {name: array * scale for name, array in features.items()}
    )
    x = numpy.array([1])
    with fn:
        assert to_lists(fn(ids=x, mask=x + 1)) == {"ids": [1], "mask": [2]}
        assert to_lists(fn.submit(ids=x).result(20)) == {"ids": [1]}
        assert to_lists(fn(features=x)) == {"features": [1]}
        assert to_lists(fn(features={"x": x}, scale=3)) == {"x": [3]}
        with pytest.raises(CollationError, match="at least one feature"):
            fn()
        said = "other arguments go next to a mapping of features"
        with pytest.raises(CollationError, match=said):
            fn(x=x, scale=3)


def test_a_coroutine_function_gets_features() -> None:
    @batched.aio.inference.dynamically
    async def fn(features: dict[str, Any]) -> Any:
        return features["ids"] * 2

    async def main() -> list[Any]:
        return await asyncio.gather(*(fn(tokens(width)) for width in (2, 3)))

    assert [result.tolist() for result in asyncio.run(main())] == [[[2, 4]], [[2, 4, 6]]]


def test_with_spread_kwargs_the_function_gets_features_by_keyword() -> None:
    @batched.inference.dynamically(spread_kwargs=True)
    def fn(ids: Any, mask: Any = None, *, scale: int = 1) -> Any:
        return ids * scale if mask is None else ids * mask * scale

    array = numpy.array([[1, 2]])
    with fn:
        assert fn({"ids": array}).tolist() == [[1, 2]]
        assert fn({"ids": array, "mask": array}, scale=3).tolist() == [[3, 12]]
        assert fn(ids=array, mask=array).tolist() == [[1, 4]]
        with pytest.raises(TypeError, match="other"):
            fn({"ids": array, "other": array})
        with pytest.raises(TypeError, match="ids"):
            fn({"mask": array})
        with pytest.raises(TypeError, match="mask"):
            fn({"ids": array, "mask": array}, mask=3)


def test_extra_arguments_form_groups_and_reach_the_function(together: Make) -> None:
    four = together(lambda features, scale=1: {"x": features["x"] * scale})
    calls = [{"x": numpy.array([[number]])} for number in range(4)]
    results = four.results(*calls, extra=({"scale": 2}, {}, {"scale": 2}, {"scale": 2.0}))
    assert [result["x"].tolist() for result in results] == [[[0]], [[1]], [[4]], [[6.0]]]
    assert sorted(len(batch["x"]) for batch in four.seen) == [1, 1, 2]


def test_rows_of_a_list_may_be_numbers_of_numpy(together: Make) -> None:
    (result,) = together().results({"x": list(numpy.arange(3.0, dtype=numpy.float32))})
    assert result["x"].dtype == numpy.float32
    assert result["x"].tolist() == [0.0, 1.0, 2.0]


def test_rows_of_a_list_are_padded_as_rows_of_calls_are(together: Make) -> None:
    one, sizes = together(pad_token={"wave": 0}), (2, 3)
    ids, weights = ([numpy.ones(n, kind) for n in sizes] for kind in (int, float))
    padded = one.fn({"ids": ids, "weights": weights, "wave": weights[::-1]})
    assert [padded[name].shape for name in ("weights", "wave")] == [(2, 3)] * 2
    images = [numpy.ones((n, 4, 4), numpy.uint8) for n in sizes]
    for name, rows in (("vector", weights[::-1]), ("image", images)):
        with pytest.raises(CollationError, match=rf"rows of {name} differ in length \(2 and 3\)"):
            one.fn({"ids": ids, name: rows})


def test_objects_are_features(together: Make) -> None:
    objects = numpy.array([{1}, None], dtype=object)
    results = together().results({"x": objects}, {"x": objects[:1]})
    assert [result["x"].tolist() for result in results] == [[{1}, None], [{1}]]
    records = together()
    records.fn({"x": numpy.zeros(2).view(numpy.recarray)})
    assert type(records.seen[0]["x"]) is numpy.ndarray


@pytest.mark.model
def test_conjugates_are_resolved(together: Make) -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor([[1 + 2j]])
    results = together().results({"x": x.conj()}, {"x": x})
    assert [result["x"].tolist() for result in results] == [[[1 - 2j]], [[1 + 2j]]]


def test_another_thread_may_be_importing_torch(
    together: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    two = together(lambda features: {"y": features["x"] * 2})
    calls: list[Any] = [{"x": numpy.ones((2, 3))}, {"x": [numpy.ones(3)]}]
    for call, result in zip(calls, two.results(*calls), strict=True):
        assert result["y"].tolist() == [[2, 2, 2]] * len(call["x"])
    (refused,) = two.answers({"x": "text"})
    assert isinstance(refused, CollationError), repr(refused)


DENSE = "must be a dense array or tensor, or a list of them, one for each row, got "

BAD: list[tuple[Any, list[str]]] = [
    ({"input_ids": ROW}, ["input_ids of one text need an axis for rows", "(3,)"]),
    ({"ids": [ROW, ROW], "mask": numpy.zeros((5, 3))}, ["ids", "list of 2", "mask", "(5, 3)"]),
    (
        {"ids": ROW[None], "mask": numpy.array(3)},
        ["mask", "got a single value of int64", "next to the features", "mask=..."],
    ),
    ({}, ["empty mapping"]),
    ({"ids": numpy.zeros((0, 3))}, ["ids", "(0, 3)"]),
    ({"ids": [[1, 2, 3]]}, ["ids", "list", "return_tensors"]),
    ({"ids": ROW[None], "mask": None}, ["mask", "None", "leave out a feature that is None"]),
    ({"ids": "text"}, ["ids", "str"]),
    ({"ids": [ROW, ROW.astype(float)]}, ["ids", "int64", "float64", "(3,)"]),
    ({"ids": [numpy.zeros((3, 2)), numpy.zeros((3, 4))]}, ["ids", "(3, 2)", "(3, 4)"]),
    ({3: ROW}, ["3"]),
    ({"ids": numpy.ma.masked_array(ROW)}, [f"ids {DENSE}numpy.ma.MaskedArray of int64 (3,)"]),
    (ROW, ["mapping"]),
]


@pytest.mark.parametrize(("call", "said"), BAD, ids=lambda value: f"{value!r:.40}")
def test_features_that_make_no_batch_are_refused_to_their_caller_alone(
    together: Make, call: Any, said: list[str]
) -> None:
    three = together(name="shop.embed")
    good = {"ids": numpy.array([[1, 2, 3]])}
    before, refused, after = three.answers(good, call, good)
    assert type(refused) is CollationError, repr(refused)
    assert isinstance(refused, ValueError)
    for part in ["shop.embed", *said]:
        assert part in str(refused)
    assert before["ids"].tolist() == after["ids"].tolist() == [[1, 2, 3]]
    assert [batch["ids"].tolist() for batch in three.seen] == [[[1, 2, 3], [1, 2, 3]]]
    assert three.fn.stats.calls == 2
    with pytest.raises(CollationError):
        three.fn(call)


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_make_no_batch_are_refused(together: Make) -> None:
    torch = pytest.importorskip("torch")
    row = torch.zeros(3, dtype=torch.int64)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantized = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.quint8)
    one = together()
    for odd, said in (
        (nested, f"{DENSE}torch.Tensor of torch.float32 (nested)"),
        (torch.ones(3, 3).to_sparse(), "torch.Tensor of torch.float32 (3, 3), torch.sparse_coo"),
        ([row, row.numpy()], "must agree"),
        (
            [torch.ones(2), torch.ones(2, device="meta")],
            "(2,), torch.strided, on cpu and torch.Tensor of torch.float32 (2,)",
        ),
        (quantized, "x is of torch.quint8, of which no batch can be made"),
        (torch.empty(2, 2, dtype=torch.float4_e2m1fn_x2), "of which no batch can be made"),
    ):
        with pytest.raises(CollationError) as refused:
            one.fn({"x": odd})
        assert said in str(refused.value)


def test_a_function_that_needs_spread_kwargs_is_an_error_that_says_so() -> None:
    def total(ids: Any, mask: Any, scale: float = 1.0) -> Any:
        return (ids * mask).sum(1) * scale

    call = {"ids": numpy.ones((1, 2), int), "mask": numpy.ones((1, 2), int)}
    fn: Any = batched.inference.dynamically(name="total")(total)
    with pytest.raises(
        TypeError,
        match="^total: missing a required argument: 'mask'; .*spread_kwargs=True, each by",
    ):
        fn(**call)
    with pytest.raises(TypeError, match="'twice'$"):
        fn(call, mask=1, twice=2)
