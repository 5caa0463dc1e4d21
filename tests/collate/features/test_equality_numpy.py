"""Each caller gets the result of a call on its own: random functions and calls, with numpy."""

from __future__ import annotations

from typing import Any

import pytest

from feature_models import MODELS, examples, hold

DTYPES = ["int64", "int32", "uint8", "bool", "float32", "float64", "float16"]


@pytest.mark.once
@pytest.mark.parametrize("model", MODELS)
def test_each_caller_gets_what_the_function_returns_for_it_alone(model: Any) -> None:
    hold(examples(model, DTYPES, tensors=False), model.__name__)
