"""The result file: it appears whole, replaces nothing of others, and depends on its rows alone."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")

import pyarrow.parquet as pq  # noqa: E402  # after the skip

from batched.errors import ResultError  # noqa: E402
from batched.offline import _formats  # noqa: E402
from batched.offline._columns import Columns  # noqa: E402
from batched.offline._result import Stamp, open_result  # noqa: E402

pytestmark = pytest.mark.once

DESTINATIONS = ["r.parquet", "r.jsonl", "r.csv", "r/"]


def table_of(rows: list[dict[str, Any]]) -> Any:
    columns = Columns(list(rows[0]))
    batch, reasons = columns.encode(rows)
    assert not reasons
    return pa.Table.from_batches([batch])


def write(dest: str, table: Any, windows: list[Any] | None = None, **settings: Any) -> Stamp:
    writer = open_result(dest, **settings).writer(table.schema)
    for window in [table] if windows is None else windows:
        writer.write({name: window.column(name) for name in table.column_names})
    return writer.close()


def content(dest: str) -> dict[str, bytes]:
    path = Path(dest)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: file.read_bytes() for file in files}


def same(one: Any, other: Any) -> bool:
    """Equality of tables, in which NaN equals NaN."""
    return bool(one.schema == other.schema) and str(one.to_pylist()) == str(other.to_pylist())


@pytest.fixture(params=DESTINATIONS)
def dest(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/{request.param}"


TABLE = table_of([{"id": "a", "n": 1}, {"id": None, "n": 2}])


# --- it appears whole ---


def test_the_result_appears_when_it_is_whole(dest: str, tmp_path: Path) -> None:
    noted = []
    writer = open_result(dest).writer(
        TABLE.schema, lambda stamp: noted.append((stamp, Path(dest).exists()))
    )
    writer.write({"id": ["a", "b"], "n": [1, 2]})
    assert not Path(dest).exists()
    stamp = writer.close()
    assert noted == [(stamp, False)]
    assert os.listdir(tmp_path) == [Path(dest).name]
    assert open_result(dest, known=[stamp])


def test_what_a_killed_run_left_is_removed(dest: str, tmp_path: Path) -> None:
    half = Path(dest.rstrip("/") + ".writing")
    if dest.endswith("/"):
        half.mkdir()
        half /= "part-00007.parquet"
    half.write_text("half")
    write(dest, TABLE)
    assert os.listdir(tmp_path) == [Path(dest).name]
    assert "part-00007.parquet" not in content(dest)
    assert b"half" not in b"".join(content(dest).values())


def test_an_aborted_result_leaves_nothing(dest: str, tmp_path: Path) -> None:
    writer = open_result(dest).writer(TABLE.schema)
    writer.write({"id": ["a"], "n": [1]})
    writer.abort()
    assert not os.listdir(tmp_path)


def test_a_result_of_no_rows_has_its_columns(dest: str) -> None:
    write(dest, TABLE, windows=[])
    if dest.endswith(".jsonl"):
        assert Path(dest).read_bytes() == b""
    elif dest.endswith(".csv"):
        assert Path(dest).read_bytes() == b"id,n\r\n"
    else:
        assert pq.read_table(dest).schema == TABLE.schema


# --- it replaces nothing of others ---


def test_a_foreign_file_is_refused(dest: str) -> None:
    write(dest, TABLE)
    before = content(dest)
    with pytest.raises(ResultError, match=r"is there already, .* overwrite=True"):
        open_result(dest)
    assert content(dest) == before


def test_a_file_of_ours_is_replaced(dest: str) -> None:
    stamp = json.loads(json.dumps(write(dest, TABLE)))
    write(dest, TABLE.slice(1), known=[{"x": [1, 2]}, stamp])
    assert content(dest) != {}
    with pytest.raises(ResultError, match="is there already"):
        open_result(dest, known=[stamp])


def test_overwrite_replaces_whatever_is_there(dest: str) -> None:
    write(dest, TABLE)
    write(dest, TABLE.slice(1), overwrite=True)
    replaced = content(dest)
    write(dest, TABLE.slice(1), overwrite=True)
    assert content(dest) == replaced


def test_a_file_of_ours_that_was_changed_is_foreign(dest: str) -> None:
    stamp = write(dest, TABLE)
    file = next(Path(dest).iterdir()) if dest.endswith("/") else Path(dest)
    os.utime(file, ns=(0, 0))
    with pytest.raises(ResultError, match="left it as it is"):
        open_result(dest, known=[stamp])


def test_a_file_that_came_in_the_meantime_is_not_replaced(dest: str) -> None:
    writer = open_result(dest).writer(TABLE.schema)
    write(dest.rstrip("/") + "2" + Path(dest).suffix + "/" * dest.endswith("/"), TABLE)
    os.rename(dest.rstrip("/") + "2" + Path(dest).suffix, dest.rstrip("/"))
    before = content(dest)
    with pytest.raises(ResultError, match="is there already"):
        writer.close()
    writer.abort()
    assert content(dest) == before


def test_a_run_killed_before_the_rename_knows_both_files(dest: str) -> None:
    known = [write(dest, TABLE)]
    before = content(dest)

    def killed(stamp: Stamp) -> None:
        known.append(stamp)
        raise KeyboardInterrupt

    writer = open_result(dest, known=known).writer(TABLE.schema, killed)
    writer.write({"id": ["b"], "n": [1]})
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    assert content(dest) == before
    open_result(dest, known=known)
    writer = open_result(dest, known=known).writer(TABLE.schema)
    writer.write({"id": ["b"], "n": [1]})
    known.append(writer.close())
    open_result(dest, known=known[1:])


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ResultError, match=r"holds 'notes\.txt', which is no part of a result"):
        open_result(f"{tmp_path}/", overwrite=True)


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    write(f"{tmp_path}/r/", TABLE)
    assert pq.read_table(tmp_path / "r").equals(TABLE)


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


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="missing does not exist; create it first"):
        open_result(tmp_path / "missing" / "r.parquet")


def test_a_folder_that_takes_no_files_is_refused(
    dest: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResultError, match=f"folder {tmp_path}: No space left on device"):
        open_result(dest)
    assert not os.listdir(tmp_path)


def test_what_is_in_the_way_of_writing_is_not_removed_unseen(dest: str) -> None:
    way = Path(dest.rstrip("/") + ".writing")
    way.mkdir()
    (way / "mine").write_text("")
    with pytest.raises(ResultError, match="not empty"):
        open_result(dest)
    assert (way / "mine").exists()


def test_a_lack_of_space_is_told_before_writing(dest: str) -> None:
    result = open_result(dest)
    result.check_space(1)
    with pytest.raises(ResultError, match=r"takes about 1,000,000,000,000 MB, .* MB left"):
        result.check_space(10**18)


def test_a_full_disk_leaves_nothing_half(
    dest: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writer = open_result(dest).writer(TABLE.schema)
    writer.write({"id": ["a"], "n": [1]})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    writer.abort()
    assert not os.listdir(tmp_path)


# --- its bytes depend on its rows alone ---


def rows(number: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    for n in range(number):
        yield {
            "id": f"{n:05}",
            "text": None if n % 7 == 3 else "x" * int(rng.integers(40)),
            "score": math.nan if n % 11 == 0 else None if n % 50 < 25 else rng.random() * 1e17,
            "vector": None if 100 < n < 140 else rng.random(4, "float32"),
            "ragged": rng.random(int(rng.integers(4))),
            "meta": None if n % 13 == 5 else {"tags": ["t"] * int(rng.integers(3)), "n": n},
            "d": Decimal(n) / 4,
            "flag": n % 2 == 0,
        }


def test_the_bytes_do_not_depend_on_windows(dest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_formats, "BLOCK_ROWS", 16)
    monkeypatch.setattr(_formats, "GROUP_ROWS", 64)
    monkeypatch.setattr(_formats, "GROUP_BYTES", 8_000)
    everything = list(rows(500))
    table = table_of(everything)
    limits: dict[str, Any] = {"overwrite": True, "part_rows": 210, "part_bytes": 40_000}
    write(dest, table, **limits)
    first = content(dest)
    rng = np.random.default_rng(1)
    columns = Columns(table.column_names)
    columns.encode(everything)
    for _ in range(8):
        cuts = [0, *sorted(rng.integers(0, 500, 12).tolist()), 500]
        spans = list(pairwise(cuts))
        sliced = [table.slice(a, b - a) for a, b in spans]
        fresh = [columns.encode(everything[a:b])[0] for a, b in spans]
        copied = [pa.Table.from_pylist(part.to_pylist(), table.schema) for part in sliced]
        for windows in (sliced, fresh, copied):
            write(dest, table, windows, **limits)
            assert content(dest) == first
    if dest.endswith(("/", ".parquet")):
        assert same(pq.read_table(dest), table)


def test_row_groups_and_parts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_formats, "BLOCK_ROWS", 16)
    monkeypatch.setattr(_formats, "GROUP_ROWS", 64)
    table = table_of([{"id": n, "text": "x" * (100 if n < 200 else 0)} for n in range(500)])
    stamp = write(f"{tmp_path}/r/", table, part_rows=200, part_bytes=10_000)
    files = [pq.ParquetFile(tmp_path / "r" / name) for name in stamp]
    # 96 rows of 108 bytes are the first whole blocks beyond 10,000 bytes
    assert [file.metadata.num_rows for file in files] == [96, 96, 200, 108]
    assert list(stamp) == [f"part-{number:05}.parquet" for number in range(4)]
    groups = [
        file.metadata.row_group(n).num_rows for file in files for n in range(file.num_row_groups)
    ]
    assert groups == [64, 32, 64, 32, 64, 64, 64, 8, 64, 44]
    monkeypatch.setattr(_formats, "GROUP_BYTES", 3_000)
    write(f"{tmp_path}/r.parquet", table)
    sizes = pq.ParquetFile(tmp_path / "r.parquet").metadata
    assert [sizes.row_group(n).num_rows for n in range(3)] == [32, 32, 32]


def test_memory_stays_flat(dest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_formats, "GROUP_BYTES", 1 << 20)
    schema = pa.schema([("id", pa.string()), ("v", pa.list_(pa.float32(), 64))])
    ids = [f"{n:06}" for n in range(2048)]
    writer = open_result(dest).writer(schema)
    before, most = pa.total_allocated_bytes(), 0
    for _ in range(40):  # 21 MB
        vectors = pa.array(list(np.zeros((2048, 64), "float32")), schema.field("v").type)
        writer.write({"id": ids, "v": vectors})
        most = max(most, pa.total_allocated_bytes() - before)
    writer.abort()
    assert most < 5 << 20


# --- values ---

VALUES: list[tuple[Any, str, str]] = [
    (None, "null", ""),
    (True, "true", "true"),
    (-(2**63), "-9223372036854775808", "-9223372036854775808"),
    (0.1, "0.1", "0.1"),
    (math.nan, "NaN", "nan"),
    (-math.inf, "-Infinity", "-inf"),
    ("", '""', '""'),
    ("plain text", '"plain text"', "plain text"),
    ('a,"b"\r\nc', '"a,\\"b\\"\\r\\nc"', '"a,""b""\r\nc"'),
    ("null", '"null"', "null"),
    (b"\xff\0", '"/wA="', "/wA="),
    (date(2024, 1, 2), '"2024-01-02"', "2024-01-02"),
    (time(1, 2, 3, 4), '"01:02:03.000004"', "01:02:03.000004"),
    (datetime(2024, 1, 2, 3), '"2024-01-02T03:00:00"', "2024-01-02T03:00:00"),
    (
        datetime(2024, 1, 2, 3, tzinfo=UTC),
        '"2024-01-02T03:00:00+00:00"',
        "2024-01-02T03:00:00+00:00",
    ),
    (timedelta(seconds=90, microseconds=5), "90.000005", "90.000005"),
    (Decimal("1234567890123456789.10"), '"1234567890123456789.10"', "1234567890123456789.10"),
    ([1, None], "[1,null]", '"[1,null]"'),
    ([0.5, math.nan, math.inf], "[0.5,NaN,Infinity]", '"[0.5,NaN,Infinity]"'),
    ({"a": [math.nan], "b": None}, '{"a":[NaN],"b":null}', '"{""a"":[NaN],""b"":null}"'),
    (np.array([0.1, 0.2], "float32"), "[0.1,0.2]", '"[0.1,0.2]"'),
    (np.array([0.1, math.nan], "float32"), "[0.1,NaN]", '"[0.1,NaN]"'),
    (np.array([True, False]), "[true,false]", '"[true,false]"'),
]


@pytest.mark.parametrize(("value", "as_json", "as_csv"), VALUES, ids=lambda value: repr(value)[:30])
def test_values_as_text(value: Any, as_json: str, as_csv: str, tmp_path: Path) -> None:
    table = table_of([{"id": 1, "out": value}, {"id": 2, "out": None}])
    write(f"{tmp_path}/r.jsonl", table)
    text = (tmp_path / "r.jsonl").read_bytes().decode()
    assert text == f'{{"id":1,"out":{as_json}}}\n{{"id":2,"out":null}}\n'
    assert all(map(json.loads, text.splitlines()))
    write(f"{tmp_path}/r.csv", table)
    text = (tmp_path / "r.csv").read_bytes().decode()
    assert text == f"id,out\r\n1,{as_csv}\r\n2,\r\n"
    write(f"{tmp_path}/r.parquet", table)
    assert same(pq.read_table(tmp_path / "r.parquet"), table)


def test_a_csv_is_read_back_by_the_standard_library(tmp_path: Path) -> None:
    texts = ["", " a ", 'q"', "a,b", "a\nb", "a\r\nb", "é", "\0"]
    write(f"{tmp_path}/r.csv", pa.table({'na,"me': texts, "b": texts}))
    with open(tmp_path / "r.csv", newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [['na,"me', "b"], *([text, text] for text in texts)]


def test_no_row_of_a_csv_is_an_empty_line(tmp_path: Path) -> None:
    write(f"{tmp_path}/r.csv", pa.table({"a": ["x", None, ""]}))
    assert (tmp_path / "r.csv").read_bytes() == b'a\r\nx\r\n""\r\n""\r\n'


def test_columns_may_be_lists_arrow_arrays_or_dictionaries(dest: str) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.dictionary(pa.int8(), pa.string()))])
    writer = open_result(dest).writer(schema)
    writer.write({"a": [1, 2], "b": pa.array(["x", "y"]).dictionary_encode()})
    writer.write({"a": pa.array([3], pa.int8()), "b": ["z"], "not kept": [0]})
    writer.write({"a": pa.chunked_array([[4], [5]]), "b": pa.chunked_array([["x"], ["y"]])})
    writer.close()
    plain = f"{dest.rstrip('/')}-plain{Path(dest).suffix}" + "/" * dest.endswith("/")
    table = pa.table({"a": [1, 2, 3, 4, 5], "b": ["x", "y", "z", "x", "y"]})
    write(plain, table)
    assert content(dest).keys() == {Path(dest).name} or dest.endswith("/")
    assert list(content(dest).values()) == list(content(plain).values())


def test_times_in_nanoseconds_and_in_other_zones_are_kept(tmp_path: Path) -> None:
    stamps = pa.array([0, 1_000, 1, None], pa.timestamp("ns", "Europe/Berlin"))
    berlin = pa.array([0, 1, 2, None], pa.timestamp("s", "Europe/Berlin"))
    write(f"{tmp_path}/r.csv", pa.table({"a": stamps, "b": berlin}))
    assert (tmp_path / "r.csv").read_text().splitlines()[1:] == [
        "1970-01-01T00:00:00+00:00,1970-01-01T00:00:00+00:00",
        "1970-01-01T00:00:00.000001+00:00,1970-01-01T00:00:01+00:00",
        "1970-01-01T00:00:00.000000001+00:00,1970-01-01T00:00:02+00:00",
        ",",
    ]


def test_columns_of_a_source_may_have_types_that_no_step_returns(tmp_path: Path) -> None:
    pairs = pa.array([["a", "b"], None], pa.list_(pa.string(), 2))
    tensor = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int8(), [2]), pa.array([[1, 2], None], pa.list_(pa.int8(), 2))
    )
    write(f"{tmp_path}/r.jsonl", pa.table({"a": pairs, "b": tensor}))
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    assert lines == ['{"a":["a","b"],"b":[1,2]}', '{"a":null,"b":null}']


def test_a_value_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    writer = open_result(tmp_path / "r.jsonl").writer(pa.schema([("a", pa.null())]))
    with pytest.raises(TypeError, match="object"):
        writer.write({"a": [object()]})
    writer.abort()


def test_rows_of_unequal_columns_are_an_error(dest: str) -> None:
    writer = open_result(dest).writer(TABLE.schema)
    with pytest.raises(ValueError, match=r".+"):
        writer.write({"id": ["a"], "n": [1, 2]})
    writer.abort()
