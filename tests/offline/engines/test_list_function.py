"""A function that works in steps, called with the list of one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from countdowns import finish_all, stepwise

import batched
from batched import BatchFunctionError, Rows
from batched.offline import Step
from batched.offline.engines.function import build

AnyRows = Rows[Any, Any, Any]


def computed(fn: Any, items: list[Any]) -> Any:
    """Return the outcomes of a decorated function."""
    return build(Step(fn, input="item", output="result"))(items)


def computed_on_a_loop(step: Callable[[AnyRows], None], items: list[Any], **settings: Any) -> Any:
    """Return the outcomes of a coroutine function that calls `step` in each of its steps."""
    decorate: Any = batched.aio.continuously(**settings)

    @decorate  # type: ignore[untyped-decorator]
    async def work(rows: AnyRows) -> None:
        while rows:
            rows.join()
            step(rows)
            rows.leave()
            await asyncio.sleep(0)

    return asyncio.run(computed(work, items))


def computed_here(step: Callable[[AnyRows], None], items: list[Any], **settings: Any) -> Any:
    return computed(stepwise(step, **settings), items)


both = pytest.mark.parametrize("compute", [computed_here, computed_on_a_loop])


@both
def test_outcomes_are_in_the_order_of_the_items_and_errors_in_their_places(compute: Any) -> None:
    def step(rows: AnyRows) -> None:
        for row in reversed(rows):
            assert not row.has_reader
            row.emit("no one reads it")
            row.fail(ValueError("three")) if row.item == 3 else row.finish(10 * row.item)

    found = compute(step, [1, 2, 3, 4, 5], batch_size=3)
    assert [str(each) for each in found] == ["10", "20", "three", "40", "50"]


@both
def test_an_error_of_the_function_is_raised(compute: Any) -> None:
    with pytest.raises(KeyError, match="mine"):
        compute(lambda _: vars()["mine"], [1, 2])


@both
def test_fewer_rows_run_again_after_a_memory_error(compute: Any) -> None:
    sizes: list[int] = []

    def step(rows: AnyRows) -> None:
        sizes.append(len(rows))
        if len(rows) > 1:
            raise MemoryError
        finish_all(rows)

    assert compute(step, [1, 2, 3, 4], batch_size=3) == [1, 2, 3, 4]
    assert sizes == [3, 2, 1, 1, 1, 1]


def test_the_budget_counts_the_longest_live_row() -> None:
    widths: list[int] = []

    def step(rows: AnyRows) -> None:
        widths.append(len(rows) * max(row.length for row in rows))
        rows[0].finish(rows[0].item)

    items = [9, 8, 7, 20, 1, 1, 1]
    assert computed_here(step, items, length=lambda item: item, max_batch_tokens=20) == items
    assert max(widths) == 20


def test_a_function_may_return_before_all_rows_have_joined_but_not_without_outcomes() -> None:
    @batched.continuously(batch_size=2)
    def one_wave(rows: AnyRows) -> None:
        rows.join()
        finish_all(rows)

    assert computed(one_wave, [1, 2, 3]) == [1, 2, 3]
    with pytest.raises(BatchFunctionError, match="left 3 rows without an outcome"):
        computed(batched.continuously(lambda rows: None), [1, 2, 3])
