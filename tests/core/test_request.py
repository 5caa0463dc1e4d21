"""Waiting items of a call, compared with a plain list of their positions."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from batched._core.request import Request, Slice


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_removes_exactly_the_given_items(seed: int) -> None:
    dice = Random(seed)
    size = dice.randint(1, 40)
    lengths = [100 - position for position in range(size)]
    request = Request([0] * size, size, "g", lengths=lengths)
    waiting = list(range(size))
    while waiting:
        assert request.longest == lengths[waiting[0]]
        low = dice.randrange(len(waiting))
        high = dice.randint(low + 1, min(low + 8, len(waiting)))
        assert request.waiting_lengths(low, high) == [lengths[at] for at in waiting[low:high]]
        slices: list[Slice] = request.cut(low, high)
        assert all(stop < start for (_, _, stop), (_, start, _) in pairwise(slices))
        cut = [at for _, start, stop in slices for at in range(start, stop)]
        assert cut == waiting[low:high]
        del waiting[low:high]
        request.dispatched += len(cut)
        assert not waiting or request.remaining == waiting


def test_without_lengths_the_longest_item_has_length_zero() -> None:
    assert Request([0], 1, "g").longest == 0
