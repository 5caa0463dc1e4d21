"""Calls of features that share batches, and the libraries that arrays are of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from feature_stage import Together, unchanged


@pytest.fixture(params=["numpy", pytest.param("torch", marks=pytest.mark.model)])
def library(request: pytest.FixtureRequest) -> Any:
    """numpy, then torch: for what both have under one name."""
    return pytest.importorskip(request.param)


@pytest.fixture
def together() -> Iterator[Callable[..., Together]]:
    """Makes batched functions of features, and closes them in the end."""
    made: list[Together] = []

    def make(compute: Callable[..., Any] = unchanged, **settings: Any) -> Together:
        made.append(Together(compute, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
