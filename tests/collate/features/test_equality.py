"""Each caller gets the result of a call on its own: random functions of random features.

The functions treat rows independently and ignore padding. Numpy and torch share their code. The
expected result of a call is the output of the function for its features alone. Rows of different
length are padded by code of this file.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import hypothesis
import numpy
import pytest
from hypothesis import strategies as st

from feature_stage import FeatureStage, decoy
from stage import BOUND, SCENARIOS, Scenario

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


def like(array: Any, values: list[float]) -> Any:
    """Return `values` as floats of the library of `array`."""
    made = numpy.array(values, numpy.float32)
    if not is_tensor(array):
        return made
    import torch

    return torch.from_numpy(made)


def scaled(array: Any) -> Any:
    """Return other elements of the same dtype."""
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
    return ids[:, :, None] * like(ids, [(number + 1) / 8 for number in range(shape.hidden)])


def pooled(features: Call, shape: Shape) -> Any:
    return masked_mean(features, shape)[:, None] + like(
        features["ids"], [float(number) for number in range(shape.hidden)]
    )


def attentions(features: Call, shape: Shape) -> Any:
    ids, _ = masked(features, shape)
    weights = like(ids, [(number + 1) / 4 for number in range(shape.heads)])
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
    import torch

    return torch.max(per_token(features, shape), 2)


def recorded(features: Call, shape: Shape) -> Any:
    """Return outputs with gradients. Results must have none."""
    return per_token(features, shape).requires_grad_(), pooled(features, shape).requires_grad_()


@functools.cache
def output_of_transformers() -> Any:
    from transformers.utils.generic import ModelOutput

    @dataclass
    class EncoderOutput(ModelOutput):  # type: ignore[misc]  # its base is loaded at run time
        last_hidden_state: Any = None
        pooler_output: Any = None
        hidden_states: Any = None
        attentions: Any = None

    return EncoderOutput


def encoder(features: Call, shape: Shape) -> Any:
    """Return outputs of models of transformers."""
    hidden, kind = per_token(features, shape), output_of_transformers()
    output = kind(
        last_hidden_state=hidden,
        hidden_states=(scaled(hidden), hidden),
        attentions=(attentions(features, shape),),
    )
    output["scores"] = pooled(features, shape)  # an entry that was added
    return {"first": output, "second": kind(pooler_output=pooled(features, shape))}


MODELS = [elementwise, masked_mean, first_tokens_last, nested, across]
OF_TORCH = [*MODELS, encoder, longest, recorded]


@dataclass(frozen=True)
class Spec:
    """Properties of the features of one name."""

    name: str
    dtype: str
    trailing: tuple[int, ...] | None  # shape of rows behind their length; None: rows have no length
    width: int | None  # of all rows; None: each has its own
    pad: Any  # None: not given

    def blank(self, pad: Any, shape: tuple[int, ...], tensors: bool) -> Any:
        if not tensors:
            return numpy.full(shape, pad, self.dtype)
        import torch

        return torch.full(shape, pad, dtype=getattr(torch, self.dtype))


def pads(dtype: str) -> st.SearchStrategy[Any]:
    if dtype == "bool":
        return st.sampled_from([None, False, True])
    if dtype == "uint8":
        return st.sampled_from([None, 0, 255])
    return (
        st.sampled_from([None, 0, 1, -1, 9]) if "int" in dtype else st.sampled_from([None, 0, -1.5])
    )


@st.composite
def specs(draw: st.DrawFn, name: str, dtypes: list[str]) -> Spec:
    dtype = draw(st.sampled_from(dtypes))
    trailing: tuple[int, ...] | None = ()
    if name != "ids":
        trailing = draw(st.sampled_from([None, (), (), (), (1,), (3,), (2, 3), (0,)]))
    width = None if name == "ids" or draw(st.booleans()) else draw(WIDTHS)
    return Spec(name, dtype, trailing, width, draw(pads(dtype)))


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

    scenario: Scenario
    model: Model
    specs: list[Spec]
    rounds: list[list[Call]]
    settings: dict[str, Any]


def tokens(row: Call) -> int:
    return len(row.get("ids", ()))  # a decoy has none


@st.composite
def examples(
    draw: st.DrawFn, make: Callable[[Call, Shape], Any], dtypes: list[str], *, tensors: bool
) -> Example:
    ids = draw(specs("ids", ["int64", "int64", "int32", "uint8"]))
    others = [
        draw(specs(name, dtypes)) for name in ("alpha", "beta", "gamma")[: draw(st.integers(0, 3))]
    ]
    every = [ids, *others]
    shape = Shape(
        0 if ids.pad is None else ids.pad, draw(st.integers(1, 7)), draw(st.integers(1, 5))
    )
    # through a socket only pickles would be tested, too
    local = [scenario for scenario in SCENARIOS if not scenario.kind.endswith("connect")]
    scenario = draw(st.sampled_from(local))
    settings: dict[str, Any] = {
        "batch_size": draw(st.sampled_from([1, 2, 3, 5, 8, 32, 32])),
        "padding_side": draw(st.sampled_from(["right", "left"])),
        "pad_to_multiple_of": draw(st.sampled_from([1, 1, 4])),
        draw(st.sampled_from(["pad_token", "pad_tokens"])): {
            spec.name: spec.pad for spec in every if spec.pad is not None
        },
        "spread_kwargs": draw(st.booleans()),
        "max_concurrent_batches": draw(st.sampled_from([1, 1, 1, 2])),
        "length": draw(st.sampled_from([None, None, tokens])),
        "max_batch_tokens": draw(st.sampled_from([None, None, None, 6, 20])),
    }
    rounds = [
        [draw(calls(every, dtypes, tensors)) for _ in range(draw(st.integers(2, 6)))]
        for _ in range(draw(st.sampled_from([1, 1, 2, 3])))
    ]
    return Example(scenario, lambda features: make(features, shape), every, rounds, settings)


def own(call: Call, example: Example) -> Call:
    """Return the features of a call alone, with rows padded to the longest of them."""
    known = {spec.name: spec for spec in example.specs}
    features: Call = {}
    for name, value in call.items():
        if not isinstance(value, list):
            features[name] = value.detach() if is_tensor(value) else value
            continue
        tensors = is_tensor(value[0])
        spec = dataclasses.replace(known[name], dtype=str(value[0].dtype).removeprefix("torch."))
        shapes = [tuple(row.shape) for row in value]
        longest = max((shape[0] for shape in shapes if shape), default=0)
        array = spec.blank(
            spec.pad or 0, (len(value), *([longest] if shapes[0] else []), *shapes[0][1:]), tensors
        )
        for number, row in enumerate(value):
            source = row.detach() if tensors else row
            if not shapes[number]:
                array[number] = source
            elif example.settings["padding_side"] == "left":
                array[number, longest - len(row) :] = source
            else:
                array[number, : len(row)] = source
        features[name] = array
    return features


def same(actual: Any, expected: Any, path: str = "output") -> None:
    """Compare structures, types, shapes, dtypes, devices and values."""
    assert type(actual) is type(expected), f"{path}: {type(actual)} is no {type(expected)}"
    if expected is None:
        return
    if isinstance(expected, numpy.ndarray) or is_tensor(expected):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), path
        if is_tensor(expected):
            assert actual.device == expected.device, path
            assert not actual.requires_grad, path
            exact = not expected.dtype.is_floating_point
            actual, expected = (
                (tensor if exact else tensor.detach().double()).numpy()
                for tensor in (actual, expected)
            )
        else:
            exact = expected.dtype.kind not in "fc"
        if exact:
            assert (actual == expected).all(), f"{path}: {actual} is not {expected}"
        else:
            assert numpy.allclose(actual, expected, rtol=1e-5, atol=1e-5), (
                f"{path}: {actual} is not {expected}"
            )
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), path
        for key in expected:
            same(actual[key], expected[key], f"{path}[{key!r}]")
            assert (
                not hasattr(actual, "__dataclass_fields__") or getattr(actual, key) is actual[key]
            )
    else:
        assert len(actual) == len(expected), path
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            same(one, other, f"{path}[{number}]")


async def performed(example: Example) -> list[list[Any]]:
    """Return the answers to all calls."""
    stage = FeatureStage(example.scenario)
    fn = stage.decorate(example.model, **example.settings)
    answers: list[list[Any]] = []
    try:
        for round_of_calls in example.rounds:
            async with stage.callers() as callers:
                for _ in range(example.settings["max_concurrent_batches"]):
                    started = len(stage.batches)
                    await callers.call(decoy())
                    await stage.running(started + 1)
                numbers = [await callers.call(call) for call in round_of_calls]
                stage.let_through(example.settings["max_concurrent_batches"])
            answers.append([callers.answers[number] for number in numbers])
    finally:
        stage.let_through(100)
        with anyio.fail_after(BOUND):
            await fn.aclose()
    return answers


def check(example: Example) -> None:
    """Compare the result of each call with the output for its own features."""
    backend, options = example.scenario.backend
    answers = anyio.run(performed, example, backend=backend, backend_options=options)
    for round_of_calls, round_of_answers in zip(example.rounds, answers, strict=True):
        for call, answer in zip(round_of_calls, round_of_answers, strict=True):
            if isinstance(answer, Exception):
                raise answer
            same(answer, example.model(own(call, example)))


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
        check(example)

    if "BATCHED_EXAMPLES" not in os.environ:
        seeded = hypothesis.seed(zlib.crc32(model.__name__.encode()))
        each_caller_gets_its_own = seeded(each_caller_gets_its_own)
    each_caller_gets_its_own()
