"""Machinery of the benchmark of offline runs: its baselines, and its counts of computed rows."""

from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")

import pyarrow.parquet as pq

import offline as benchmark
from batched.offline.identity.inputs import hash_inputs
from batched.offline.progress.store import Progress
from batched.offline.sources.opening import open_source
from peers import maps

pytestmark = pytest.mark.once

ROWS = 200


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    benchmark.write_rows(path, benchmark.texts(ROWS))
    return path


def committed(path: Path, source: Path) -> dict[object, tuple[str, int]]:
    """Return status, hash of the input and attempts of every row, by key and step."""
    keys = pq.read_table(source)["id"].to_pylist()
    progress = Progress(path)
    found = progress.committed(keys)
    progress.close()
    return {key: (row.status, row.input) for key, row in found.items()}


def test_the_bare_loop_commits_the_rows_of_a_run(source: Path, tmp_path: Path) -> None:
    benchmark.run_noop(source, tmp_path / "result.parquet")
    assert benchmark.bare_loop(source, tmp_path / "bare.progress", 64) == ROWS
    bare = committed(tmp_path / "bare.progress", source)
    assert len(bare) == ROWS
    assert bare == committed(tmp_path / "result.parquet.progress", source)
    [window] = open_source(str(source), spool=tmp_path / "spool").windows(["id", "text"])
    assert [row[1] for row in bare.values()] == hash_inputs(window, ["text"])


def test_the_least_time_is_that_of_the_slowest_step_and_a_batch_of_the_others() -> None:
    assert benchmark.least_time([[1.0, 1.0], [2.0, 2.0]]) == 5.0
    assert benchmark.least_time([[1.0, 1.0]]) == 2.0


def test_marks_count_the_rows_that_are_computed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = tmp_path / "marks"
    assert maps.marked(marks) == 0
    monkeypatch.setenv(maps.MARKS, str(marks))
    run = maps.by_batched()
    for _ in range(2):
        run(str(source), str(tmp_path / "result"))
        assert maps.marked(marks) == ROWS
    table = pq.read_table(tmp_path / "result.parquet")
    assert table["upper"].to_pylist() == [text.upper() for text in table["text"].to_pylist()]
