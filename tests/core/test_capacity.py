"""Number of items that fit one batch, from settings and from memory errors, by arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from batched._core.capacity import PATIENCE, Capacity, Room
from batched._core.policy import BatchPolicy
from batched._core.scheduler import Request, Scheduler

Memory = Callable[[int, int], bool]  # whether (items, longest length) fit


def fitted(capacity: Capacity, batches: int, items: int, longest: int = 0) -> None:
    for _ in range(batches):
        capacity.fitted(items, longest)


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


def rows(most: int) -> Memory:
    return lambda items, _: items <= most


def cells(most: int) -> Memory:
    return lambda items, longest: items * longest <= most


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("longest", [0, 1, 7, 10**9])
def test_without_a_token_budget_length_does_not_matter(longest: int) -> None:
    assert Capacity(32).max_items(longest) == 32
    assert not Capacity(32).varies


@pytest.mark.parametrize(
    ("longest", "most"),
    [(0, 32), (3, 32), (4, 25), (33, 3), (34, 2), (50, 2), (51, 1), (100, 1), (10**9, 1)],
)
def test_a_token_budget_holds_items_times_the_longest_and_at_least_one_item(
    longest: int, most: int
) -> None:
    assert Capacity(32, 100).max_items(longest) == most
    assert Capacity(32, 100).varies


# ---------------------------------------------------------------- memory errors


@pytest.mark.parametrize(("items", "most"), [(32, 16), (31, 16), (5, 3), (3, 2), (2, 1)])
def test_a_batch_that_was_too_big_is_halved(items: int, most: int) -> None:
    capacity = Capacity(32)
    capacity.too_big(items, 0)
    assert capacity.max_items(0) == most
    assert capacity.varies


def test_a_single_item_that_is_too_big_sets_no_ceiling() -> None:
    capacity = Capacity(32)
    capacity.too_big(1, 50)
    assert (capacity.max_items(50), capacity.varies) == (32, False)
    capacity.too_big(2, 50)
    capacity.too_big(1, 50)
    assert capacity.max_items(50) == 1


def test_a_ceiling_counts_cells_so_that_shorter_items_keep_larger_batches() -> None:
    capacity = Capacity(32)
    capacity.too_big(32, 50)
    most = [capacity.max_items(longest) for longest in (0, 25, 26, 50, 100, 10**6)]
    assert most == [32, 32, 30, 16, 8, 1]


def test_the_token_budget_and_the_ceiling_both_hold() -> None:
    capacity = Capacity(32, 600)
    capacity.too_big(32, 10)
    assert [capacity.max_items(longest) for longest in (4, 10, 20)] == [32, 16, 8]


@pytest.mark.parametrize(
    ("known", "most"), [((24, 100), 24), ((24, 120), 28), ((10, 100), 16), ((31, 100), 31)]
)
def test_a_ceiling_is_not_below_a_batch_that_has_fitted(known: tuple[int, int], most: int) -> None:
    capacity = Capacity(32)
    capacity.fitted(*known)
    capacity.too_big(32, 100)
    assert capacity.max_items(100) == most


def test_a_batch_that_fails_no_longer_counts_as_fitted() -> None:
    capacity = Capacity(32)
    capacity.fitted(24, 100)
    capacity.too_big(24, 100)
    assert capacity.max_items(100) == 12
    capacity.too_big(12, 100)
    assert capacity.max_items(100) == 6


# ---------------------------------------------------------------- patience


def test_only_batches_that_reach_the_ceiling_count() -> None:
    capacity = Capacity(64, 3000)
    capacity.too_big(64, 40)
    fitted(capacity, PATIENCE, 31, 40)  # a smaller batch
    fitted(capacity, PATIENCE, 64, 19)  # shorter items
    fitted(capacity, PATIENCE - 1, 25, 50)
    assert capacity.max_items(40) == 32
    fitted(capacity, 1, 12, 100)
    assert capacity.max_items(40) == 36


def test_a_ceiling_rises_to_the_size_that_failed() -> None:
    capacity = Capacity(64)
    capacity.too_big(64, 0)
    seen = []
    for _ in range(7):
        fitted(capacity, PATIENCE, capacity.max_items(0))
        seen.append(capacity.max_items(0))
    assert seen == [36, 40, 45, 50, 56, 63, 64]


@pytest.mark.parametrize(("most", "at_first"), [(8, 1 + 2 + 4), (1, 1 + 2 + 4 + 8 + 16 + 32)])
def test_a_raise_that_fails_is_undone_and_tried_again_after_as_many_full_batches(
    most: int, at_first: int
) -> None:
    """Sizes fall from 64 to 32, 16 and 8; then 9 is tried after each 512 full batches."""
    capacity, memory = Capacity(64), rows(most)
    assert run(capacity, [0] * 64, memory) == at_first
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


@pytest.mark.parametrize(("items", "most"), [(20, 10), (32, 16)])
def test_a_batch_that_fails_below_the_raise_is_halved(items: int, most: int) -> None:
    capacity = Capacity(64)
    capacity.too_big(64, 0)
    fitted(capacity, PATIENCE, 32)
    capacity.too_big(items, 0)
    assert capacity.max_items(0) == most


# ---------------------------------------------------------------- mixed lengths


@pytest.mark.parametrize("most", [1000, 3000])
def test_short_items_keep_large_batches_and_errors_are_rare_if_memory_depends_on_length(
    most: int,
) -> None:
    capacity, memory, rng = Capacity(64), cells(most), random.Random(0)
    errors = []
    for batch in range(20_000):
        longest = rng.randint(5, 120)
        if run(capacity, [longest] * capacity.max_items(longest), memory):
            errors.append(batch)
    assert capacity.max_items(most // 64 // 2) == 64
    for longest in range(5, 121):
        assert capacity.max_items(longest) >= 0.7 * min(64, most // longest)
    assert len(errors) <= 20_000 / PATIENCE + 20


def test_calls_join_live_rows_as_far_as_both_fit() -> None:
    busy, whole = Scheduler(BatchPolicy(batch_size=1, max_concurrent_batches=9)), Capacity(8, 60)
    rows = [Request([0], 1, "rows", lengths=[length]) for length in (10, 10, 10, 30)]
    other = Request([0], 1, "other", lengths=[10])
    for request in (*rows, other):
        busy.submit(request, 0.0)
    joined = busy.join("rows", Room(whole, 3, 10, 2), 0.0)
    slices = [piece for batch in joined for piece in batch.slices]
    assert [request for request, _, _ in slices] == rows[:2], "two at once are allowed"
    assert busy.join("rows", Room(whole, 6, 10, 9), 0.0) == [], "no row more fits"
    assert busy.join("other", Room(whole, 1, 10, 9), 0.0) == [], "it is not its turn"
    busy.cancel(rows[2])
    assert busy.join("rows", Room(whole, 1, 10, 9), 0.0)
