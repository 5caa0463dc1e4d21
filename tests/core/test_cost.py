"""Time of a batch by its size, as learned from past batches."""

from __future__ import annotations

import math

import pytest

from batched._core.cost import ENOUGH, TimeBySize

FIXED, CELL = 0.010, 0.001
"""Fixed time of a batch, and time of each of its cells (s)."""


def times(*batches: tuple[int, float]) -> TimeBySize:
    found = TimeBySize()
    for size, seconds in batches:
        found.add(size, seconds)
    return found


def test_first_batches_that_took_far_longer_than_the_next_are_forgotten() -> None:
    warm = times((1, 60.0))
    assert warm.time(1) == warm.mean == 60.0
    for size, seconds in ((4, 8.0), (8, 1.0)):  # both have compiled
        warm.add(size, seconds)
        assert warm.time(1) == warm.mean == seconds
    warm.add(8, 9.0)
    warm.add(8, 2.0)
    assert warm.mean == 4.0


def test_before_batches_of_two_octaves_the_time_is_their_mean() -> None:
    assert times().time(1) == times().mean == 0.0
    curve = times((4, 1.0), (7, 3.0))
    assert [curve.time(n) for n in (1, 5, 64)] == [2.0, 2.0, 2.0]


def test_the_time_of_a_size_lies_on_the_line_between_its_neighbours() -> None:
    """The time is constant up to 16 items, and grows by 0.5 s with each further item."""
    curve = times((1, 5.0), (16, 5.0), (32, 13.0))
    assert [curve.time(n) for n in (1, 9, 16, 20, 32)] == [5.0, 5.0, 5.0, 7.0, 13.0]
    assert curve.time(40) == 17.0, "the last line continues"
    assert times((8, 2.0), (16, 6.0)).time(1) == 0.0, "the first line continues, down to 0"


def test_a_line_that_falls_does_not_continue() -> None:
    curve = times((8, 4.0), (16, 2.0))
    assert [curve.time(n) for n in (1, 8, 12, 16, 64)] == [4.0, 4.0, 3.0, 2.0, 2.0]


def test_the_fixed_size_is_unknown_before_enough_batches_of_two_octaves() -> None:
    assert times(*[(8, 0.25)] * ENOUGH).fixed_size is None
    assert times(*[(8, 0.25)] * ENOUGH, *[(16, 0.5)] * (ENOUGH - 1)).fixed_size is None


@pytest.mark.parametrize("batches", [[(1, 0.9), (9, 0.001)], [(10, 0.05), (40, 0.01), (80, 0.03)]])
def test_the_fixed_size_is_infinite_if_times_do_not_grow_with_sizes(
    batches: list[tuple[int, float]],
) -> None:
    assert times(*batches * 2 * ENOUGH).fixed_size == math.inf


def test_the_fixed_size_is_never_zero() -> None:
    cost = times(*((size, CELL * size) for size in (10, 40, 20, 80) * 4))
    assert cost.fixed_size == pytest.approx(0.05 * 37.5, rel=0.1)


def test_fixed_size_and_mean_follow_a_function_that_changes() -> None:
    """The fixed size is the offset of the line divided by its slope."""
    cost = times(*((size, CELL * size) for size in [1, 16] * 100))
    for size in [1, 16] * 400:
        cost.add(size, FIXED + CELL * size)
    assert cost.fixed_size == pytest.approx(FIXED / CELL, rel=0.01)
    assert cost.mean == pytest.approx(FIXED + CELL * 8.5, rel=0.01)
