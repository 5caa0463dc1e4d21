"""Waiting items of a call, compared with a plain list of their positions."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from batched._core.request import Request, Span


def positions(spans: list[Span]) -> list[int]:
    assert all(start < stop for start, stop in spans)
    assert all(stop < start for (_, stop), (start, _) in pairwise(spans)), "neighbours are one span"
    return [position for start, stop in spans for position in range(start, stop)]


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_removes_exactly_the_given_items(seed: int) -> None:
    dice = Random(seed)
    size = dice.randint(1, 40)
    lengths = [100 - position for position in range(size)]
    request = Request([0] * size, size, "g", lengths=lengths)
    rest, waiting = request.remaining, list(range(size))
    while waiting:
        assert request.longest == lengths[waiting[0]]
        low = dice.randrange(len(waiting))
        high = dice.randint(low + 1, min(low + 8, len(waiting)))
        assert request.waiting_lengths(low, high) == [lengths[at] for at in waiting[low:high]]
        assert positions(rest.cut(low, high)) == waiting[low:high]
        del waiting[low:high]
        assert positions(rest.spans) == waiting
        for position in range(size + 1):
            assert rest.rank(position) == sum(other < position for other in waiting)


def test_without_lengths_the_longest_item_has_length_zero() -> None:
    assert Request([0], 1, "g").longest == 0
