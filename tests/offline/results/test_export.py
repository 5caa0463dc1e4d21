"""Export: the committed rows of a run as a file, from its progress file alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batched import offline
from batched.errors import ResultError
from batched.offline.progress.commit import Commit, Key
from batched.offline.progress.store import Progress
from batched.offline.types.columns import Columns

pytestmark = pytest.mark.once


def make_run(folder: Path, source: Sequence[Key | None], *steps: dict[Key, Any]) -> str:
    """Leave the progress file of a run that has committed these values; return its result."""
    with closing(Progress(folder / "r.parquet.progress")) as progress:
        names = [f"out{number}" for number in range(len(steps))]
        noted = [{"name": name, "output": [name]} for name in names]
        progress.put_all({"key": "id", "steps": noted})
        for number, values in enumerate(steps):
            read = Columns([names[number]]).read(list(values.values()))
            progress.commit([Commit(number, [(each, 0) for each in values], read)])
        progress.note_source(0, source)
        progress.end_source(len(source))
    return f"{folder}/r.parquet"


def test_rows_that_went_through_all_steps_are_exported_in_the_order_of_the_source(
    tmp_path: Path,
) -> None:
    first: dict[Key, Any] = {"a": 1, "b": 2, "c": 3, "gone": 4}
    result = make_run(tmp_path, ["c", None, "b", "a"], first, {"a": [1.5], "c": [2.5, 3.5]})
    path = offline.export(result, tmp_path / "some.parquet")
    assert path == f"{tmp_path}/some.parquet"
    assert pq.read_table(path).to_pylist() == [
        {"id": "c", "out0": 3, "out1": [2.5, 3.5]},
        {"id": "a", "out0": 1, "out1": [1.5]},
    ]


def test_a_row_that_a_file_cannot_hold_is_an_error(tmp_path: Path) -> None:
    result = make_run(tmp_path, ["a", "b", "c"], {"a": 1.5, "b": "n/a", "c": 2.5})
    with pytest.raises(
        ResultError, match=r"^row 1: .*; a file that ends in \.jsonl takes all rows"
    ):
        offline.export(result, tmp_path / "some.parquet")
    assert not (tmp_path / "some.parquet").exists()
    assert len(Path(offline.export(result, tmp_path / "some.jsonl")).read_text().split("\n")) == 4


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_export_never_replaces_the_result(tmp_path: Path, overwrite: bool) -> None:
    result = make_run(tmp_path, ["a"], {"a": 1})
    with pytest.raises(ResultError, match="the export would replace the result .* itself; name"):
        offline.export(result, tmp_path / "x" / ".." / "r.parquet", overwrite=overwrite)


def test_a_remote_result_is_exported_from_its_progress_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, ["a"], {"a": 1})
    progress = tmp_path / "r.parquet.progress"
    monkeypatch.setenv("HOME", str(tmp_path))
    offline.export("s3://bucket/r.parquet", "~/r.csv", progress="~/r.parquet.progress")
    path = offline.export("s3://bucket/r.parquet", tmp_path / "s.csv", progress=progress)
    assert (tmp_path / "r.csv").read_bytes() == Path(path).read_bytes()
    assert Path(path).read_bytes() == b"id,out0\r\na,1\r\n"
