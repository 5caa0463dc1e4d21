"""Specs of features: the calls that share a batch, dtypes, and the values that fill short rows."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest

import batched
from batched.errors import CollationError
from feature_stage import Make, to_lists

pytestmark = pytest.mark.once

NUMPY_DTYPES = "float16 float32 float64 complex64 int8 int64 uint8 uint16 bool >i4"
TORCH_DTYPES = "float16 bfloat16 float32 float64 complex64 int8 int64 uint8 bool float8_e4m3fn"


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        *((name, False) for name in NUMPY_DTYPES.split()),
        *(pytest.param(name, True, marks=pytest.mark.model) for name in TORCH_DTYPES.split()),
    ],
)
def test_arrays_keep_their_dtype_in_a_batch_and_in_results(
    together: Make, name: str, tensors: bool
) -> None:
    torch: Any = pytest.importorskip("torch") if tensors else None
    dtype = getattr(torch, name) if tensors else numpy.dtype(name)

    def ones(*shape: int) -> Any:
        return torch.ones(*shape).to(dtype) if tensors else numpy.ones(shape, dtype)

    two = together(pad_token={"x": 0}, unpad=False)
    results = two.results({"x": ones(1, 2)}, {"x": [ones(3), ones(1)]})
    array = two.seen[0]["x"]
    assert (type(array), array.dtype) == (type(ones(1)), dtype)
    array = array.to(torch.complex64) if tensors else array
    assert array.tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert [result["x"].dtype for result in results] == [dtype, dtype]


@pytest.mark.model
def test_the_default_device_of_torch_does_not_matter(together: Make) -> None:
    torch = pytest.importorskip("torch")
    two = together()
    with torch.device("meta"):
        calls = [
            {"x": torch.ones((1, length), dtype=dtype, device="cpu")}
            for length in (2, 3)
            for dtype in (torch.int64, torch.bfloat16)
        ]
        for call, result in zip(calls, two.results(*calls), strict=True):
            assert torch.equal(result["x"], call["x"])


@pytest.mark.parametrize(
    "other",
    [
        {"x": numpy.zeros((1, 3, 2), ">i8")},
        {"x": numpy.zeros(1, numpy.int64)},
        {"x": numpy.zeros((1, 3, 3), numpy.int64)},
        pytest.param("tensor", marks=pytest.mark.model),
    ],
    ids=str,
)
def test_calls_that_differ_in_dtype_shape_or_library_never_share_a_batch(
    together: Make, other: Any
) -> None:
    if isinstance(other, str):
        other = {"x": pytest.importorskip("torch").zeros((1, 3, 2)).long()}
    two = together()
    _, result = two.results({"x": numpy.zeros((1, 3, 2), numpy.int64)}, other)
    assert len(two.seen) == 2
    assert list(result) == list(other)
    assert (result["x"].dtype, result["x"].shape) == (other["x"].dtype, other["x"].shape)


@pytest.mark.parametrize(("short", "long"), [("U2", "U5"), ("S2", "S5"), (">U2", ">U5")])
def test_texts_of_different_length_share_a_batch(together: Make, short: str, long: str) -> None:
    many = together()
    texts: list[Any] = [
        numpy.array(["ab", "c"], short),
        numpy.array(["hello"], long),
        [numpy.array("e", short), numpy.array("world", long)],
    ]
    results = many.results(*({"x": text} for text in texts))
    given = [result["x"].astype("U").tolist() for result in results]
    assert given == [["ab", "c"], ["hello"], ["e", "world"]]
    (batch,) = many.seen
    assert batch["x"].astype("U").tolist() == ["ab", "c", "hello", "e", "world"]


@pytest.mark.parametrize("dtype", ["float16", "float64", "complex64", "U2"])
def test_a_vector_of_another_size_is_an_error_in_company_as_it_is_alone(
    together: Make, dtype: str
) -> None:
    def compute(features: dict[str, Any]) -> Any:
        if features["x"].shape[1] != 768:
            raise ValueError(f"rows of {features['x'].shape[1]}, not 768")
        return features["x"].astype(bool).sum(axis=1)

    right, wrong = ({"x": numpy.zeros((1, width), dtype)} for width in (768, 384))
    some = together(compute)
    with pytest.raises(ValueError, match="rows of 384, not 768"):
        some.fn(wrong)
    served, failed, served_too = some.answers(right, wrong, right)
    assert (served.tolist(), served_too.tolist()) == ([0], [0])
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


def test_vectors_of_one_size_share_a_batch_with_tokens_of_any_length(together: Make) -> None:
    def call(width: int, size: int) -> dict[str, Any]:
        return {"ids": numpy.ones((1, width), int), "x": numpy.ones((1, size))}

    many = together(lambda features: features["x"], unpad=False)
    calls = [call(5, 4), call(7, 4), call(5, 6), call(2, 4), call(6, 6)]
    results = many.results(*calls)
    assert [result.tolist() for result in results] == [each["x"].tolist() for each in calls]
    # 6 numbers with 6 tokens may be one number for each token
    assert sorted(batch["x"].shape for batch in many.seen) == [(1, 6), (1, 6), (3, 4)]


@pytest.mark.parametrize("shape", [(), (4,), (0,)])
def test_features_as_long_as_tokens_in_every_call_are_padded_with_them(
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


def test_each_feature_has_a_pad_of_its_own(together: Make) -> None:
    pads = {"ids": 7.0, "scores": -math.inf, "flags": True}
    two = together(pad_token=pads, pad_to_multiple_of=3, unpad=False)
    values = {"ids": 1, "scores": numpy.float16(1), "flags": False, "other": 1}
    two.results(*({name: numpy.full((1, n), values[name]) for name in values} for n in (1, 2)))
    assert to_lists(two.seen[0]) == {
        "ids": [[1, 7, 7], [1, 1, 7]],
        "scores": [[1.0, -math.inf, -math.inf], [1.0, 1.0, -math.inf]],
        "flags": [[False, True, True], [False, False, True]],
        "other": [[1, 0, 0], [1, 1, 0]],
    }


@pytest.mark.parametrize(
    ("pads", "told"), [({"id": 7}, True), ({"ids": 7, "mask_ids": 0}, False), ({"x": 1}, False)]
)
def test_a_pad_of_a_feature_that_no_call_has_is_told(
    pads: dict[str, int], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with batched.inference.dynamically(pad_token=pads, name="fn")(lambda features: features) as fn:
        for _ in range(3):
            fn({"ids": numpy.ones((1, 2), int)})
    assert [each.getMessage() for each in caplog.records] == [
        "fn: pad_token has 'id', which a call lacks; did you mean 'ids'?"
    ] * told


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        *(("uint8", -1), ("uint8", 256), ("int32", 2**40), ("bool", 2)),
        *(("int64", pad) for pad in (2**63, 0.5, math.inf, math.nan, 1j)),
        *(("float32", 1j), ("float32", 1e300), ("float16", 1e6)),
    ],
)
def test_a_pad_that_the_dtype_cannot_hold_is_refused_to_its_callers_alone(
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
