"""Number of items that fit one batch, from settings and from memory errors, by arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from batched._core.capacity import PATIENCE, Capacity

Memory = Callable[[int, int], bool]  # whether (items, longest length) fit


def run(capacity: Capacity, lengths: list[int], memory: Memory) -> int:
    """Run a batch of items of these lengths, in halves wherever memory is short.

    Return the number of failures.
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


def test_a_token_budget_holds_items_times_the_longest_and_at_least_one_item() -> None:
    assert Capacity(32).max_items(10**9) == 32, "without a budget"
    most = [Capacity(32, 100).max_items(longest) for longest in (0, 3, 4, 33, 34, 10**9)]
    assert most == [32, 32, 25, 3, 2, 1]


def test_a_single_item_that_is_too_big_sets_no_ceiling() -> None:
    capacity = Capacity(32)
    capacity.too_big(1, 50)
    assert (capacity.max_items(50), capacity.varies) == (32, False)
    capacity.too_big(2, 50)
    capacity.too_big(1, 50)
    assert capacity.max_items(50) == 1


def test_a_ceiling_is_half_of_what_failed_in_cells_and_holds_beside_the_token_budget() -> None:
    capacity, budgeted = Capacity(32), Capacity(32, 600)
    capacity.too_big(32, 50)
    most = [capacity.max_items(longest) for longest in (0, 25, 26, 50, 100, 10**6)]
    assert most == [32, 32, 30, 16, 8, 1], "shorter items keep larger batches"
    budgeted.too_big(32, 10)
    assert [budgeted.max_items(longest) for longest in (4, 10, 20)] == [32, 16, 8]


def test_a_batch_that_fails_no_longer_counts_as_fitted() -> None:
    capacity = Capacity(32)
    capacity.fitted(24, 100)
    capacity.too_big(24, 100)
    assert capacity.max_items(100) == 12
    capacity.too_big(12, 100)
    assert capacity.max_items(100) == 6


def test_only_batches_that_reach_the_ceiling_count() -> None:
    capacity = Capacity(64, 3000)
    capacity.too_big(64, 40)
    for _ in range(PATIENCE):
        capacity.fitted(31, 40)  # a smaller batch
        capacity.fitted(64, 19)  # shorter items
    for _ in range(PATIENCE - 1):
        capacity.fitted(25, 50)
    assert capacity.max_items(40) == 32
    capacity.fitted(12, 100)
    assert capacity.max_items(40) == 36


@pytest.mark.parametrize("most", [8, 1])
def test_a_raise_that_fails_is_undone_and_tried_again_after_as_many_full_batches(most: int) -> None:
    """Sizes fall from 64 by halves; then one item more is tried after each 512 full batches."""

    def memory(items: int, _: int) -> bool:
        return items <= most

    capacity = Capacity(64)
    assert run(capacity, [0] * 64, memory) == 64 // most - 1
    between: list[int] = []
    full = 0
    while len(between) < 4:
        assert capacity.max_items(0) in (most, most + 1)
        if run(capacity, [0] * capacity.max_items(0), memory):
            between.append(full)
            full = 0
        else:
            full += 1
    assert between == [PATIENCE] * 4


@pytest.mark.parametrize("most", [1000, 3000])
def test_short_items_keep_large_batches_and_errors_are_rare_if_memory_depends_on_length(
    most: int,
) -> None:
    def memory(items: int, longest: int) -> bool:
        return items * longest <= most

    capacity, rng = Capacity(64), random.Random(0)
    errors = []
    for batch in range(20_000):
        longest = rng.randint(5, 120)
        if run(capacity, [longest] * capacity.max_items(longest), memory):
            errors.append(batch)
    assert capacity.max_items(most // 64 // 2) == 64
    for longest in range(5, 121):
        assert capacity.max_items(longest) >= 0.7 * min(64, most // longest)
    assert len(errors) <= 20_000 / PATIENCE + 20
