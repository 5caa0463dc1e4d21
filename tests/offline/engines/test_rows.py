"""Functions that work in steps in an offline run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
import pyarrow.parquet as pq
import steps_with_rows
from countdowns import finish_all
from steps_with_rows import PLACES, company, heavy, scaled, scaled_on_a_loop, weight

import batched
from batched import BatchFunctionError, offline
from batched.offline import Step
from batched.offline.engines.function import build

ITEMS = [1 + 7 * number % 13 for number in range(100)]


def run(step: Step, items: list[int], dest: Path) -> tuple[Any, dict[int, Any]]:
    """Return the report of a run, and the results by key."""
    steps_with_rows.sizes.clear()
    rows = [{"id": number, "item": item} for number, item in enumerate(items)]
    report = offline.Pipeline(step).run(rows, dest, key="id", watch=False)
    table = pq.read_table(dest)
    return report, dict(zip(table["id"].to_pylist(), table["result"].to_pylist(), strict=True))


def step_of(fn: Any, **settings: Any) -> Step:
    return Step(fn, input="item", output="result", **settings)


both = pytest.mark.parametrize("fn", [scaled, scaled_on_a_loop], ids=["thread", "coroutine"])


@both
def test_places_are_filled_again_until_few_rows_are_left(fn: Any, tmp_path: Path) -> None:
    report, results = run(step_of(fn, args=(3,)), ITEMS, tmp_path / "out.parquet")
    assert report.ok == len(ITEMS)
    assert results == {number: 3 * item for number, item in enumerate(ITEMS)}
    sizes = steps_with_rows.sizes
    assert max(sizes) == PLACES
    assert sum(sizes) / len(sizes) > 0.75 * PLACES


@both
def test_rows_that_fail_or_for_which_the_function_raises_cost_themselves(
    fn: Any, tmp_path: Path
) -> None:
    items = [*ITEMS[:20], 666, -3, *ITEMS[20:30], -1]
    report, results = run(step_of(fn), items, tmp_path / "out.parquet")
    assert (report.ok, report.errors) == (30, {"ValueError": 2, "ZeroDivisionError": 1})
    assert results == {number: item for number, item in enumerate(items) if 0 < item < 666}


def test_rows_run_again_if_memory_runs_out(tmp_path: Path) -> None:
    report, results = run(step_of(heavy), ITEMS, tmp_path / "out.parquet")
    assert report.ok == len(ITEMS)
    assert results == dict(enumerate(ITEMS))


def test_processes(tmp_path: Path) -> None:
    step = step_of(scaled, processes=True, workers=2, kwargs={"scale": 2})
    report, results = run(step, ITEMS, tmp_path / "out.parquet")
    assert report.ok == len(ITEMS)
    assert results == {number: 2 * item for number, item in enumerate(ITEMS)}


@pytest.mark.parametrize("processes", [False, True])
def test_a_length_of_the_step_reaches_its_workers(processes: bool, tmp_path: Path) -> None:
    step = step_of(company, length=weight, max_batch_tokens=20, processes=processes)
    _, results = run(step, [10] * 20, tmp_path / "out.parquet")
    assert max(results.values()) == 2


def test_the_places_of_a_step_are_a_number(tmp_path: Path) -> None:
    report, _ = run(step_of(scaled, batch_size=2), ITEMS[:20], tmp_path / "out.parquet")
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
