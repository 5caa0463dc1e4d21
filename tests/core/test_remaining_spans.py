"""Which items of a call still wait, beside a plain list of their positions."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from batched._core.remaining_spans import RemainingSpans, Span
from batched._core.request import Request

cuts = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1)), max_size=20)


def spelled(spans: list[Span]) -> list[int]:
    return [position for start, stop in spans for position in range(start, stop)]


@given(st.integers(1, 40), cuts)
def test_cutting_takes_what_is_asked_for_and_nothing_else(
    size: int, cuts: list[tuple[float, float]]
) -> None:
    rest, waiting = RemainingSpans(size), list(range(size))
    for where, share in cuts:
        if not waiting:
            break
        low = int(where * len(waiting))
        high = low + 1 + int(share * (len(waiting) - low - 1))
        assert spelled(rest.cut(low, high)) == waiting[low:high]
        del waiting[low:high]
        assert spelled(rest.spans) == waiting
        for position in range(size + 1):
            assert rest.rank(position) == sum(other < position for other in waiting)
            assert list(rest.before(position)) == [
                other for other in reversed(waiting) if other < position
            ]


@given(st.integers(1, 40), cuts)
def test_neighbours_stay_together(size: int, cuts: list[tuple[float, float]]) -> None:
    """There are no more spans than gaps between them, in what waits and in what was cut."""
    rest, waiting = RemainingSpans(size), size
    for where, share in cuts:
        if not waiting:
            break
        low = int(where * waiting)
        high = low + 1 + int(share * (waiting - low - 1))
        for spans in (rest.cut(low, high), rest.spans):
            assert all(start < stop for start, stop in spans)
            assert all(stop < start for (_, stop), (start, _) in pairwise(spans))
        waiting -= high - low


def test_the_longest_item_of_a_call_is_the_longest_that_waits() -> None:
    request = Request([0] * 4, 4, "g", lengths=[9, 5, 5, 2])
    assert request.longest == 9
    assert request.remaining.cut(0, 1) == [(0, 1)]
    assert (request.longest, request.waiting_lengths(2)) == (5, [5, 5])
    assert request.remaining.cut(0, 2) == [(1, 3)]
    assert (request.longest, request.waiting_lengths(2)) == (2, [2])
