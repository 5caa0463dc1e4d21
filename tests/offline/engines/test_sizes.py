"""Batch sizes that a run finds: arithmetic with literal times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from batched import offline
from batched.offline.engines.sizes import ENOUGH, AutoSize

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        (lambda size: 1.0, [4, 8, 16, 32]),  # a batch costs the same, whatever its size
        (lambda size: size, [4, 8]),  # a row costs the same
        (lambda size: size**2, [4, 8, 4]),  # a row costs more
        (lambda size: 1.0 if size < 16 else 9.0, [4, 8, 16, 8]),
    ],
)
def test_the_size_doubles_while_the_cost_of_a_row_falls(
    seconds: Callable[[int], float], sizes: list[int]
) -> None:
    auto = AutoSize(offline.Auto(4, 32))
    found = [auto.size]
    for _ in range(10 * ENOUGH):
        auto.note(1, 100.0)  # a batch that is not full says nothing
        auto.note(auto.size, seconds(auto.size))
        if auto.size != found[-1]:
            found.append(auto.size)
    assert found == sizes
