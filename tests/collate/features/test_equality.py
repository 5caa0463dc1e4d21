"""Each caller gets the result of a call on its own: random functions of random features.

The functions treat rows independently and ignore padding. Numpy and torch share their code. The
expected result of a call is the output of the function for its features alone. Rows of different
length are padded by code of this file.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy
import pytest
from hypothesis import strategies as st

from feature_stage import Together

Model = Callable[[dict[str, Any]], Any]
Call = dict[str, Any]

PROPERTY = hypothesis.settings(
    max_examples=int(os.environ.get("BATCHED_EXAMPLES", "6")),  # of each function
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)

WIDTHS = st.sampled_from([0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7])
"""Lengths of rows; few, so that they coincide with each other and with hidden sizes."""


def is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage")  # torch may not be there to ask


def floats(array: Any) -> Any:
    return array.float() if is_tensor(array) else array.astype(numpy.float32)


def library(array: Any) -> Any:
    return sys.modules["torch" if is_tensor(array) else "numpy"]


def count(size: int, array: Any) -> Any:
    return floats(library(array).arange(size))


def detached(array: Any) -> Any:
    return array.detach() if is_tensor(array) else array


def scaled(array: Any) -> Any:
    kind = str(array.dtype)
    if "bool" in kind:
        return ~array
    return array * 2 + 1 if "int" in kind else array * 0.5 + 0.25


@dataclass(frozen=True)
class Shape:
    """Constants of a random function."""

    pad: int  # token id that is no token
    hidden: int
    heads: int


def masked(features: Call, shape: Shape) -> tuple[Any, Any]:
    """Return token ids, 0 for padding, and the mask of tokens; both as floats."""
    mask = floats(features["ids"] != shape.pad)
    return floats(features["ids"]) * mask, mask


def elementwise(features: Call, shape: Shape) -> Any:
    return {name: scaled(array) for name, array in features.items()}


def masked_mean(features: Call, shape: Shape) -> Any:
    ids, mask = masked(features, shape)
    return ids.sum(1) / mask.sum(1).clip(min=1)


def per_token(features: Call, shape: Shape) -> Any:
    ids, _ = masked(features, shape)
    return ids[:, :, None] * (count(shape.hidden, ids) + 1) / 8


def pooled(features: Call, shape: Shape) -> Any:
    return masked_mean(features, shape)[:, None] + count(shape.hidden, features["ids"])


def attentions(features: Call, shape: Shape) -> Any:
    ids, _ = masked(features, shape)
    weights = (count(shape.heads, ids) + 1) / 4
    return ids[:, None, :, None] * ids[:, None, None, :] * weights[None, :, None, None]


def first_tokens_last(features: Call, shape: Shape) -> Any:
    """Return vectors with the hidden size before the length."""
    return per_token(features, shape).swapaxes(1, 2)


def nested(features: Call, shape: Shape) -> Any:
    return {
        "tokens": {
            "hidden": per_token(features, shape),
            "states": (per_token(features, shape), attentions(features, shape), None),
        },
        "loss": None,
        "pooled": [pooled(features, shape)],
        3: {name: scaled(array) for name, array in features.items()},
    }


def across(features: Call, shape: Shape) -> Any:
    """Return outputs with two features of independent lengths on two axes."""
    ids, _ = masked(features, shape)
    outputs = {"ids": scaled(features["ids"])}
    for name, array in features.items():
        if name != "ids" and array.ndim == 2:
            outputs[name] = ids[:, :, None] * floats(array)[:, None, :]
    return outputs


def longest(features: Call, shape: Shape) -> Any:
    """Return a named tuple of torch, as its reductions do."""
    return library(features["ids"]).max(per_token(features, shape), 2)


def recorded(features: Call, shape: Shape) -> Any:
    """Return outputs with gradients. Results must have none."""
    return per_token(features, shape).requires_grad_(), pooled(features, shape).requires_grad_()


MODELS = [elementwise, masked_mean, first_tokens_last, nested, across]
OF_TORCH = [*MODELS, longest, recorded]


@dataclass(frozen=True)
class Spec:
    """Properties of the features of one name."""

    name: str
    dtype: str
    trailing: tuple[int, ...] | None  # shape of rows behind their length; None: rows have no length
    width: int | None  # of all rows; None: each has its own
    pad: Any  # None: not given


PADS: dict[str, list[Any]] = {"bool": [None, False, True], "uint8": [None, 0, 255]}


@st.composite
def specs(draw: st.DrawFn, name: str, dtypes: list[str]) -> Spec:
    dtype = draw(st.sampled_from(dtypes))
    trailing: tuple[int, ...] | None = ()
    if name != "ids":
        trailing = draw(st.sampled_from([None, (), (), (), (1,), (3,), (2, 3), (0,)]))
    width = None if name == "ids" or draw(st.booleans()) else draw(WIDTHS)
    pads = PADS.get(dtype, [None, 0, 1, -1, 9] if "int" in dtype else [None, 0, -1.5])
    return Spec(name, dtype, trailing, width, draw(st.sampled_from(pads)))


def values(
    spec: Spec, shape: tuple[int, ...], source: numpy.random.Generator, tensors: bool, layout: str
) -> Any:
    """Return small numbers that every dtype holds exactly, in a layout of memory."""
    made: Any = source.integers(-16, 17, shape) / 4
    if spec.dtype == "bool":
        made = source.random(shape) < 0.5
    elif "int" in spec.dtype:
        made = source.integers(0, 10, shape)
    if layout == "turned" and made.ndim > 1:
        made = made.swapaxes(0, 1).copy().swapaxes(0, 1)
    guarded = layout == "guarded"  # against being written to, or being part of a graph
    if not tensors:
        made = made.astype(spec.dtype)
        made.flags.writeable = not guarded
        return made
    import torch

    made = torch.from_numpy(made).to(getattr(torch, spec.dtype))
    return made.requires_grad_(guarded and made.dtype.is_floating_point)


LAYOUTS = ["plain", "plain", "turned", "guarded"]


@st.composite
def calls(draw: st.DrawFn, all_specs: list[Spec], dtypes: list[str], tensors: bool) -> Call:
    """Draw the features of one caller, as arrays or as lists of rows."""
    rows = draw(st.integers(1, 4))
    source = numpy.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chosen = list(all_specs)
    if len(chosen) > 1 and draw(st.integers(0, 5)) == 0:  # of another group
        chosen.pop()
    if draw(st.integers(0, 5)) == 0:
        position = draw(st.integers(0, len(chosen) - 1))
        other = draw(st.sampled_from(["int64", "int32"] if position == 0 else dtypes))
        if chosen[position].pad in (None, 0):
            chosen[position] = dataclasses.replace(chosen[position], dtype=other)
    features: Call = {}
    for spec in chosen:
        layout = draw(st.sampled_from(LAYOUTS))
        make = functools.partial(values, spec, source=source, tensors=tensors, layout=layout)
        if spec.trailing is None:
            array = make((rows,))
            if draw(st.integers(0, 3)) == 0:
                array = [array[number, ...] for number in range(rows)]
            features[spec.name] = array
        elif draw(st.booleans()):
            width = spec.width if spec.width is not None else draw(WIDTHS)
            features[spec.name] = make((rows, width, *spec.trailing))
        else:
            whole = spec.dtype == "bool" or "int" in spec.dtype
            padded = spec.pad is not None or (whole and not spec.trailing)
            drawn = [spec.width if spec.width is not None else draw(WIDTHS) for _ in range(rows)]
            widths = drawn if padded else drawn[:1] * rows
            features[spec.name] = [make((width, *spec.trailing)) for width in widths]
    return features


@dataclass(frozen=True)
class Example:
    """A function, its settings, and rounds of calls at the same time."""

    model: Model
    specs: list[Spec]
    rounds: list[list[Call]]
    settings: dict[str, Any]


def tokens(row: Call) -> int:
    return len(row["ids"])


@st.composite
def examples(
    draw: st.DrawFn, make: Callable[[Call, Shape], Any], dtypes: list[str], *, tensors: bool
) -> Example:
    ids = draw(specs("ids", ["int64", "int64", "int32", "uint8"]))
    others = [
        draw(specs(name, dtypes)) for name in ("alpha", "beta", "gamma")[: draw(st.integers(0, 3))]
    ]
    every = [ids, *others]
    shape = Shape(ids.pad or 0, draw(st.integers(1, 7)), draw(st.integers(1, 5)))
    settings: dict[str, Any] = {
        "batch_size": draw(st.sampled_from([1, 2, 3, 5, 8, 32, 32])),
        "padding_side": draw(st.sampled_from(["right", "left"])),
        "pad_to_multiple_of": draw(st.sampled_from([1, 1, 4])),
        draw(st.sampled_from(["pad_token", "pad_tokens"])): {
            spec.name: spec.pad for spec in every if spec.pad is not None
        },
        "spread_kwargs": draw(st.booleans()),
        "length": draw(st.sampled_from([None, None, tokens])),
        "max_batch_tokens": draw(st.sampled_from([None, None, None, 6, 20])),
    }
    rounds = [
        [draw(calls(every, dtypes, tensors)) for _ in range(draw(st.integers(2, 6)))]
        for _ in range(draw(st.sampled_from([1, 1, 2, 3])))
    ]
    return Example(lambda features: make(features, shape), every, rounds, settings)


def own(call: Call, example: Example) -> Call:
    """Return the features of a call alone, with rows padded to the longest of them."""
    pads = {spec.name: spec.pad or 0 for spec in example.specs}
    features: Call = {}
    for name, value in call.items():
        if not isinstance(value, list):
            features[name] = detached(value)
            continue
        rows = [detached(row) for row in value]
        shape = rows[0].shape
        if shape:
            shape = (max(map(len, rows)), *shape[1:])
        full = library(rows[0]).full
        features[name] = array = full((len(rows), *shape), pads[name], dtype=rows[0].dtype)
        for number, row in enumerate(rows):
            if not shape:
                array[number] = row
            elif example.settings["padding_side"] == "left":
                array[number, shape[0] - len(row) :] = row
            else:
                array[number, : len(row)] = row
    return features


def same(actual: Any, expected: Any, path: str = "output") -> None:
    """Compare structures, types, shapes, dtypes, devices and values."""
    assert type(actual) is type(expected), f"{path}: {type(actual)} is no {type(expected)}"
    if isinstance(expected, Mapping):
        assert list(actual) == list(expected), path
        for key in expected:
            same(actual[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            same(one, other, f"{path}[{number}]")
    elif expected is not None:
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), path
        if is_tensor(expected):
            assert (actual.device, actual.requires_grad) == (expected.device, False), path
            actual, expected = [each.detach().double().numpy() for each in (actual, expected)]
        actual, expected = [each.astype(float) for each in (actual, expected)]
        is_close = numpy.allclose(actual, expected, rtol=1e-5, atol=1e-5)
        assert is_close, f"{path}: {actual} is not {expected}"


NUMPY_DTYPES = ["int64", "int32", "uint8", "bool", "float32", "float64", "float16"]


@pytest.mark.once
@pytest.mark.parametrize(
    ("model", "tensors"),
    [
        *((model, False) for model in MODELS),
        *(pytest.param(model, True, marks=pytest.mark.model) for model in OF_TORCH),
    ],
)
def test_each_caller_gets_what_the_function_returns_for_it_alone(model: Any, tensors: bool) -> None:
    """Examples are the same ones every time, unless the environment sets their number."""
    dtypes = [*NUMPY_DTYPES, "bfloat16"] if tensors else NUMPY_DTYPES

    @PROPERTY
    @hypothesis.given(examples(model, dtypes, tensors=tensors))
    def each_caller_gets_its_own(example: Example) -> None:
        some = Together(example.model, **example.settings)
        for calls in example.rounds:
            for call, result in zip(calls, some.results(*calls), strict=True):
                same(result, example.model(own(call, example)))

    if "BATCHED_EXAMPLES" not in os.environ:
        seeded = hypothesis.seed(zlib.crc32(model.__name__.encode()))
        each_caller_gets_its_own = seeded(each_caller_gets_its_own)
    each_caller_gets_its_own()
