"""The fixture of tests in which calls of features share batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from feature_stage import Together, unchanged


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
