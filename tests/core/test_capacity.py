"""How many items fit one batch: what settings say, and what memory errors teach, by arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from batched._core.capacity import LONGEST_PATIENCE, PATIENCE, Capacity

Memory = Callable[[int, int], bool]  # whether so many items fit, the longest of that length


def fitted(capacity: Capacity, batches: int, items: int, longest: int = 0) -> None:
    for _ in range(batches):
        capacity.fitted(items, longest)


def run(capacity: Capacity, lengths: list[int], memory: Memory) -> int:
    """Runs a batch of items of these lengths as far as memory goes, in halves if it must, and
    returns how often it did not fit.
    """
    failed: list[tuple[int, int]] = []

    def attempt(lengths: list[int]) -> None:
        if memory(len(lengths), max(lengths)):
            return
        failed.append((len(lengths), max(lengths)))
        if len(lengths) > 1:
            half = (len(lengths) + 1) // 2
            attempt(lengths[:half])
            attempt(lengths[half:])

    attempt(lengths)
    for items, longest in failed:
        capacity.too_big(items, longest)
    if not failed:
        capacity.fitted(len(lengths), max(lengths))
    return len(failed)


def rows(most: int) -> Memory:
    return lambda items, _: items <= most


def cells(most: int) -> Memory:
    return lambda items, longest: items * longest <= most


# ---------------------------------------------------------------- what settings say


@pytest.mark.parametrize("longest", [0, 1, 7, 10**9])
def test_without_a_token_budget_length_does_not_matter(longest: int) -> None:
    assert Capacity(32).most(longest) == 32
    assert not Capacity(32).varies


@pytest.mark.parametrize(
    ("longest", "most"),
    [
        (0, 32),
        (1, 32),
        (3, 32),
        (4, 25),
        (33, 3),
        (34, 2),
        (50, 2),
        (51, 1),
        (100, 1),
        (101, 1),
        (10**9, 1),
    ],
)
def test_a_token_budget_holds_items_times_the_longest_and_at_least_one_item(
    longest: int, most: int
) -> None:
    assert Capacity(32, 100).most(longest) == most
    assert Capacity(32, 100).varies


def test_a_token_budget_below_the_batch_size_holds_for_items_without_length() -> None:
    assert Capacity(32, 5).most(0) == 5


# ---------------------------------------------------------------- what a memory error teaches


@pytest.mark.parametrize(("items", "most"), [(32, 16), (31, 16), (5, 3), (3, 2), (2, 1)])
def test_a_batch_that_was_too_big_is_halved(items: int, most: int) -> None:
    capacity = Capacity(32)
    capacity.too_big(items, 0)
    assert capacity.most(0) == most
    assert capacity.varies


def test_halves_that_are_too_big_are_halved_again() -> None:
    capacity = Capacity(64)
    run(capacity, [1] * 64, rows(8))
    assert capacity.most(1) == 8


def test_a_single_item_that_is_too_big_teaches_nothing() -> None:
    capacity = Capacity(32)
    capacity.too_big(1, 50)
    assert (capacity.most(50), capacity.varies) == (32, False)
    capacity.too_big(2, 50)
    capacity.too_big(1, 50)
    assert capacity.most(50) == 1


def test_what_was_too_big_at_one_length_is_too_big_at_longer_ones_and_not_at_shorter_ones() -> None:
    capacity = Capacity(32)
    capacity.too_big(32, 50)
    assert [capacity.most(longest) for longest in (0, 49, 50, 51, 10**6)] == [32, 32, 16, 16, 16]


def test_the_token_budget_and_the_ceiling_both_hold() -> None:
    capacity = Capacity(32, 600)
    capacity.too_big(20, 30)
    assert [capacity.most(longest) for longest in (10, 29, 30, 60, 61, 300)] == [
        32,
        20,
        10,
        10,
        9,
        2,
    ]


def test_several_ceilings_hold_each_from_its_length_on() -> None:
    capacity = Capacity(32)
    for items, longest in ((8, 90), (32, 10), (16, 40)):
        capacity.too_big(items, longest)
    assert [capacity.most(longest) for longest in (9, 10, 39, 40, 89, 90, 900)] == [
        32,
        16,
        16,
        8,
        8,
        4,
        4,
    ]


@pytest.mark.parametrize("longest", [39, 40])
def test_ceilings_that_one_of_a_shorter_length_makes_useless_are_dropped(longest: int) -> None:
    capacity = Capacity(32)
    for items, length in ((16, 40), (14, 50), (8, 90)):
        capacity.too_big(items, length)
    capacity.too_big(13, longest)
    assert [capacity.most(length) for length in (38, longest, 60, 90)] == [32, 7, 7, 4]
    assert len(capacity._ceilings) == 2


def test_a_batch_from_before_the_ceiling_fell_teaches_nothing_new() -> None:
    capacity = Capacity(64)
    run(capacity, [1] * 64, rows(8))
    capacity.too_big(64, 1)
    capacity.too_big(16, 30)
    assert [capacity.most(longest) for longest in (1, 30)] == [8, 8]
    assert len(capacity._ceilings) == 1


@pytest.mark.parametrize(
    ("known", "most"),
    [((24, 100), 24), ((24, 120), 24), ((24, 99), 16), ((10, 100), 16), ((31, 500), 31)],
)
def test_a_ceiling_is_not_below_what_has_fitted_at_its_length_or_a_longer_one(
    known: tuple[int, int], most: int
) -> None:
    capacity = Capacity(32)
    capacity.fitted(*known)
    capacity.too_big(32, 100)
    assert capacity.most(100) == most


def test_all_that_has_fitted_counts_not_only_the_last() -> None:
    capacity = Capacity(32)
    for known in ((20, 90), (24, 40), (18, 60), (23, 95), (22, 95), (23, 95), (5, 200), (24, 39)):
        capacity.fitted(*known)
    capacity.too_big(32, 95)
    assert capacity.most(95) == 23
    capacity.too_big(30, 40)
    assert capacity.most(40) == 24
    capacity.too_big(12, 96)
    assert capacity.most(96) == 6


def test_of_what_has_fitted_the_best_counts_at_each_length() -> None:
    capacity = Capacity(32)
    for known in ((9, 30), (8, 40), (5, 50), (6, 60)):
        capacity.fitted(*known)
    capacity.too_big(10, 50)
    assert capacity.most(50) == 6
    capacity.too_big(10, 40)
    assert capacity.most(40) == 8


def test_a_failure_of_what_has_fitted_before_forgets_that_it_has() -> None:
    capacity = Capacity(32)
    capacity.fitted(32, 20)
    capacity.fitted(30, 70)
    capacity.fitted(20, 80)
    capacity.too_big(24, 60)  # although 30 longer ones had fitted
    assert capacity.most(60) == 12
    capacity.too_big(12, 60)
    assert capacity.most(60) == 6
    capacity.too_big(32, 30)  # the 32 of length 20 say nothing about these
    assert capacity.most(30) == 16
    capacity.too_big(16, 20)
    assert capacity.most(20) == 8


@pytest.mark.parametrize("longest", [100, 99])
def test_the_size_that_has_just_failed_is_not_tried_again_because_it_fitted_once(
    longest: int,
) -> None:
    capacity = Capacity(32)
    capacity.fitted(24, 100)
    capacity.too_big(24, longest)
    assert capacity.most(100) == 12


# ---------------------------------------------------------------- patience


def test_a_ceiling_is_raised_by_an_eighth_once_enough_batches_have_reached_it() -> None:
    capacity = Capacity(64)
    capacity.too_big(64, 0)
    fitted(capacity, PATIENCE - 1, 32)
    assert capacity.most(0) == 32
    fitted(capacity, 1, 32)
    assert capacity.most(0) == 36
    fitted(capacity, PATIENCE, 36)
    assert capacity.most(0) == 40


def test_a_low_ceiling_is_raised_by_one_item() -> None:
    capacity = Capacity(64)
    capacity.too_big(2, 0)
    seen = []
    for _ in range(8):
        fitted(capacity, PATIENCE, capacity.most(0))
        seen.append(capacity.most(0))
    assert seen == [2, 3, 4, 5, 6, 7, 8, 9]


def test_only_batches_that_reach_the_ceiling_count() -> None:
    capacity = Capacity(64, 3000)
    capacity.too_big(64, 40)
    fitted(capacity, PATIENCE, 31, 40)  # smaller
    fitted(capacity, PATIENCE, 64, 39)  # shorter
    fitted(capacity, PATIENCE, 30, 100)  # as large as the token budget allows
    fitted(capacity, PATIENCE - 1, 32, 50)
    assert capacity.most(40) == 32
    fitted(capacity, 1, 32, 93)
    assert capacity.most(40) == 36


def test_a_batch_that_was_too_big_does_not_count() -> None:
    capacity = Capacity(64)
    capacity.too_big(64, 0)
    fitted(capacity, PATIENCE - 1, 32)
    capacity.too_big(64, 0)
    assert capacity.most(0) == 32
    fitted(capacity, 1, 32)
    assert capacity.most(0) == 36


def test_a_ceiling_rises_as_far_as_the_batch_size_and_vanishes_when_that_has_held() -> None:
    capacity = Capacity(64)
    capacity.too_big(64, 0)
    seen = []
    for _ in range(7):
        fitted(capacity, PATIENCE, capacity.most(0))
        seen.append(capacity.most(0))
    assert seen == [36, 40, 45, 50, 56, 63, 64]
    assert capacity.varies
    fitted(capacity, PATIENCE - 1, 64)
    assert capacity.varies
    fitted(capacity, 1, 64)
    assert (capacity.most(0), capacity.varies) == (64, False)


def test_a_token_budget_still_matters_when_the_last_ceiling_has_vanished() -> None:
    capacity = Capacity(2, 10)
    capacity.too_big(2, 0)
    fitted(capacity, PATIENCE, 1)
    fitted(capacity, PATIENCE, 2)
    assert (capacity.most(0), capacity.most(6), capacity.varies) == (2, 1, True)


def test_a_ceiling_rises_as_far_as_the_one_for_shorter_items_and_vanishes_there() -> None:
    capacity = Capacity(64)
    capacity.too_big(64, 10)
    capacity.too_big(60, 50)
    fitted(capacity, PATIENCE, 30, 50)
    assert [capacity.most(longest) for longest in (10, 50)] == [32, 32]
    assert len(capacity._ceilings) == 2
    fitted(capacity, PATIENCE, 32, 50)
    assert len(capacity._ceilings) == 1
    fitted(capacity, PATIENCE, 32, 50)
    assert [capacity.most(longest) for longest in (10, 50)] == [36, 36]


@pytest.mark.parametrize(("most", "at_first"), [(8, 1 + 2 + 4), (1, 1 + 2 + 4 + 8 + 16 + 32)])
def test_a_raise_that_fails_is_taken_back_and_the_patience_doubles(
    most: int, at_first: int
) -> None:
    """64 -> 32 -> 16 -> 8 at first; then 9 is tried after 128 full batches, after 256, after 512,
    up to a limit.
    """
    capacity, memory = Capacity(64), rows(most)
    assert run(capacity, [0] * 64, memory) == at_first
    between: list[int] = []
    full = 0
    while len(between) < 10:
        assert capacity.most(0) in (most, most + 1)
        if run(capacity, [0] * capacity.most(0), memory):
            between.append(full)
            full = 0
        else:
            full += 1
    assert between == [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 16384, 16384]
    assert between[-1] == LONGEST_PATIENCE


def test_a_raise_that_fails_costs_the_raise_and_not_half() -> None:
    capacity = Capacity(64)
    capacity.too_big(64, 0)
    fitted(capacity, PATIENCE, 32)
    capacity.too_big(36, 0)
    assert capacity.most(0) == 32


def test_a_raise_that_fails_goes_back_to_what_is_known_to_fit() -> None:
    capacity = Capacity(64)
    capacity.too_big(64, 0)
    fitted(capacity, PATIENCE, 32)
    capacity.fitted(34, 0)
    capacity.too_big(36, 0)
    assert capacity.most(0) == 34


@pytest.mark.parametrize(("items", "most"), [(20, 10), (32, 16)])
def test_what_failed_below_the_raise_is_halved(items: int, most: int) -> None:
    capacity = Capacity(64)
    capacity.too_big(64, 0)
    fitted(capacity, PATIENCE, 32)
    capacity.too_big(items, 0)
    assert capacity.most(0) == most


def test_a_raise_that_holds_makes_patient_with_the_next_one_as_at_first() -> None:
    capacity = Capacity(64)
    capacity.too_big(64, 0)
    fitted(capacity, PATIENCE, 32)
    capacity.too_big(36, 0)
    fitted(capacity, 2 * PATIENCE - 1, 32)
    assert capacity.most(0) == 32
    fitted(capacity, 1, 32)
    fitted(capacity, 2 * PATIENCE, 36)
    assert capacity.most(0) == 40
    fitted(capacity, PATIENCE, 40)
    assert capacity.most(0) == 45


# ---------------------------------------------------------------- which length is to blame


def test_a_raise_that_fails_at_a_length_while_shorter_ones_fit_is_taken_back_from_there_on() -> (
    None
):
    capacity = Capacity(64)
    capacity.too_big(64, 16)
    fitted(capacity, PATIENCE, 32, 16)
    capacity.fitted(36, 20)
    capacity.too_big(36, 28)
    assert [capacity.most(longest) for longest in (15, 16, 27, 28, 99)] == [64, 36, 36, 32, 32]
    capacity.too_big(36, 25)
    assert [capacity.most(longest) for longest in (24, 25, 28)] == [36, 32, 32]
    fitted(capacity, 2 * PATIENCE - 1, 32, 30)
    assert capacity.most(25) == 32  # patient: it has failed once
    fitted(capacity, 1, 32, 30)
    assert capacity.most(25) == 36


def test_a_raise_that_fails_before_any_shorter_one_has_fitted_is_taken_back_as_a_whole() -> None:
    capacity = Capacity(64)
    capacity.too_big(64, 16)
    fitted(capacity, PATIENCE, 32, 16)
    capacity.too_big(36, 28)
    assert [capacity.most(longest) for longest in (15, 16, 28)] == [64, 32, 32]


def test_the_next_raise_spares_the_length_that_failed() -> None:
    capacity = Capacity(64)
    capacity.too_big(64, 16)
    fitted(capacity, PATIENCE, 32, 16)
    capacity.too_big(36, 28)
    fitted(capacity, 2 * PATIENCE, 32, 20)
    assert [capacity.most(longest) for longest in (15, 16, 27, 28)] == [64, 36, 36, 32]


@pytest.mark.parametrize("most", [8, 9, 20])
def test_where_only_rows_count_lengths_bring_no_more_errors(most: int) -> None:
    """Once the shortest items have been met, no more errors than with equal lengths: one in 128
    full batches, then in 256.
    """
    capacity, memory, rng = Capacity(64), rows(most), random.Random(0)
    run(capacity, [5] * 64, memory)
    while capacity.most(5) <= most:
        run(capacity, [5] * capacity.most(5), memory)
    errors = []
    for batch in range(20_000):
        lengths = [rng.randint(5, 120)] * capacity.most(0 if batch % 50 else 5)
        items = capacity.most(max(lengths))
        if run(capacity, lengths[:items], memory):
            errors.append(batch)
    assert len(errors) <= 1 + 8  # 128 + 256 + ... + 128 * 2**7 > 20,000


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 20_000), st.integers(0, 40), st.booleans())
def test_no_batch_is_limited_to_less_than_half_of_what_fits(
    seed: int, memory_size: int, fixed: int, quadratic: bool
) -> None:
    """Whatever has failed: the ceilings that long items taught never reach below that for shorter
    ones.
    """

    def memory(items: int, longest: int) -> bool:
        return items * (longest * (longest if quadratic else 1) + fixed) <= memory_size

    capacity, rng = Capacity(64), random.Random(seed)
    for _ in range(400):
        lengths = sorted((rng.randint(1, 120) for _ in range(rng.randint(1, 64))), reverse=True)
        run(capacity, lengths[: capacity.most(lengths[0])], memory)
    mosts = [capacity.most(longest) for longest in range(200)]
    assert mosts == sorted(mosts, reverse=True)
    assert 1 <= mosts[-1] <= mosts[0] <= 64
    for longest in range(1, 121):
        fits = max((items for items in range(1, 65) if memory(items, longest)), default=0)
        assert capacity.most(longest) >= fits / 2


@pytest.mark.parametrize("most", [1000, 3000])
def test_where_memory_goes_with_length_short_items_keep_their_large_batches_and_errors_get_rare(
    most: int,
) -> None:
    capacity, memory, rng = Capacity(64), cells(most), random.Random(0)
    errors = []
    for batch in range(20_000):
        longest = rng.randint(5, 120)
        if run(capacity, [longest] * capacity.most(longest), memory):
            errors.append(batch)
    assert capacity.most(most // 64 // 2) == 64
    for longest in range(5, 121):
        assert capacity.most(longest) >= 0.7 * min(64, most // longest)
    late = sum(batch >= 10_000 for batch in errors)
    assert late <= 100
    assert len(errors) <= 300
