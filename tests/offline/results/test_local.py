"""The result file: it appears whole, and replaces no foreign file."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from result_files import fill, publish

from batched.errors import ResultError
from batched.offline.results import formats as _formats
from batched.offline.results.opening import Stamp, open_result

pytestmark = pytest.mark.once

DESTINATIONS = ["r.parquet", "r.jsonl", "r.csv", "r/"]


def write(dest: str, columns: Mapping[str, Any], **settings: Any) -> Stamp:
    return publish(open_result(dest, **settings), columns)


def content(dest: str) -> dict[str, bytes]:
    path = Path(dest)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: file.read_bytes() for file in files}


@pytest.fixture(params=DESTINATIONS)
def dest(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/{request.param}"


SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])
ROWS = {"id": ["a", None], "n": [1, 2]}
OTHER = {"id": ["b"], "n": [3]}


# --- it appears whole ---


def test_the_result_appears_when_it_is_whole(dest: str, tmp_path: Path) -> None:
    seen = []

    def note(stamps: Sequence[Stamp]) -> None:
        seen.append((stamps, Path(dest).exists()))

    result = fill(open_result(dest), ROWS)
    assert not Path(dest).exists()
    (stamp,) = result.publish(note)
    ((noted,), there) = seen[0]
    assert not there
    assert noted.keys() >= stamp.keys()
    assert os.listdir(tmp_path) == [Path(dest).name]
    assert open_result(dest, known=[stamp]).find()[0] == stamp


def test_leftovers_of_a_killed_run_are_removed(dest: str, tmp_path: Path) -> None:
    half = Path(dest.rstrip("/") + ".writing")
    if dest.endswith("/"):
        half.mkdir()
        half /= "part-00007.parquet"
    half.write_text("half")
    write(dest, ROWS)
    assert os.listdir(tmp_path) == [Path(dest).name]
    assert "part-00007.parquet" not in content(dest)
    assert b"half" not in b"".join(content(dest).values())


def test_a_result_of_no_rows_has_its_columns(dest: str) -> None:
    write(dest, dict(zip(SCHEMA.names, SCHEMA.empty_table().columns, strict=True)))
    if dest.endswith(".jsonl"):
        assert Path(dest).read_bytes() == b""
    elif dest.endswith(".csv"):
        assert Path(dest).read_bytes() == b"id,n\r\n"
    else:
        assert pq.read_table(dest).schema == SCHEMA


# --- it replaces no foreign file ---


def test_only_the_result_of_an_earlier_run_is_replaced_as_that_run_left_it(dest: str) -> None:
    first = json.loads(json.dumps(write(dest, ROWS)))
    before = content(dest)
    with pytest.raises(ResultError, match=r"is there already, .* overwrite=True"):
        open_result(dest)
    assert content(dest) == before
    second = write(dest, OTHER, known=[{"x": [1, 2]}, first])
    assert content(dest) != before
    with pytest.raises(ResultError, match="is there already"):
        open_result(dest, known=[first])
    file = next(Path(dest).iterdir()) if dest.endswith("/") else Path(dest)
    os.utime(file, ns=(0, 0))
    with pytest.raises(ResultError, match="left it as it is"):
        open_result(dest, known=[second])


def test_a_file_that_came_in_the_meantime_is_not_replaced(dest: str) -> None:
    result = fill(open_result(dest), ROWS)
    file = Path(dest) / "part-00000.parquet" if dest.endswith("/") else Path(dest)
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(ResultError, match="is there already"):
        result.publish(len)
    result.close()
    assert file.read_text() == "mine"


def test_a_run_killed_before_the_rename_knows_both_files(dest: str) -> None:
    known: Sequence[Stamp] = [write(dest, ROWS)]
    before = content(dest)

    def die(stamps: Sequence[Stamp]) -> None:
        nonlocal known
        known = stamps
        raise KeyboardInterrupt

    result = fill(open_result(dest, known=known), OTHER)
    with pytest.raises(KeyboardInterrupt):
        result.publish(die)
    assert content(dest) == before
    open_result(dest, known=known)
    write(dest, OTHER, known=known)


@pytest.mark.parametrize("number", [1, 2])
def test_a_folder_that_was_not_replaced_to_the_end_is_repaired_by_the_next_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = f"{tmp_path}/r/"
    known: Sequence[Stamp] = [write(dest, ROWS)]
    before = content(dest)
    rename = Path.rename
    renames: list[Path] = []

    def fail(path: Path, target: Path) -> Path:
        renames.append(path)
        if len(renames) == number:
            raise OSError(errno.EIO, "broken")
        return rename(path, target)

    def note(stamps: Sequence[Stamp]) -> None:
        nonlocal known
        known = stamps

    result = fill(open_result(dest, known=known), OTHER)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="broken"):
        patch.setattr(Path, "rename", fail)
        result.publish(note)
    assert content(dest if number == 1 else f"{tmp_path}/r.replaced") == before
    if number == 1:  # and an earlier run was killed before it had removed what it replaced
        write(f"{tmp_path}/r.replaced/", ROWS)
    write(dest, OTHER, known=known)
    assert pq.read_table(dest).to_pydict() == OTHER
    assert os.listdir(tmp_path) == ["r"]


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ResultError, match=r"holds 'notes\.txt', which is no part of a result"):
        open_result(f"{tmp_path}/", overwrite=True)


def test_a_source_is_never_replaced_by_its_own_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for dest in ("in.jsonl", "r/"):
        write(dest, ROWS)
    os.mkdir("sub")
    os.symlink("in.jsonl", "link.jsonl")
    os.symlink("r", "link")
    for name, read in (
        ("sub/../in.jsonl", "in.jsonl"),
        ("link.jsonl", "in.jsonl"),
        ("link/", "r/part-00000.parquet"),
    ):
        with pytest.raises(ResultError, match=f"would replace '{read}', which the source reads"):
            open_result(name, overwrite=True, source_paths=["other.jsonl", read])


# --- the destination is tried before anything runs ---


@pytest.mark.parametrize("name", ["r.xlsx", "r", "", ".", "r.parquet.gz"])
def test_an_unknown_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"must end in \.parquet, \.jsonl or \.csv, or '/' for"):
        open_result(name)


def test_a_file_is_no_folder_and_a_folder_no_file(tmp_path: Path) -> None:
    (tmp_path / "r.parquet").mkdir()
    with pytest.raises(ResultError, match=r"r\.parquet is a folder; it must end in"):
        open_result(tmp_path / "r.parquet")
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match="file/ is a file; it must end in"):
        open_result(f"{tmp_path}/file/")


def test_a_folder_that_takes_no_files_is_refused(
    dest: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResultError, match=f"folder {tmp_path}: No space left on device"):
        open_result(dest)
    assert not os.listdir(tmp_path)


# --- its size in memory is bounded ---


def test_row_groups_and_parts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_formats, "GROUP_ROWS", 64)
    monkeypatch.setattr(_formats, "PART_ROWS", 200)
    table = pa.table(
        {"id": list(range(500)), "text": ["x" * (100 * (n < 200)) for n in range(500)]}
    )

    def groups_of(dest: str) -> list[list[int]]:
        result = open_result(dest, overwrite=True)
        rows: Any = result.create(table.schema)
        for first in range(0, 500, 16):
            rows.write(table.slice(first, 16))
        rows.close()
        stamp = result.publish(len)[-1]
        folder = Path(dest) if dest.endswith("/") else tmp_path
        files = [pq.ParquetFile(folder / name).metadata for name in sorted(stamp)]
        return [[file.row_group(n).num_rows for n in range(file.num_row_groups)] for file in files]

    assert groups_of(f"{tmp_path}/r/") == [[64] * 4, [64] * 3 + [52]]
    monkeypatch.setattr(_formats, "PART_BYTES", 10_000)  # 16 rows are 1,792 bytes or 192
    assert groups_of(f"{tmp_path}/r/") == [[64, 64], [64] * 4, [64, 52]]
    assert sorted(content(f"{tmp_path}/r/")) == [f"part-{n:05}.parquet" for n in range(3)]
    monkeypatch.setattr(_formats, "GROUP_BYTES", 3_000)
    assert groups_of(f"{tmp_path}/r.parquet")[0][:3] == [32, 32, 32]


# --- values ---

VALUES: list[tuple[Any, str, str]] = [
    (None, "null", ""),
    (math.nan, "NaN", "nan"),
    (-math.inf, "-Infinity", "-inf"),
    ("", '""', '""'),
    ('a,"b"\r\nc', '"a,\\"b\\"\\r\\nc"', '"a,""b""\r\nc"'),
    ("a\rb", '"a\\rb"', '"a\rb"'),
    (time(1, 2, 3, 4), '"01:02:03.000004"', "01:02:03.000004"),
    (timedelta(seconds=90, microseconds=5), "90.000005", "90.000005"),
    (Decimal("1234567890123456789.10"), '"1234567890123456789.10"', "1234567890123456789.10"),
    ({"a": [math.nan], "b": None}, '{"a":[NaN],"b":null}', '"{""a"":[NaN],""b"":null}"'),
    (np.array([0.1, 0.2], "float32"), "[0.1,0.2]", '"[0.1,0.2]"'),
    (np.array([0.1, math.nan], "float32"), "[0.1,NaN]", '"[0.1,NaN]"'),
    (np.arange(4.0).reshape(2, 2).T, "[[0.0,2.0],[1.0,3.0]]", '"[[0.0,2.0],[1.0,3.0]]"'),
    (2**65, "36893488147419103232", "36893488147419103232"),
    ([2**65, "é", None], '[36893488147419103232,"é",null]', '"[36893488147419103232,""é"",null]"'),
]


@pytest.mark.parametrize(("value", "as_json", "as_csv"), VALUES, ids=lambda value: repr(value)[:30])
def test_values_as_text(value: Any, as_json: str, as_csv: str, tmp_path: Path) -> None:
    columns = {"id": [1, 2], "out": [value, None]}
    write(f"{tmp_path}/r.jsonl", columns)
    text = (tmp_path / "r.jsonl").read_bytes().decode()
    assert text == f'{{"id":1,"out":{as_json}}}\n{{"id":2,"out":null}}\n'
    assert all(map(json.loads, text.splitlines()))
    write(f"{tmp_path}/r.csv", columns)
    text = (tmp_path / "r.csv").read_bytes().decode()
    assert text == f"id,out\r\n1,{as_csv}\r\n2,\r\n"


def test_a_lone_surrogate_is_written_as_an_escape(tmp_path: Path) -> None:
    line = '{"id":1,"out":["\\ud800",{"a":"\\ud800é"}]}'
    write(f"{tmp_path}/r.jsonl", {name: [value] for name, value in json.loads(line).items()})
    text = (tmp_path / "r.jsonl").read_text(encoding="utf-8")
    assert json.loads(text) == json.loads(line)
    write(f"{tmp_path}/r.csv", {"a": ["\ud800é"]})
    assert (tmp_path / "r.csv").read_bytes().decode() == "a\r\n\\ud800é\r\n"
