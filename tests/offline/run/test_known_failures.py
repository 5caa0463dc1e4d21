"""Failures of other systems that compute datasets in batches; here none of them may happen."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
import pyarrow.parquet as pq

from batched import offline
from batched.errors import RunStopped

Result = dict[int, str]


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "text": f"text {number}"} for number in range(count)]


def run(
    fn: Callable[[list[str]], list[Any]], rows: list[dict[str, Any]], dest: Path, **settings: Any
) -> offline.Report:
    known = {"input": "text", "output": "out", "key": "id", "version": 1, "name": "step"}
    return offline.run(fn, rows, dest, **{**known, "watch": False, **settings})


def read(dest: Path) -> Result:
    return {row["id"]: row["out"] for row in pq.read_table(dest).to_pylist()}


def upper(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


class Crash(BaseException):
    """The end of a process, as far as a run can tell."""


@pytest.mark.once
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_another_batch_size_loses_no_row_and_computes_none_twice(
    tmp_path: Path, before: int, after: int
) -> None:
    """A batched pipeline that kept the number of the last batch lost 2 of 10 rows with (2, 4), and
    computed 8 of 20 twice with (4, 2).
    """
    rows, dest = rows_of(20), tmp_path / "out.parquet"
    given: list[str] = []

    def stop_half_way(texts: list[str]) -> list[str]:
        if len(given) >= 8:
            raise ConnectionError("gone")
        given.extend(texts)
        return upper(texts)

    retry = offline.Retry(attempts=1)
    with pytest.raises(RunStopped):
        run(stop_half_way, rows, dest, batch_size=before, retry=retry, outage_s=0)
    done = len(given)

    def remember(texts: list[str]) -> list[str]:
        given.extend(texts)
        return upper(texts)

    run(remember, rows, dest, batch_size=after)
    assert 0 < done < 20
    assert sorted(given) == sorted(row["text"] for row in rows)
    assert read(dest) == {row["id"]: row["text"].upper() for row in rows}


def test_rows_and_what_is_known_of_them_are_one(tmp_path: Path) -> None:
    """A system that appended rows first, and wrote down its progress after that, had the rows twice
    when it crashed in between: here nothing lies in between.
    """
    rows, dest = rows_of(10), tmp_path / "out.parquet"
    run(upper, rows, dest)
    connection = sqlite3.connect(f"{dest}.progress")
    (without,) = connection.execute(
        "select count(*) from rows where chunk not in (select id from chunks)"
    ).fetchone()
    (twice,) = connection.execute(
        "select count(*) from (select 1 from rows group by key, step having count(*) > 1)"
    ).fetchone()
    connection.close()
    assert (without, twice) == (0, 0)


def test_a_service_that_is_down_marks_nothing_as_done(tmp_path: Path) -> None:
    """Every row was stored as null, and marked as done."""
    rows, dest = rows_of(100), tmp_path / "out.parquet"

    def down(_: list[str]) -> list[str]:
        raise ConnectionRefusedError("no one there")

    with pytest.raises(RunStopped, match="ConnectionRefusedError: no one there"):
        run(down, rows, dest, retry=offline.Retry(attempts=1), batch_size=4, outage_s=0)
    report = run(upper, rows, dest)
    assert (report.ok, report.skipped) == (100, 0)


@pytest.mark.parametrize("step", [0, 1])
def test_a_batch_size_and_a_step_to_resume_from_go_together(tmp_path: Path, step: int) -> None:
    """The call that the documentation shows raised."""
    pipeline = offline.Pipeline(
        offline.Step(upper, input="text", output="loud", name="first", version=1),
        offline.Step(upper, input="loud", output="out", name="second", version=1),
    )
    rows, dest = rows_of(10), tmp_path / "out.parquet"
    pipeline.run(rows, dest, key="id", watch=False)
    report = pipeline.run(rows, dest, key="id", batch_size=2, resume_step=step, watch=False)
    assert [each.ok for each in report.steps] == ([10, 10] if step == 0 else [0, 10])
    assert read(dest)[3] == "TEXT 3"


def test_one_bad_row_costs_no_other_row_of_its_block(tmp_path: Path) -> None:
    """One bad row ended the job or, with errors ignored, took 250 of 1,000 rows along."""
    rows, dest = rows_of(1000), tmp_path / "out.parquet"

    def picky(texts: list[str]) -> list[str]:
        if "text 500" in texts:
            raise ValueError("bad row")
        return upper(texts)

    report = run(picky, rows, dest, batch_size=250)
    assert (report.ok, report.failed) == (999, 1)
    assert sorted(read(dest)) == [number for number in range(1000) if number != 500]


def test_a_crash_costs_what_was_in_flight_and_nothing_that_was_committed(tmp_path: Path) -> None:
    """A map over a dataset lost all of it, and a checkpoint held nothing of 3,950 rows."""
    rows, dest = rows_of(4000), tmp_path / "out.parquet"
    given: list[str] = []

    def watch(seen: offline.Snapshot) -> None:
        if seen.ok >= 2000:
            raise Crash

    def remember(texts: list[str]) -> list[str]:
        given.extend(texts)
        return upper(texts)

    with pytest.raises(Crash):
        run(remember, rows, dest, batch_size=8, watch=watch)
    before = len(given)
    report = run(remember, rows, dest)
    assert report.skipped >= 2000
    assert len(given) - before == report.ok == 4000 - report.skipped
    assert len(read(dest)) == 4000


def test_what_does_not_fit_into_memory_runs_in_smaller_batches(tmp_path: Path) -> None:
    """There was no reaction to an error of memory."""
    sizes: list[int] = []

    def small_memory(texts: list[str]) -> list[str]:
        if len(texts) > 10:
            raise MemoryError
        sizes.append(len(texts))
        return upper(texts)

    rows, dest = rows_of(640), tmp_path / "out.parquet"
    report = run(small_memory, rows, dest, batch_size=64)
    assert (report.ok, report.failed) == (640, 0)
    assert max(sizes) <= 10


def test_results_that_are_too_few_are_seen(tmp_path: Path) -> None:
    """The number of outputs was never looked at."""

    def forgetful(texts: list[str]) -> list[str]:
        return [text.upper() for text in texts if text != "text 5"]

    rows, dest = rows_of(64), tmp_path / "out.parquet"
    report = run(forgetful, rows, dest, batch_size=64)
    (letter,) = report.dead_letters()
    assert letter["key"] == 5
    assert letter["error"].startswith("BatchSizeMismatch: ")
    assert read(dest) == {row["id"]: row["text"].upper() for row in rows if row["id"] != 5}


def test_a_log_that_was_cut_short_can_be_read_and_written_again_and_again(tmp_path: Path) -> None:
    """A torn last line was ignored, and then appended to: the second reopening failed."""
    rows, dest = rows_of(300), tmp_path / "out.parquet"
    log = Path(f"{dest}.progress-wal")
    for count in (100, 200, 300):
        run(upper, rows[:count], dest)
        with open(log, "ab") as file:
            file.write(b"\x00torn\xff" * 100)
    assert read(dest) == {row["id"]: row["text"].upper() for row in rows}
    assert run(upper, rows, dest).skipped == 300
