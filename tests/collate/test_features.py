"""Features: what callers may pass, which calls share a batch, and what the function gets of
them.
"""

from __future__ import annotations

import sys
import types
from collections import UserDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy
import pytest

import batched
from batched._collate.features.spec import CACHE_LIMIT
from batched.errors import CollationError
from feature_stage import Make

NUMPY_DTYPES = [
    "float16",
    "float32",
    "float64",
    "complex64",
    "int8",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "bool",
    ">i4",
    "<f4",
]
TORCH_DTYPES = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "int8",
    "int16",
    "int64",
    "uint8",
    "bool",
    "float8_e4m3fn",
]


def ids(*rows: list[int]) -> list[Any]:
    """Rows of token ids, each as long as it is."""
    return [numpy.array(row) for row in rows]


def lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: array.tolist() for name, array in batch.items()}


# ---------------------------------------------------------------- dtype, library and device are
# kept


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_arrays_keep_their_dtype_in_a_batch_and_in_results(together: Make, dtype: str) -> None:
    two = together(pad_token={"x": 0})
    calls: list[Any] = [
        {"x": numpy.ones((1, 2), dtype)},
        {"x": [numpy.ones(3, dtype), numpy.ones(1, dtype)]},
    ]
    results = two.results(*calls)
    batch = two.seen[0]
    assert type(batch["x"]) is numpy.ndarray
    assert batch["x"].dtype == dtype
    assert batch["x"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert [result["x"].dtype for result in results] == [dtype, dtype]


@pytest.mark.model
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_tensors_keep_their_dtype_in_a_batch_and_in_results(together: Make, name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    two = together(pad_token={"x": 0})
    results = two.results(
        {"x": torch.ones(1, 2).to(dtype)}, {"x": [torch.ones(3).to(dtype), torch.ones(1).to(dtype)]}
    )
    batch = two.seen[0]
    assert type(batch["x"]) is torch.Tensor
    assert batch["x"].dtype is dtype
    assert batch["x"].to(torch.complex64).tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert [result["x"].dtype for result in results] == [dtype, dtype]


def test_floats_that_are_padded_stay_the_numbers_they_were(together: Make) -> None:
    two = together(pad_token={"x": 0})
    first, second = (
        numpy.array([[0.1, 2.7]], numpy.float32),
        numpy.array([[-0.5, 1e-30, 3e38]], numpy.float32),
    )
    results = two.results({"x": first}, {"x": second})
    assert [result["x"].tolist() for result in results] == [first.tolist(), second.tolist()]
    assert two.seen[0]["x"].tolist() == [[*first[0].tolist(), 0.0], second[0].tolist()]


@pytest.mark.model
def test_numbers_are_moved_bit_by_bit_even_where_numpy_has_no_dtype_for_them(
    together: Make,
) -> None:
    torch = pytest.importorskip("torch")
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    two = together(pad_token={"x": 0})
    results = two.results({"x": patterns[None]}, {"x": patterns[None, :7]})
    assert torch.equal(results[0]["x"][0].view(torch.int16), patterns.view(torch.int16))


@pytest.mark.model
def test_conjugates_and_negatives_are_read_as_what_they_stand_for(together: Make) -> None:
    torch = pytest.importorskip("torch")
    values = torch.tensor([[1 + 2j, 3 - 4j]])
    two = together(pad_token={"x": 0, "y": 0})
    results = two.results(
        {"x": values.conj(), "y": values.conj().imag}, {"x": values[:, :1], "y": values[:, :1].imag}
    )
    assert results[0]["x"].tolist() == [[1 - 2j, 3 + 4j]]
    assert results[0]["y"].tolist() == [[-2.0, 4.0]]


# ---------------------------------------------------------------- which calls share a batch


def test_calls_with_alike_features_share_a_batch_in_their_order(together: Make) -> None:
    all_of = together()
    results = all_of.results(*({"x": numpy.full((rows, 2), rows)} for rows in (1, 3, 2)))
    assert [lists(batch) for batch in all_of.seen] == [
        {"x": [[1, 1], [3, 3], [3, 3], [3, 3], [2, 2], [2, 2]]}
    ]
    assert [result["x"].tolist() for result in results] == [[[1, 1]], [[3, 3]] * 3, [[2, 2]] * 2]


def test_a_feature_that_only_the_second_caller_has_reaches_the_function(together: Make) -> None:
    two = together()
    first = {"ids": numpy.array([[1, 2]])}
    second = {"ids": numpy.array([[3, 4]]), "mask": numpy.array([[1, 0]])}
    results = two.results(first, second)
    assert sorted(map(sorted, two.seen)) == [["ids"], ["ids", "mask"]]
    assert [sorted(result) for result in results] == [["ids"], ["ids", "mask"]]
    assert results[1]["mask"].tolist() == [[1, 0]]


@pytest.mark.parametrize(
    "other",
    [
        numpy.zeros((1, 3), numpy.float32),
        numpy.zeros((1, 3), ">i8"),
        numpy.zeros((1, 3), numpy.int32),
        numpy.zeros((1,), numpy.int64),
        numpy.zeros((1, 3, 1), numpy.int64),
        numpy.zeros((1, 3, 2), numpy.int64),
    ],
    ids=lambda array: f"{array.dtype.str} {array.shape}",
)
def test_calls_that_differ_in_dtype_or_rank_never_share_a_batch(together: Make, other: Any) -> None:
    two = together()
    results = two.results({"x": numpy.zeros((1, 3), numpy.int64)}, {"x": other})
    assert len(two.seen) == 2
    assert (results[1]["x"].dtype, results[1]["x"].shape) == (other.dtype, other.shape)


def test_calls_that_differ_in_the_shape_behind_their_length_never_share_a_batch(
    together: Make,
) -> None:
    three = together()
    shapes = [(1, 4, 2), (1, 4, 3), (2, 4, 2)]
    results = three.results(*({"x": numpy.zeros(shape)} for shape in shapes))
    assert sorted(batch["x"].shape for batch in three.seen) == [(1, 4, 3), (3, 4, 2)]
    assert [result["x"].shape for result in results] == shapes


@pytest.mark.model
def test_arrays_and_tensors_never_share_a_batch(together: Make) -> None:
    torch = pytest.importorskip("torch")
    two = together()
    results = two.results(
        {"x": numpy.zeros((1, 3))}, {"x": torch.zeros((1, 3), dtype=torch.float64)}
    )
    assert len(two.seen) == 2
    assert [type(result["x"]) for result in results] == [numpy.ndarray, torch.Tensor]


def test_further_arguments_form_groups_and_reach_the_function(together: Make) -> None:
    four = together(lambda features, scale=1: {"x": features["x"] * scale})
    calls = [{"x": numpy.array([[number]])} for number in range(4)]
    results = four.results(*calls, extra=({"scale": 2}, {}, {"scale": 2}, {"scale": 2.0}))
    assert [result["x"].tolist() for result in results] == [[[0]], [[1]], [[4]], [[6.0]]]
    assert sorted(len(batch["x"]) for batch in four.seen) == [1, 1, 2]


def test_further_arguments_may_be_passed_by_position() -> None:
    @batched.inference.dynamically
    def fn(features: dict[str, Any], scale: int, offset: int = 0) -> Any:
        return features["x"] * scale + offset

    with fn:
        assert fn({"x": numpy.array([1, 2])}, 10, 5).tolist() == [15, 25]
        assert fn({"x": numpy.array([1, 2])}, 10, offset=1).tolist() == [11, 21]
        with pytest.raises(TypeError, match="scale"):
            fn({"x": numpy.array([1, 2])})  # type: ignore[call-overload]  # as a caller might


class Watched(numpy.ndarray[Any, Any]):
    """A row that says when it is looked at."""

    looked: Callable[[], None]

    def __getitem__(self, place: Any) -> Any:
        if place is None:
            self.looked()
        return super().__getitem__(place)


def test_other_kinds_of_features_that_arrive_meanwhile_do_not_disturb_a_call(
    together: Make,
) -> None:
    one = together()

    def others() -> None:  # as another thread might, just then
        for number in range(CACHE_LIMIT):
            one.fn.submit({"x": numpy.zeros((1, 1, number))})

    rows = [numpy.ones(width).view(Watched) for width in (2, 3, 1)]
    for row, looked in zip(rows, (lambda: None, others, lambda: None), strict=True):
        row.looked = looked
    assert one.fn({"x": rows})["x"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]


# ---------------------------------------------------------------- padding


def test_short_rows_are_padded_on_the_right(together: Make) -> None:
    two = together(pad_token={"ids": 9})
    two.results({"ids": ids([1, 2], [3])}, {"ids": ids([4, 5, 6])})
    assert lists(two.seen[0]) == {"ids": [[1, 2, 9], [3, 9, 9], [4, 5, 6]]}


def test_short_rows_are_padded_on_the_left(together: Make) -> None:
    two = together(pad_token={"ids": 9}, padding_side="left")
    two.results({"ids": ids([1, 2], [3])}, {"ids": ids([4, 5, 6])})
    assert lists(two.seen[0]) == {"ids": [[9, 1, 2], [9, 9, 3], [4, 5, 6]]}


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_of_a_caller_alone_are_padded_to_the_longest_of_them(
    together: Make, side: str
) -> None:
    one = together(pad_token={"ids": 9}, padding_side=side)
    one.results({"ids": ids([1, 2], [3])})
    assert lists(one.seen[0]) == {"ids": [[1, 2], [3, 9] if side == "right" else [9, 3]]}


@pytest.mark.parametrize("spelling", ["pad_token", "pad_tokens"])
def test_each_feature_has_a_pad_of_its_own(together: Make, spelling: str) -> None:
    two = together(**{spelling: {"ids": 7, "scores": -1.5, "flags": True}})

    def call(width: int) -> dict[str, Any]:
        return {
            "ids": numpy.ones((1, width), int),
            "scores": numpy.ones((1, width)),
            "flags": numpy.zeros((1, width), bool),
            "attention_mask": numpy.ones((1, width), int),
            "other": numpy.ones((1, width), int),
        }

    two.results(call(1), call(2))
    assert lists(two.seen[0]) == {
        "ids": [[1, 7], [1, 1]],
        "scores": [[1.0, -1.5], [1.0, 1.0]],
        "flags": [[False, True], [False, False]],
        "attention_mask": [[1, 0], [1, 1]],
        "other": [[1, 0], [1, 1]],
    }


def test_each_feature_is_padded_by_its_own_longest_row(together: Make) -> None:
    two = together()
    two.results({"a": ids([1]), "b": ids([1, 1, 1])}, {"a": ids([2, 2]), "b": ids([2])})
    assert lists(two.seen[0]) == {"a": [[1, 0], [2, 2]], "b": [[1, 1, 1], [2, 0, 0]]}


def test_rows_of_several_axes_are_padded_along_their_first(together: Make) -> None:
    two = together(pad_token={"x": 9})
    two.results({"x": numpy.ones((1, 1, 2))}, {"x": numpy.ones((1, 3, 2))})
    assert two.seen[0]["x"].tolist() == [[[1, 1], [9, 9], [9, 9]], [[1, 1]] * 3]


def test_features_with_one_value_in_each_row_are_joined(together: Make) -> None:
    two = together()
    results = two.results({"x": numpy.array([1, 2])}, {"x": [numpy.array(3)]})
    assert two.seen[0]["x"].tolist() == [1, 2, 3]
    assert [result["x"].tolist() for result in results] == [[1, 2], [3]]


def test_rows_may_have_no_length_at_all(together: Make) -> None:
    two = together()
    results = two.results({"x": numpy.zeros((1, 0), int)}, {"x": numpy.ones((2, 2), int)})
    assert two.seen[0]["x"].tolist() == [[0, 0], [1, 1], [1, 1]]
    assert [result["x"].shape for result in results] == [(1, 0), (2, 2)]


def test_token_features_are_padded_to_a_multiple_even_if_one_call_is_the_batch(
    together: Make,
) -> None:
    one = together(pad_to_multiple_of=4, pad_token={"ids": 9})
    (result,) = one.results(
        {"ids": numpy.array([[1, 2, 3, 4, 5]]), "flags": numpy.ones((1, 4), bool)}
    )
    assert lists(one.seen[0]) == {"ids": [[1, 2, 3, 4, 5, 9, 9, 9]], "flags": [[True] * 4]}
    assert result["ids"].tolist() == [[1, 2, 3, 4, 5]]


def test_other_features_are_padded_to_a_multiple_only_if_they_are_padded(together: Make) -> None:
    two = together(pad_to_multiple_of=4, pad_token={"sounds": 0})
    images, sounds = numpy.ones((1, 3, 5, 5)), [numpy.ones((1, width)) for width in (5, 6)]
    two.results({"images": images, "sounds": sounds[0]}, {"images": images, "sounds": sounds[1]})
    assert two.seen[0]["images"].shape == (2, 3, 5, 5)
    assert two.seen[0]["sounds"].shape == (2, 8)


def test_every_length_that_the_function_sees_is_a_multiple_but_one_to_learn_from(
    together: Make,
) -> None:
    two = together(
        lambda features: features["ids"][:, :, None] * numpy.ones(8, int), pad_to_multiple_of=8
    )
    for _ in range(3):
        results = two.results({"ids": numpy.ones((1, 3), int)}, {"ids": numpy.ones((1, 6), int)})
        assert [result.shape for result in results] == [(1, 3, 8), (1, 6, 8)]
    assert [features["ids"].shape for features in two.seen] == [
        (2, 8),
        (1, 3),
        (1, 8),
        (2, 8),
        (2, 8),
    ]


# ---------------------------------------------------------------- what is no sequence is not padded


def of_width(width: int) -> Callable[[dict[str, Any]], Any]:
    """A function that fails for rows of any other width."""

    def compute(features: dict[str, Any]) -> Any:
        if features["x"].shape[1] != width:
            raise ValueError(f"rows of {features['x'].shape[1]}, not {width}")
        return features["x"].sum(axis=1)

    return compute


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "U2"])
def test_a_vector_of_another_size_is_an_error_in_company_as_it_is_alone(
    together: Make, dtype: str
) -> None:
    right, wrong = ({"x": numpy.zeros((1, width), dtype)} for width in (768, 384))
    some = together(lambda features: of_width(768)({"x": features["x"].astype(bool)}))
    with pytest.raises(ValueError, match="rows of 384, not 768"):
        some.fn(wrong)
    served, failed, served_too = some.answers(right, wrong, right)
    assert (served.tolist(), served_too.tolist()) == ([0], [0])
    assert isinstance(failed, ValueError)


@pytest.mark.model
def test_a_tensor_of_another_size_is_an_error_in_company_as_it_is_alone(together: Make) -> None:
    torch = pytest.importorskip("torch")
    some = together(of_width(768))
    served, failed = some.answers(*({"x": torch.zeros(1, width)} for width in (768, 384)))
    assert served.tolist() == [0]
    assert isinstance(failed, ValueError)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("tokens", [False, True])
def test_a_grey_image_never_shares_a_batch_with_one_of_three_colours(
    together: Make, dtype: str, tokens: bool
) -> None:
    def call(channels: int) -> dict[str, Any]:
        image = {"x": numpy.full((1, channels, 5, 5), channels, dtype)}
        # as many tokens as there are channels
        return {"ids": numpy.ones((1, channels), int), **image} if tokens else image

    two = together(lambda features: features["x"])
    results = two.results(call(1), call(3), call(3))
    assert [result.shape for result in results] == [(1, 1, 5, 5), (1, 3, 5, 5), (1, 3, 5, 5)]
    assert sorted(batch["x"].shape for batch in two.seen) == [(1, 1, 5, 5), (2, 3, 5, 5)]


def test_vectors_of_one_size_share_a_batch_whatever_the_lengths_of_the_tokens_beside_them(
    together: Make,
) -> None:
    def call(width: int, size: int) -> dict[str, Any]:
        return {"ids": numpy.ones((1, width), int), "x": numpy.ones((1, size))}

    many = together(lambda features: features["x"], unpad=False)
    calls = [call(5, 4), call(7, 4), call(5, 6), call(2, 4), call(6, 6)]
    results = many.results(*calls)
    assert [result.tolist() for result in results] == [each["x"].tolist() for each in calls]
    # 6 tokens beside 6 numbers may be numbers of the tokens
    assert sorted(batch["x"].shape for batch in many.seen) == [(1, 6), (1, 6), (3, 4)]


@pytest.mark.parametrize("shape", [(), (4,), (0,)])
def test_what_is_as_long_as_tokens_in_every_call_is_padded_with_them(
    together: Make, shape: tuple[int, ...]
) -> None:
    def call(width: int, other: int = 0) -> dict[str, Any]:
        return {
            "ids": numpy.ones((1, width), int),
            "x": numpy.ones((1, other or width, *shape)),
            "labels": numpy.ones((1, 2), int),
        }

    many = together(lambda features: features["x"].sum(1), unpad=False)
    calls = [call(5), call(7), call(3, 7), call(1, 2)]
    results = many.results(*calls)
    assert [result.tolist() for result in results] == [each["x"].sum(1).tolist() for each in calls]
    assert sorted(batch["x"].shape for batch in many.seen) == [
        (1, 2, *shape),  # as long as other tokens
        (1, 7, *shape),
        (2, 7, *shape),
    ]


def test_floats_are_padded_where_they_have_a_pad_and_with_them_what_is_as_long(
    together: Make,
) -> None:
    two = together(pad_token={"sound": 0.0}, pad_to_multiple_of=4)
    two.results(*({"sound": numpy.ones((1, n)), "weights": numpy.ones((1, n, 2))} for n in (3, 5)))
    assert {name: array.shape for name, array in two.seen[0].items()} == {
        "sound": (2, 8),
        "weights": (2, 8, 2),
    }


def test_rows_of_one_call_may_differ_in_length_whatever_they_are(together: Make) -> None:
    two = together()
    results = two.results(
        {"x": [numpy.ones(2), numpy.ones(3)]}, {"x": [numpy.ones(3), numpy.ones(1)]}
    )
    assert [result["x"].tolist() for result in results] == [
        [[1, 1, 0], [1, 1, 1]],
        [[1, 1, 1], [1, 0, 0]],
    ]
    assert [batch["x"].shape for batch in two.seen] == [(4, 3)]


# ---------------------------------------------------------------- tokens without a mask


def test_token_ids_that_are_padded_without_a_mask_are_warned_of_once_and_by_name(
    together: Make, caplog: pytest.LogCaptureFixture
) -> None:
    two = together(name="shop.embed")
    calls = [{"x": numpy.ones((1, n)), "words": numpy.ones((1, n), int)} for n in (2, 3)]
    two.results(calls[0], calls[0])
    assert not caplog.records
    for _ in range(2):
        two.results(*calls)
    (warning,) = caplog.records
    assert (warning.name, warning.levelname) == ("batched", "WARNING")
    assert warning.getMessage() == (
        "shop.embed: words is padded, and no mask among the features tells the function so: "
        "results may depend on the calls that share a batch. Pass one, such as attention_mask"
    )


def test_a_pad_token_for_a_feature_that_is_not_there_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Model:
        @batched.inference.dynamically(pad_token={"input_id": 7, "mask": 0})
        def total(self, features: dict[str, Any]) -> Any:
            return features["input_ids"].sum(1)

    one, two = Model(), Model()
    for model in (one, two, one):
        assert model.total(input_ids=numpy.ones((1, 2), int), mask=numpy.ones((1, 2))) == [2]
    (warning,) = caplog.records
    assert warning.getMessage().endswith(
        "Model.total: pad_token names input_id, which the first call does not pass: its features "
        "are input_ids, mask"
    )


def test_of_a_method_all_instances_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Model:
        @batched.inference.dynamically(pad_to_multiple_of=4)
        def embed(self, features: dict[str, Any]) -> Any:
            return features["ids"].sum(1)

    for _ in range(2):
        model = Model()
        assert model.embed(ids=numpy.ones((1, 3), int)).tolist() == [3]
        model.embed.shutdown()
    assert ["Model.embed: ids is padded" in each.getMessage() for each in caplog.records] == [True]


@pytest.mark.parametrize(
    "beside",
    [
        {"attention_mask": numpy.ones((1, 3), int)},
        {"padding_mask": numpy.ones((1, 3), numpy.float32)},
        {"real": numpy.ones((1, 3), bool)},
        {"lengths": numpy.array([3])},
    ],
    ids=lambda beside: next(iter(beside)),
)
def test_nobody_is_warned_where_the_function_is_told_what_is_padding(
    together: Make, beside: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    two = together(pad_to_multiple_of=8)
    two.results(*[{"ids": numpy.ones((1, 3), int), **beside}] * 2)
    assert two.seen[0]["ids"].shape == (2, 8)
    assert not caplog.records


# ---------------------------------------------------------------- pads that do not fit


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        ("uint8", -1),
        ("uint8", 256),
        ("int8", 128),
        ("int32", 2**40),
        ("int64", 2**63),
        ("int64", 0.5),
        ("int64", float("inf")),
        ("int64", float("nan")),
        ("int64", 1j),
        ("bool", 2),
        ("float32", 1j),
        ("float32", 1e300),
        ("float16", 1e6),
    ],
)
def test_a_pad_that_the_dtype_cannot_hold_is_refused_to_those_callers_alone(
    together: Make, library: Any, dtype: str, pad: Any
) -> None:
    two = together(pad_token={"x": pad})
    refused, served = two.answers(
        {"x": library.zeros((1, 2), dtype=getattr(library, dtype))},
        {"x": numpy.zeros((1, 2), "complex128")},
    )
    assert isinstance(refused, CollationError), repr(refused)
    assert "x " in str(refused)
    assert repr(pad) in str(refused)
    assert isinstance(served, dict)
    assert len(two.seen) == 1


@pytest.mark.parametrize("pad", [float("-inf"), float("inf"), -1.5, 65504])
def test_floats_are_padded_with_whatever_they_can_hold(
    together: Make, library: Any, pad: float
) -> None:
    two = together(pad_token={"x": pad})
    two.results(
        {"x": library.ones((1, 1), dtype=library.float16)},
        {"x": library.ones((1, 2), dtype=library.float16)},
    )
    assert two.seen[0]["x"].tolist() == [[1, pad], [1, 1]]


def test_an_integer_may_be_given_as_a_float(together: Make) -> None:
    two = together(pad_token={"x": 3.0})
    two.results({"x": numpy.ones((1, 1), int)}, {"x": numpy.ones((1, 2), int)})
    assert two.seen[0]["x"].tolist() == [[1, 3], [1, 1]]


# ---------------------------------------------------------------- features that make no batch

ROW = numpy.zeros(3, numpy.int64)

BAD: list[tuple[str, Any, list[str]]] = [
    (
        "unequal rows",
        {"ids": numpy.zeros((2, 3)), "mask": numpy.zeros((5, 3), int)},
        ["ids", "(2, 3)", "mask", "(5, 3)", "float64", "int64"],
    ),
    (
        "unequal rows in a list",
        {"ids": [ROW, ROW], "mask": numpy.zeros((5, 3))},
        ["ids", "list of 2", "mask", "(5, 3)"],
    ),
    ("a single value", {"ids": numpy.zeros((2, 3)), "mask": numpy.array(3)}, ["mask", "int64"]),
    ("no features", {}, ["empty mapping"]),
    ("no rows", {"ids": numpy.zeros((0, 3))}, ["ids", "(0, 3)"]),
    (
        "no rows in one of them",
        {"ids": numpy.zeros((1, 3)), "mask": numpy.zeros((0, 3))},
        ["mask", "(0, 3)"],
    ),
    ("an empty list", {"ids": []}, ["ids"]),
    ("a list of integers", {"ids": [1, 2, 3]}, ["ids", "int"]),
    ("a list of lists", {"ids": [[1, 2, 3]]}, ["ids", "list"]),
    ("a list of texts", {"ids": ["a", "b"]}, ["ids", "str"]),
    ("a list with None in it", {"ids": [ROW, None]}, ["ids", "None"]),
    ("a tuple of rows", {"ids": (ROW, ROW)}, ["ids", "tuple"]),
    ("None", {"ids": ROW[None], "mask": None}, ["mask", "None"]),
    ("a text", {"ids": "text"}, ["ids", "str"]),
    ("bytes", {"ids": b"bytes"}, ["ids", "bytes"]),
    ("an integer", {"ids": 3}, ["ids", "int"]),
    ("a mapping", {"ids": {"deep": ROW}}, ["ids", "dict"]),
    (
        "rows of different dtype",
        {"ids": [ROW, ROW.astype(float)]},
        ["ids", "int64", "float64", "(3,)"],
    ),
    ("rows of different rank", {"ids": [ROW, ROW[None]]}, ["ids", "(3,)", "(1, 3)"]),
    (
        "rows of different shape",
        {"ids": [numpy.zeros((3, 2)), numpy.zeros((3, 4))]},
        ["ids", "(3, 2)", "(3, 4)"],
    ),
    ("a name that is no string", {3: ROW}, ["3"]),
    ("a masked array", {"ids": numpy.ma.masked_array(ROW)}, ["ids"]),
    ("no mapping but an array", ROW, ["mapping"]),
    ("no mapping but None", None, ["mapping"]),
    ("no mapping but a list of them", [{"ids": ROW}], ["mapping"]),
]


@pytest.mark.parametrize(
    ("call", "said"), [pytest.param(call, said, id=name) for name, call, said in BAD]
)
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
    assert three.fn.stats.calls == 3  # the two, and the decoy
    with pytest.raises(CollationError):
        three.fn(call)


@pytest.mark.model
@pytest.mark.parametrize(
    "kind", ["single value", "sparse", "nested", "array among tensors", "tensor among arrays"]
)
def test_tensors_that_make_no_batch_are_refused_to_their_caller_alone(
    together: Make, kind: str
) -> None:
    torch = pytest.importorskip("torch")
    row = torch.zeros(3, dtype=torch.int64)
    bad = {
        "single value": torch.tensor(3),
        "sparse": torch.eye(3).to_sparse(),
        "nested": torch.nested.nested_tensor([row, row[:2]], layout=torch.jagged),
        "array among tensors": [row, row.numpy()],
        "tensor among arrays": [row.numpy(), row],
    }[kind]
    two = together()
    refused, served = two.answers({"ids": bad}, {"ids": row[None]})
    assert type(refused) is CollationError, repr(refused)
    assert "ids" in str(refused)
    assert served["ids"].tolist() == [[0, 0, 0]]


# ---------------------------------------------------------------- how features are passed, and how
# the function gets them


def test_features_that_are_a_batch_are_passed_on_without_a_copy(together: Make) -> None:
    one = together()
    call = {"ids": numpy.array([[1, 2]]), "scores": numpy.ones((1, 5)), "labels": numpy.array([3])}
    one.fn(call)
    assert all(one.seen[0][name] is array for name, array in call.items())


@pytest.mark.model
def test_tensors_that_are_a_batch_are_passed_on_without_a_copy(together: Make) -> None:
    torch = pytest.importorskip("torch")
    one = together()
    call = {"ids": torch.tensor([[1, 2]]), "scores": torch.ones(1, 5, dtype=torch.bfloat16)}
    one.fn(call)
    assert all(one.seen[0][name] is array for name, array in call.items())


def test_what_a_shared_batch_is_written_to_belongs_to_no_caller(together: Make) -> None:
    def compute(features: dict[str, Any]) -> Any:
        features["x"] += 1
        return features["x"]

    two = together(compute)
    calls = [{"x": numpy.array([[1, 2]])}, {"x": numpy.array([[3, 4]])}]
    assert [result.tolist() for result in two.results(*calls)] == [[[2, 3]], [[4, 5]]]
    assert [call["x"].tolist() for call in calls] == [[[1, 2]], [[3, 4]]]


@pytest.mark.parametrize(
    "make",
    [dict, UserDict, lambda features: MappingProxyType(features)],
    ids=["dict", "UserDict", "proxy"],
)
def test_any_mapping_will_do_and_the_function_gets_a_dict(
    together: Make, make: Callable[[Any], Any]
) -> None:
    two = together()
    results = two.results(make({"x": numpy.array([1])}), make({"x": numpy.array([2])}))
    assert [result["x"].tolist() for result in results] == [[1], [2]]
    assert [type(features) for features in two.seen] == [dict]
    two.fn(make({"x": numpy.array([1])}))
    assert type(two.seen[-1]) is dict


@pytest.mark.model
def test_what_a_tokenizer_returns_will_do() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    @batched.inference.dynamically
    def fn(features: dict[str, Any]) -> Any:
        return features["input_ids"] * 2

    with fn:
        features = transformers.BatchEncoding(
            {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 2)}
        )
        assert fn(features).tolist() == [[2, 4]]
        assert fn(**features).tolist() == [[2, 4]]


def test_features_may_be_passed_by_keyword(together: Make) -> None:
    one = together()
    assert lists(one.fn(ids=numpy.array([[1]]), mask=numpy.array([[2]]))) == {
        "ids": [[1]],
        "mask": [[2]],
    }
    assert one.fn.submit(ids=numpy.array([[1]])).result(20)["ids"].tolist() == [[1]]
    with pytest.raises(CollationError, match="at least one feature"):
        one.fn()


def test_a_mapping_may_be_passed_by_the_name_of_the_parameter_and_a_feature_of_that_name() -> None:
    @batched.inference.dynamically
    def fn(features: dict[str, Any], scale: int = 1) -> Any:
        return {name: array * scale for name, array in features.items()}

    with fn:
        assert lists(fn(features={"x": numpy.array([1])}, scale=3)) == {"x": [3]}  # type: ignore[call-overload]  # as in any function
        assert lists(fn(features=numpy.array([1]))) == {"features": [1]}


def test_features_reach_a_function_by_keyword_if_it_wants_them_so() -> None:
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


def test_methods_take_features_and_each_instance_has_batches_of_its_own() -> None:
    class Model:
        def __init__(self, scale: int) -> None:
            self.scale = scale

        @batched.inference.dynamically
        def mapped(self, features: dict[str, Any], offset: int = 0) -> Any:
            return features["x"] * self.scale + offset

        @batched.inference.dynamically(spread_kwargs=True)
        def spread(self, x: Any, y: Any = 0, *, offset: int = 0) -> Any:
            return (x + y) * self.scale + offset

    two, three = Model(2), Model(3)
    x = numpy.array([1, 2])
    with two.mapped, three.mapped, two.spread, three.spread:
        assert two.mapped({"x": x}).tolist() == [2, 4]
        assert three.mapped({"x": x}, offset=1).tolist() == [4, 7]
        assert three.mapped(x=x).tolist() == [3, 6]
        assert two.spread({"x": x, "y": x}).tolist() == [4, 8]
        assert three.spread({"x": x}, offset=1).tolist() == [4, 7]
        assert three.spread(x=x, y=x).tolist() == [6, 12]


def test_map_takes_calls_of_features_and_keeps_their_order(together: Make) -> None:
    one = together(batch_size=4)
    calls = ({"x": numpy.arange(rows)} for rows in (1, 5, 2, 3))
    assert [result["x"].tolist() for result in one.fn.map(calls)] == [
        list(range(rows)) for rows in (1, 5, 2, 3)
    ]


# ---------------------------------------------------------------- calls larger than a batch


def test_a_call_larger_than_a_batch_is_split_and_joined_in_its_order(together: Make) -> None:
    one = together(
        lambda features: {"x": features["x"] * 2, "n": features["x"].sum(1)}, batch_size=8
    )
    x = numpy.arange(300).reshape(100, 3)
    (result,) = one.results({"x": x})
    assert (result["x"] == x * 2).all()
    assert (result["n"] == x.sum(1)).all()
    assert [len(batch["x"]) for batch in one.seen] == [8] * 12 + [4]


@pytest.mark.model
def test_a_call_of_tensors_larger_than_a_batch_is_split_and_joined_in_its_order(
    together: Make,
) -> None:
    torch = pytest.importorskip("torch")
    one = together(lambda features: (features["x"] * 2, features["x"].sum(1)), batch_size=8)
    x = torch.arange(300).reshape(100, 3)
    (result,) = one.results({"x": x})
    assert torch.equal(result[0], x * 2)
    assert torch.equal(result[1], x.sum(1))
    assert [len(batch["x"]) for batch in one.seen] == [8] * 12 + [4]


def test_all_parts_of_a_call_are_as_long_as_its_longest_row(together: Make) -> None:
    one = together(batch_size=1)
    (result,) = one.results({"ids": ids([1], [2, 2, 2], [3, 3])})
    assert [batch["ids"].tolist() for batch in one.seen] == [[[1, 0, 0]], [[2, 2, 2]], [[3, 3, 0]]]
    assert result["ids"].tolist() == [[1, 0, 0], [2, 2, 2], [3, 3, 0]]


def test_parts_of_a_call_that_shared_batches_with_longer_rows_are_joined_at_its_own_length(
    together: Make,
) -> None:
    two = together(
        lambda features: {
            "ids": features["ids"],
            "hidden": features["ids"][:, :, None] * numpy.ones(3, int),
        },
        batch_size=3,
    )
    short, long = two.results({"ids": numpy.ones((5, 2), int)}, {"ids": numpy.full((5, 3), 2)})
    assert short["ids"].tolist() == [[1, 1]] * 5
    assert long["ids"].tolist() == [[2, 2, 2]] * 5
    assert (short["hidden"].shape, long["hidden"].shape) == ((5, 2, 3), (5, 3, 3))


# ---------------------------------------------------------------- lengths


def test_calls_of_like_length_run_together(together: Make) -> None:
    many = together(batch_size=4, unpad=False)
    results = many.results(
        *({"ids": numpy.full((1, width), number)} for number, width in enumerate([1, 9] * 4))
    )
    assert sorted(batch["ids"].shape for batch in many.seen) == [(4, 1), (4, 9)]
    assert [result["ids"].tolist() for result in results] == [
        [[number] * width] for number, width in enumerate([1, 9] * 4)
    ]
    assert many.fn.stats.padding_waste == 0.0


def test_a_budget_of_tokens_caps_rows_times_the_length_that_the_function_sees(
    together: Make,
) -> None:
    many = together(max_batch_tokens=16, pad_to_multiple_of=4, unpad=False)
    many.results(
        *({"ids": numpy.ones((1, width), int)} for width in (3, 4, 2, 3, 6, 7, 5)),
        {"ids": numpy.ones((1, 30), int)},
    )
    shapes = [batch["ids"].shape for batch in many.seen]
    assert sum(rows for rows, _ in shapes) == 8
    assert all(rows * width <= 16 or rows == 1 for rows, width in shapes), shapes
    assert (1, 32) in shapes, "what is larger than the budget runs alone"
    assert max(rows for rows, _ in shapes) > 1


def test_the_length_of_a_row_is_asked_of_a_dict(together: Make) -> None:
    asked: list[Any] = []

    def length(row: dict[str, Any]) -> int:
        asked.append({name: value.tolist() for name, value in row.items() if name != "decoy"})
        return len(row.get("ids", ()))

    one = together(length=length)
    one.results({"ids": numpy.array([[1, 2], [3, 4]]), "label": numpy.array([5, 6])})
    assert [row for row in asked if row] == [
        {"ids": [1, 2], "label": 5},
        {"ids": [3, 4], "label": 6},
    ]


@pytest.mark.parametrize(
    ("returned", "kind"), [("long", TypeError), (-1, ValueError), (None, TypeError)]
)
def test_a_length_that_is_none_is_an_error_of_its_caller_alone(
    together: Make, returned: Any, kind: type[Exception]
) -> None:
    two = together(length=lambda row: returned if row.get("bad") else 1)
    failed, served = two.answers({"bad": numpy.array([1])}, {"ids": numpy.array([1])})
    assert type(failed) is kind
    assert "length" in str(failed)
    assert served["ids"].tolist() == [1]


# ---------------------------------------------------------------- devices


@pytest.mark.model
@pytest.mark.parametrize("rows", [1, 2])
def test_a_device_makes_tensors_of_arrays(together: Make, rows: int) -> None:
    torch = pytest.importorskip("torch")
    all_of = together(device="cpu")
    call = {
        "ids": numpy.array([[1, 2]]),
        "scores": numpy.ones((1, 2), numpy.float16),
        "flags": numpy.array([True]),
    }
    results = all_of.results(*[call] * rows)
    assert {name: tensor.dtype for name, tensor in all_of.seen[0].items()} == {
        "ids": torch.int64,
        "scores": torch.float16,
        "flags": torch.bool,
    }
    assert [result["ids"].tolist() for result in results] == [[[1, 2]]] * rows
    assert all(type(tensor) is torch.Tensor for tensor in results[0].values())


@pytest.mark.model
@pytest.mark.parametrize("kind", ["read-only", "reversed", "byte-swapped", "strided", "turned"])
def test_a_device_takes_arrays_however_they_lie_in_memory(together: Make, kind: str) -> None:
    torch = pytest.importorskip("torch")
    array: Any = numpy.arange(6).reshape(2, 3)
    if kind == "read-only":
        array.flags.writeable = False
    else:
        array = {
            "reversed": array[::-1],
            "byte-swapped": array.astype(">i8"),
            "strided": array[:, ::2],
            "turned": array.T,
        }[kind]
    one = together(device="cpu")
    result = one.fn({"x": array})
    assert type(result["x"]) is torch.Tensor
    assert result["x"].tolist() == array.tolist()
    results = one.results({"x": array}, {"x": array})
    assert [each["x"].tolist() for each in results] == [array.tolist()] * 2


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["U3", "object", "datetime64[s]"])
def test_what_no_tensor_can_hold_stays_an_array(together: Make, dtype: str) -> None:
    pytest.importorskip("torch")
    two = together(device="cpu")
    array = numpy.array([1, 2]).astype(dtype)
    results = two.results({"x": array}, {"x": array})
    assert type(two.seen[0]["x"]) is numpy.ndarray
    assert [result["x"].tolist() for result in results] == [array.tolist()] * 2


def test_texts_and_objects_are_features_too(together: Make) -> None:
    two = together()
    texts, objects = numpy.array(["ab", "c"]), numpy.array([{1}, None], dtype=object)
    results = two.results(
        {"texts": texts, "objects": objects}, {"texts": texts[:1], "objects": objects[:1]}
    )
    assert [lists(result) for result in results] == [
        {"texts": ["ab", "c"], "objects": [{1}, None]},
        {"texts": ["ab"], "objects": [{1}]},
    ]


@pytest.mark.model
def test_results_are_brought_where_they_are_wanted(together: Make) -> None:
    pytest.importorskip("torch")
    two = together(output_device="meta")
    results = two.results(
        {"x": numpy.ones((1, 2)), "y": numpy.ones(1)}, {"x": numpy.ones((2, 2)), "y": numpy.ones(2)}
    )
    assert [type(result["x"]) for result in results] == [numpy.ndarray] * 2, (
        "only tensors are anywhere"
    )
    two = together(device="cpu", output_device="meta")
    results = two.results({"x": numpy.ones((1, 2))}, {"x": numpy.ones((2, 2))})
    assert two.seen[0]["x"].device.type == "cpu"
    assert [(result["x"].device.type, tuple(result["x"].shape)) for result in results] == [
        ("meta", (1, 2)),
        ("meta", (2, 2)),
    ]


@pytest.mark.model
def test_inputs_that_require_gradients_carry_no_graph_into_a_shared_batch(together: Make) -> None:
    torch = pytest.importorskip("torch")
    two = together(lambda features: features["x"] * 2)
    results = two.results(*({"x": torch.ones(n, 2, requires_grad=True)} for n in (1, 2)))
    assert not two.seen[0]["x"].requires_grad
    assert not any(result.requires_grad for result in results)
    alone = two.fn({"x": torch.ones(1, 2, requires_grad=True)})
    assert not alone.requires_grad
    assert alone.grad_fn is None


# ---------------------------------------------------------------- statistics


def test_the_share_of_padding_is_counted(together: Make) -> None:
    two = together(unpad=False)
    two.results({"ids": numpy.ones((1, 2), int)}, {"ids": numpy.ones((3, 4), int)})
    assert two.fn.stats.padding_waste == 2 / 16


def test_padding_among_the_rows_of_one_call_is_counted_too(together: Make) -> None:
    one = together(pad_to_multiple_of=4, unpad=False)
    one.results({"ids": ids([1], [1, 1, 1])})
    assert one.fn.stats.padding_waste == 4 / 8


def test_rows_without_a_length_are_no_padding(together: Make) -> None:
    two = together()
    two.results({"x": numpy.ones(3)}, {"x": numpy.ones(1)})
    assert two.fn.stats.padding_waste == 0.0


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"pad_token": 0}, TypeError, "pad_token"),
        ({"pad_token": {"x": "pad"}}, TypeError, "pad_token"),
        ({"pad_token": {1: 0}}, TypeError, "pad_token"),
        ({"pad_token": {}, "pad_tokens": {}}, TypeError, "pad_tokens"),
        ({"padding_side": "middle"}, ValueError, "padding_side"),
        ({"pad_to_multiple_of": 0}, ValueError, "pad_to_multiple_of"),
        ({"pad_to_multiple_of": 1.5}, TypeError, "pad_to_multiple_of"),
        ({"pad_to_multiple_of": True}, TypeError, "pad_to_multiple_of"),
        ({"unpad": True}, TypeError, "unpad"),
        ({"unpad": "never"}, TypeError, "unpad"),
        ({"unpad": {"x": 1}}, TypeError, "unpad"),
        ({"unpad": {"x": {"1": "ids"}}}, TypeError, "unpad"),
        ({"unpad": {"x": {0: "ids"}}}, ValueError, "unpad"),
        ({"spread_kwargs": 1}, TypeError, "spread_kwargs"),
        ({"device": "nowhere"}, ValueError, "device"),
        ({"output_device": 1.5}, ValueError, "output_device"),
        ({"on_oom": "ignore"}, ValueError, "on_oom"),
        ({"padding": "right"}, TypeError, "padding"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_at_decoration(
    settings: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        batched.inference.dynamically(**settings)
    with pytest.raises(kind, match=said):
        batched.aio.inference.dynamically(**settings)


@pytest.mark.parametrize(
    "setting", ["pad_token", "padding_side", "unpad", "spread_kwargs", "device"]
)
def test_the_plain_variant_has_none_of_the_settings_of_features(setting: str) -> None:
    with pytest.raises(TypeError, match=setting):
        batched.dynamically(**{setting: None})  # type: ignore[call-overload]  # as a caller might


def test_the_rows_of_a_list_may_be_numbers_of_numpy() -> None:
    fn = batched.inference.dynamically(lambda features: features["x"] * 2)
    result = fn(x=list(numpy.arange(3.0, dtype=numpy.float32)))
    assert result.dtype == numpy.float32
    assert result.tolist() == [0.0, 2.0, 4.0]
    fn.shutdown()


@pytest.mark.model
def test_numbers_of_less_than_a_byte_are_refused() -> None:
    torch = pytest.importorskip("torch")
    fn = batched.inference.dynamically(lambda features: features["x"])
    with pytest.raises(CollationError, match="of which no batch can be made"):
        fn(x=torch.empty(2, 2, dtype=torch.float4_e2m1fn_x2))
    fn.shutdown()


@pytest.mark.parametrize("beside", ["boxes", "weights", "embeddings"])
def test_what_is_as_long_as_tokens_is_rounded_up_with_them(together: Make, beside: str) -> None:
    shape = {"boxes": (1, 5, 4), "weights": (1, 5), "embeddings": (1, 5, 3)}[beside]
    other = numpy.ones(shape, numpy.int64 if beside == "boxes" else numpy.float32)
    one = together(pad_to_multiple_of=8)
    one.results(
        {
            "ids": numpy.ones((1, 5), int),
            beside: other,
            "image": numpy.ones((1, 5, 4, 4), numpy.uint8),
        }
    )
    assert one.seen[0]["ids"].shape == (1, 8)
    assert one.seen[0][beside].shape == (1, 8, *shape[2:])
    assert one.seen[0]["image"].shape == (1, 5, 4, 4)


def test_a_function_of_features_by_name_without_spread_kwargs_is_told_so() -> None:
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
    spread: Any = batched.inference.dynamically(spread_kwargs=True)(total)
    with pytest.raises(TypeError, match="'mask'$"):
        spread({"ids": call["ids"]})
    assert spread(call) == [2]
    spread.shutdown()


def test_a_value_for_all_rows_is_told_where_to_go() -> None:
    fn = batched.inference.dynamically(lambda features, scale: features["x"] * scale)
    with pytest.raises(
        CollationError,
        match=r"got a single value of float64; .* next to the features, .*scale=\.\.\.",
    ):
        fn({"x": numpy.ones((1, 2)), "scale": numpy.array(2.0)})
    assert fn({"x": numpy.ones((1, 2))}, scale=2.0).tolist() == [[2.0, 2.0]]
    fn.shutdown()


def test_an_argument_among_features_by_keyword_is_told_where_to_go() -> None:
    @batched.inference.dynamically
    def fn(features: dict[str, Any], layer: int = 0) -> Any:
        return features["x"] + layer

    with pytest.raises(CollationError, match="other arguments go next to a mapping of features"):
        fn(x=numpy.ones((1, 2)), layer=3)  # type: ignore[call-overload]
    assert fn({"x": numpy.ones((1, 2))}, layer=3).tolist() == [[4.0, 4.0]]
    fn.shutdown()


@pytest.mark.parametrize(
    ("value", "hint"),
    [([[1, 2], [3]], "return_tensors"), (3, "return_tensors"), (None, "leave it out")],
)
def test_what_is_no_feature_comes_with_a_hint(value: Any, hint: str) -> None:
    fn = batched.inference.dynamically(lambda features: features)
    with pytest.raises(CollationError, match=hint):
        fn({"x": value})


@pytest.mark.model
def test_a_device_that_this_build_of_torch_has_not_is_told_at_decoration() -> None:
    torch = pytest.importorskip("torch")
    for kind, backend in (("cuda", torch.backends.cuda), ("mps", torch.backends.mps)):
        if not backend.is_built():
            with pytest.raises(ValueError, match=f"has no {kind.upper()}"):
                batched.inference.dynamically(device=kind)
    with pytest.raises(ValueError, match="output_device must be a device of torch, got 'nowhere'"):
        batched.inference.dynamically(output_device="nowhere")


@pytest.mark.parametrize(("short", "long"), [("U2", "U5"), ("S2", "S5"), (">U2", ">U5")])
def test_texts_share_a_batch_whatever_room_they_take(together: Make, short: str, long: str) -> None:
    many = together()
    texts = [
        numpy.array(["ab", "c"], short),
        numpy.array(["hello"], long),
        numpy.array(["d"], short),
    ]
    rows = [numpy.array("e", short), numpy.array("world", long)]
    results = many.results(*({"x": text} for text in [*texts, rows]))
    assert [batch["x"].astype("U").tolist() for batch in many.seen] == [
        ["ab", "c", "hello", "d", "e", "world"]
    ]
    assert [result["x"].astype("U").tolist() for result in results] == [
        ["ab", "c"],
        ["hello"],
        ["d"],
        ["e", "world"],
    ]


def test_texts_and_bytes_never_share_a_batch(together: Make) -> None:
    two = together()
    calls = [{"x": numpy.array(["ab"], dtype)} for dtype in ("U2", "S2", ">U2")]
    assert [result["x"].dtype for result in two.results(*calls)] == ["U2", "S2", ">U2"]
    assert len(two.seen) == 3


# ---------------------------------------------------------------- while libraries are imported


def test_a_library_that_another_thread_is_just_importing_is_no_failure(
    together: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    two = together(lambda features: {"y": features["x"] * 2})
    calls: list[Any] = [{"x": numpy.ones((2, 3))}, {"x": [numpy.ones(3)]}]
    for given in (calls[:1], calls):
        for call, result in zip(given, two.results(*given), strict=True):
            assert result["y"].tolist() == [[2, 2, 2]] * len(call["x"])
    (refused,) = two.answers({"x": "text"})
    assert isinstance(refused, CollationError), repr(refused)


# ---------------------------------------------------------------- types with rules of their own


class Metres(numpy.ndarray[Any, Any]):
    def __array_function__(self, *_: Any) -> Any:
        raise TypeError("lengths only")


def test_records_are_arrays_with_and_without_neighbours(together: Make) -> None:
    two = together(lambda features: features["x"]["a"])
    call = {"x": numpy.rec.array([(1, 3), (2, 4)], [("a", int), ("b", int)])}
    assert [result.tolist() for result in (*two.results(call), *two.results(call, call))] == [
        [1, 2]
    ] * 3
    assert {type(features["x"]) for features in two.seen} == {numpy.ndarray}


def test_a_type_with_rules_of_its_own_is_refused_to_its_caller_alone(together: Make) -> None:
    two = together()
    plain = {"x": numpy.ones((1, 2))}
    for odd, said in (
        (numpy.ones((1, 2)).view(Metres), "Metres float64 (1, 2)"),
        (numpy.ma.masked_array([[1, 2]], [[True, False]]), "MaskedArray int64 (1, 2)"),
    ):
        refused, *others = two.answers({"x": odd}, plain, plain)
        assert isinstance(refused, CollationError)
        assert "x must be a dense array or tensor, or a list of them, one for each row, got" in str(
            refused
        )
        assert str(refused).endswith(said)
        assert [other["x"].tolist() for other in others] == [[[1, 1]]] * 2


@pytest.mark.model
def test_a_default_device_of_torch_is_not_that_of_the_features(together: Make) -> None:
    torch = pytest.importorskip("torch")
    two = together()
    with torch.device("meta"):
        for lengths in ((2,), (2, 3)):
            calls = [
                {"x": torch.ones((1, length), dtype=dtype, device="cpu")}
                for length in lengths
                for dtype in (torch.int64, torch.bfloat16)
            ]
            for call, result in zip(calls, two.results(*calls), strict=True):
                assert torch.equal(result["x"], call["x"])


@pytest.mark.model
def test_what_torch_cannot_share_of_an_array_is_copied(together: Make) -> None:
    pytest.importorskip("torch")
    field = numpy.zeros(3, [("a", "i1"), ("b", "<f8")])["b"]
    one = together(device="cpu")
    assert one.fn({"x": field})["x"].tolist() == [0.0] * 3


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_which_no_batch_can_be_made_are_refused(together: Make) -> None:
    torch = pytest.importorskip("torch")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for odd, said in (
        (
            nested,
            (
                "dense array or tensor, or a list of them, one for each row, got torch float32 "
                "(nested)"
            ),
        ),
        (
            [nested],
            (
                "dense array or tensor, or a list of them, one for each row, got torch float32 "
                "(nested)"
            ),
        ),
        (torch.ones(3, 3).to_sparse(), "got torch float32 (3, 3) of layout torch.sparse_coo"),
        (
            [torch.ones(2), torch.ones(2, device="meta")],
            "got torch float32 (2,) and, as row 1, torch float32 (2,) on meta",
        ),
        (
            torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.quint8),
            "x is of torch.quint8, of which no batch can be made",
        ),
    ):
        with pytest.raises(CollationError) as refused:
            together().fn({"x": odd})
        assert said in str(refused.value)
