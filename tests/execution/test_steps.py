"""Rows of a list, without callers: the rules of functions that work in steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from batched import BatchFunctionError, Rows
from batched._core.capacity import Capacity, Room
from batched._execution.execution import never
from batched._execution.memory import is_out_of_memory
from batched._execution.steps import ListSource, run_steps, run_steps_async

AnyRows = Rows[Any, Any, Any]
Step = Callable[[AnyRows], None]


def compute_list(func: Callable[[AnyRows], Any], source: ListSource, name: str) -> list[Any]:
    run_steps(func, source, name, is_out_of_memory)
    return source.results


def computed(
    step: Step, items: list[Any], places: int = 3, *, coroutine: bool, lengths: bool = False
) -> list[Any]:
    """Return the outcomes of a function that calls `step` between `join` and `leave`."""

    def work(rows: AnyRows) -> None:
        while rows:
            rows.join()
            step(rows)
            rows.leave()

    async def work_async(rows: AnyRows) -> None:
        work(rows)

    capacity = Capacity(places, 20 if lengths else None)
    source = ListSource(items, capacity, list(items) if lengths else None)
    if coroutine:
        asyncio.run(run_steps_async(work_async, source, "work", is_out_of_memory, never))
        return source.results
    return compute_list(work, source, "work")


both = pytest.mark.parametrize("coroutine", [False, True], ids=["function", "coroutine"])


@both
def test_results_are_in_the_order_of_the_items_and_errors_stand_in_their_places(
    coroutine: bool,
) -> None:
    def step(rows: AnyRows) -> None:
        for row in reversed(rows):
            if row.item == 3:
                row.fail(ValueError("three"))
            else:
                row.finish(10 * row.item)

    found = computed(step, [1, 2, 3, 4, 5], coroutine=coroutine)
    assert [str(each) for each in found] == ["10", "20", "three", "40", "50"]


@both
def test_an_error_of_the_function_is_raised(coroutine: bool) -> None:
    def step(rows: AnyRows) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        computed(step, [1, 2], coroutine=coroutine)


@both
def test_fewer_rows_run_again_after_a_memory_error(coroutine: bool) -> None:
    sizes: list[int] = []

    def step(rows: AnyRows) -> None:
        sizes.append(len(rows))
        if len(rows) > 1:
            raise MemoryError
        for row in rows:
            row.finish(row.item)

    assert computed(step, [1, 2, 3, 4], coroutine=coroutine) == [1, 2, 3, 4]
    assert sizes == [3, 2, 1, 1, 1, 1]


def test_a_function_that_leaves_rows_without_an_outcome_has_failed() -> None:
    source = ListSource([1, 2], Capacity(2), None)
    with pytest.raises(BatchFunctionError, match="left 2 rows without an outcome"):
        compute_list(lambda rows: rows.join() and None, source, "work")
    with pytest.raises(BatchFunctionError, match="left 2 rows without an outcome"):
        compute_list(lambda rows: None, ListSource([1, 2], Capacity(2), None), "work")


def test_a_function_may_return_before_all_rows_have_joined() -> None:
    calls: list[int] = []

    def one_wave(rows: AnyRows) -> None:
        calls.append(len(rows.join()))
        for row in rows:
            row.finish(row.item)
        rows.leave()

    assert compute_list(one_wave, ListSource([1, 2, 3], Capacity(2), None), "work") == [1, 2, 3]
    assert calls == [2, 1]


def test_a_function_that_never_calls_leave_is_called_again_once_no_place_is_free() -> None:
    def keep(rows: AnyRows) -> None:
        while rows:
            for row in rows.join():
                row.finish(row.item)

    assert compute_list(keep, ListSource([1, 2, 3], Capacity(2), None), "work") == [1, 2, 3]


def test_a_coroutine_in_place_of_a_function_is_told() -> None:
    async def work(rows: AnyRows) -> None: ...

    with pytest.raises(BatchFunctionError, match="nothing awaits"):
        compute_list(work, ListSource([1], Capacity(1), None), "work")


def test_the_budget_counts_the_longest_live_row() -> None:
    widths: list[int] = []

    def step(rows: AnyRows) -> None:
        widths.append(len(rows) * max(row.length for row in rows))
        rows[0].finish(rows[0].item)

    items = [9, 8, 7, 20, 1, 1, 1]
    assert computed(step, items, 10, coroutine=False, lengths=True) == items
    assert max(widths) <= 20


def test_a_row_of_a_list_has_no_reader_and_its_errors_are_exceptions() -> None:
    def step(rows: AnyRows) -> None:
        for row in rows:
            assert not row.has_reader
            assert not row.behind
            row.emit("nothing")
            assert not row.emitted
            with pytest.raises(TypeError, match="fail takes an exception"):
                row.fail("no")  # type: ignore[arg-type]
            row.finish(list(rows[0:1]) == [rows[0]])

    assert computed(step, [1], coroutine=False) == [True]


@pytest.mark.parametrize(
    ("live", "longest", "most", "item", "holds", "items"),
    [
        (2, 5, 100, 5, True, 2),  # 4 rows of 5 are within 20
        (2, 5, 100, 10, False, 1),
        (3, 1, 100, 1, True, 5),
        (3, 1, 2, 1, True, 2),
        (8, 1, 100, 1, False, 1),
    ],
)
def test_room_beside_live_rows(
    live: int, longest: int, most: int, item: int, holds: bool, items: int
) -> None:
    room = Room(Capacity(8, 20), live, longest, most)
    assert room.holds(item) is holds
    assert room.max_items(item) == items
