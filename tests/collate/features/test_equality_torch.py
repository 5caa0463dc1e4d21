"""Each caller gets the result of a call on its own: random functions and calls, with torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from feature_models import (
    MODELS,
    Call,
    Example,
    Shape,
    attentions,
    elementwise,
    examples,
    hold,
    per_token,
    pooled,
    scaled,
)

torch: Any = pytest.importorskip("torch")
generic: Any = pytest.importorskip("transformers.utils.generic")

pytestmark = pytest.mark.model

DTYPES = ["int64", "int32", "uint8", "bool", "float32", "float64", "float16", "bfloat16"]
NUMPY_DTYPES = ["int64", "int32", "uint8", "bool", "float32", "float16"]


@dataclass
class EncoderOutput(generic.ModelOutput):  # type: ignore[misc]  # its base is loaded at run time
    """An output of models of transformers."""

    last_hidden_state: Any = None
    pooler_output: Any = None
    hidden_states: Any = None
    attentions: Any = None


def encoder(features: Call, shape: Shape) -> Any:
    hidden = per_token(features, shape)
    output = EncoderOutput(
        last_hidden_state=hidden,
        hidden_states=(scaled(hidden), hidden),
        attentions=(attentions(features, shape),),
    )
    output["scores"] = pooled(features, shape)  # an entry that was added
    return output


def encoder_in_a_dict(features: Call, shape: Shape) -> Any:
    return {
        "first": EncoderOutput(last_hidden_state=per_token(features, shape)),
        "second": EncoderOutput(pooler_output=pooled(features, shape)),
    }


def longest(features: Call, shape: Shape) -> Any:
    """Return a named tuple of torch, as its reductions do."""
    return torch.max(per_token(features, shape), 2)


def recorded(features: Call, shape: Shape) -> Any:
    """Return outputs with gradients. Results must have none."""
    return per_token(features, shape).requires_grad_(), pooled(features, shape).requires_grad_()


@pytest.mark.parametrize("model", [*MODELS, encoder, encoder_in_a_dict, longest, recorded])
def test_each_caller_gets_what_the_function_returns_for_it_alone(model: Any) -> None:
    hold(examples(model, DTYPES, tensors=True), model.__name__)


@pytest.mark.parametrize("model", [elementwise, attentions, encoder])
def test_arrays_of_numpy_become_tensors_if_a_device_is_set(model: Any) -> None:
    def on_tensors(features: Call, shape: Shape) -> Any:
        assert all(isinstance(value, torch.Tensor) for value in features.values())
        return model(features, shape)

    def sent(example: Example) -> Example:
        return dataclasses.replace(example, settings={**example.settings, "device": "cpu"})

    hold(
        examples(on_tensors, NUMPY_DTYPES, tensors=False).map(sent),
        model.__name__,
        lambda array: torch.from_numpy(array.copy()),
    )
