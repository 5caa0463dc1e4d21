"""Functions whose outputs are not simply as long as the rows of their batch: one call that shows it
changes nothing for the others, of which each gets what it would get alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest

import batched
from feature_models import same

CALLS = 1000
CALLERS = 32  # threads
LONGEST = 24  # tokens

Function = Callable[[dict[str, Any]], Any]


def call(width: int, first: int = 1) -> dict[str, Any]:
    ids = numpy.arange(first, first + width)[None] % 97 + 1
    return {"ids": ids, "mask": numpy.ones_like(ids)}


def per_token(features: Mapping[str, Any], size: int = 8) -> dict[str, Any]:
    ids = features["ids"] * features["mask"]
    return {"hidden": ids[:, :, None] * numpy.arange(1, size + 1), "sums": ids.sum(1)}


def truncating(features: dict[str, Any]) -> Any:
    """Sees 16 tokens, as a model with so many positions does."""
    return per_token({name: array[:, :16] for name, array in features.items()})


def rounding_up(features: dict[str, Any]) -> Any:
    """Pads its rows to a multiple of 8, as some kernels need them."""
    more = -features["ids"].shape[1] % 8
    return per_token(
        {name: numpy.pad(array, ((0, 0), (0, more))) for name, array in features.items()}
    )


def at_least(features: dict[str, Any]) -> Any:
    """Pads its rows to 12 tokens if they have fewer."""
    more = max(0, 12 - features["ids"].shape[1])
    return per_token(
        {name: numpy.pad(array, ((0, 0), (0, more))) for name, array in features.items()}
    )


def one_longer(features: dict[str, Any]) -> Any:
    """Puts a token of its own before the others."""
    return per_token(
        {name: numpy.pad(array, ((0, 0), (1, 0)), mode="edge") for name, array in features.items()}
    )


def shortening(features: dict[str, Any]) -> Any:
    """Has an entry for four tokens, as convolutions have for sounds."""
    return per_token({name: array[:, ::4] for name, array in features.items()})


class Reloaded:
    """A model that is replaced by one of another output width."""

    def __init__(self) -> None:
        self.size = 4

    def __call__(self, features: dict[str, Any]) -> Any:
        return per_token(features, self.size)


def serve(function: Any, calls: list[dict[str, Any]]) -> None:
    """Makes the calls from many threads; each must get what `function` returns for it alone."""
    compute: Function = function.__wrapped__
    with ThreadPoolExecutor(CALLERS) as pool:
        for features, result in zip(calls, pool.map(function, calls), strict=True):
            same(result, compute(features))


def mixed(longest: int = LONGEST) -> list[dict[str, Any]]:
    source = random.Random(0)
    return [call(source.randint(1, longest), first) for first in range(CALLS)]


@pytest.mark.once
@pytest.mark.parametrize(
    ("compute", "odd", "longest"),
    [
        (truncating, 20, 16),  # all calls but one fit
        (truncating, 20, LONGEST),
        (rounding_up, 12, LONGEST),
        (at_least, 3, LONGEST),
        (one_longer, 5, LONGEST),
        (shortening, 7, LONGEST),
    ],
)
def test_one_call_that_comes_back_longer_or_shorter_harms_no_other(
    compute: Function, odd: int, longest: int
) -> None:
    fn = batched.inference.dynamically(compute)
    with fn:
        serve(fn, [call(5), call(9)])
        same(fn(call(odd)), compute(call(odd)))
        serve(fn, mixed(longest))
        assert fn.stats.errors == 0


def test_calls_of_all_lengths_survive_the_reload_of_a_model_with_another_output_width() -> None:
    model = Reloaded()
    fn = batched.inference.dynamically(name="model")(model)
    with fn:
        serve(fn, mixed())
        model.size = 6
        assert fn(call(5))["hidden"].shape == (1, 5, 6)
        serve(fn, mixed())
        assert fn.stats.errors == 0
