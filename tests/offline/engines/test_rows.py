"""Functions that work in steps in an offline run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import steps_with_rows
from countdowns import finish_all
from steps_with_rows import PLACES, company, heavy, scaled, scaled_on_a_loop

import batched
from batched import BatchFunctionError, offline
from batched.offline import Step
from batched.offline.engines.function import build

ITEMS = [1 + 7 * number % 13 for number in range(100)]


def run(step: Step, items: list[int], dest: Path) -> tuple[Any, list[Any]]:
    """Return the report of a run, and the results."""
    steps_with_rows.sizes.clear()
    rows = [{"id": number, "item": item} for number, item in enumerate(items)]
    report = offline.Pipeline(step).run(rows, dest / "out.parquet", key="id", watch=False)
    return report, pq.read_table(dest / "out.parquet")["result"].to_pylist()


def step_of(fn: Any, **settings: Any) -> Step:
    return Step(fn, input="item", output="result", **settings)


def scaled_by(scale: int, items: list[int]) -> list[str]:
    return [f"{item} x {scale}" for item in items]


both = pytest.mark.parametrize("fn", [scaled, scaled_on_a_loop], ids=["thread", "coroutine"])


@both
def test_places_are_filled_again_until_few_rows_are_left(fn: Any, tmp_path: Path) -> None:
    _, results = run(step_of(fn, args=(3,)), ITEMS, tmp_path)
    assert results == scaled_by(3, ITEMS)
    sizes = steps_with_rows.sizes
    assert max(sizes) == PLACES
    assert sum(sizes) / len(sizes) > 0.75 * PLACES


@both
def test_rows_that_fail_or_for_which_the_function_raises_cost_themselves(
    fn: Any, tmp_path: Path
) -> None:
    report, results = run(step_of(fn), [*ITEMS[:20], 666, -3, *ITEMS[20:30], -1], tmp_path)
    assert (report.ok, report.errors) == (30, {"ValueError": 2, "ZeroDivisionError": 1})
    assert results == scaled_by(1, ITEMS[:30])


def test_rows_run_again_if_memory_runs_out(tmp_path: Path) -> None:
    assert run(step_of(heavy), ITEMS, tmp_path)[1] == scaled_by(1, ITEMS)


def test_processes(tmp_path: Path) -> None:
    step = step_of(scaled, processes=True, workers=2, kwargs={"scale": 2})
    assert run(step, ITEMS, tmp_path)[1] == scaled_by(2, ITEMS)


@pytest.mark.parametrize("processes", [False, True])
def test_a_length_of_the_step_reaches_its_workers(processes: bool, tmp_path: Path) -> None:
    step = step_of(company, length=abs, max_batch_tokens=20, processes=processes)
    assert max(run(step, [10] * 20, tmp_path)[1]) == 2


def test_the_places_of_a_step_are_a_number(tmp_path: Path) -> None:
    report, _ = run(step_of(scaled, batch_size=2), ITEMS[:20], tmp_path)
    assert report.ok == 20
    assert max(steps_with_rows.sizes) == 2
    with pytest.raises(TypeError, match="batch_size is the number of its places"):
        step_of(scaled, batch_size=offline.Auto())


def test_a_function_may_return_before_all_rows_have_joined_but_not_without_outcomes() -> None:
    @batched.continuously(batch_size=2)
    def one_wave(rows: batched.Rows[Any, Any, Any]) -> None:
        rows.join()
        finish_all(rows)

    assert build(step_of(one_wave))([1, 2, 3]) == [1, 2, 3]
    with pytest.raises(BatchFunctionError, match="left 3 rows without an outcome"):
        build(step_of(batched.continuously(lambda rows: None)))([1, 2, 3])
