"""Shapes of files and objects: each is read exactly, or refused in one sentence."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batched.errors import SourceError
from batched.offline.sources.opening import explode
from batched.offline.sources.text import csv, jsonl
from opened_sources import HubDataset, Open, opened

__all__ = ["opened"]

pytestmark = pytest.mark.once

AB = [{"a": "1", "b": "x"}, {"a": "2", "b": "y"}]
ROWS = [{"a": 1}, {"a": 2}]
LINES = b'{"a": 1}\n{"a": 2}\n'
LARGE = "x" * 3_000_000
"""A value larger than a buffer."""

# name of the file, its content, and what is read: rows, with a pattern for a row that is a fault;
# or the pattern of the refusal
FILES: list[Any] = [
    # CSV
    ("a.csv", b"a,b\n1,x\n2,y\n", AB),
    ("a.csv", b'a\r\n"x\r\ny"\r\n\r\n z ', [{"a": "x\r\ny"}, {"a": " z "}]),
    ("a.csv", b"a,b\r1,x\r2,y\r", AB),
    ("a.csv", b"\xef\xbb\xbfa,b\n1,x\n2,y", AB),
    pytest.param("a.csv", f"a\n{LARGE}\ny".encode(), [{"a": LARGE}, {"a": "y"}], id="large"),
    ("a.csv", b'a,b\n1,"say ""hi"", she"\n', [{"a": "1", "b": 'say "hi", she'}]),
    ("a.csv", b"a,b\n NA ,\n00000,nan\n", [{"a": " NA ", "b": ""}, {"a": "00000", "b": "nan"}]),
    ("a.csv", "a,b\né,\u2028\n".encode(), [{"a": "é", "b": "\u2028"}]),
    ("a.csv", b"a,b\n", []),
    ("a.csv", b"a,b\n1,2,3\n2,y\n", ["3 values, but there are 2 columns", AB[1]]),
    (
        "a.csv",
        b'a,b\n0,"x\ny"\n1\n2,y\n',
        [{"a": "0", "b": "x\ny"}, r"row 1 .*a\.csv', line 4: 1 values, but there are 2", AB[1]],
    ),
    ("a.csv", b"", "is empty; the first line of a CSV file names columns"),
    ("a.csv", b"a,a\n1,2\n", "has two columns 'a'; names must differ"),
    ("a.csv", b'a,b\n1,"2\n1,2\n', r"line 3: not CSV .*offline.csv\(path, quote="),
    ("a.csv", b"a;b\n1;x\n", r"no ',', but ';'; offline.csv\(path, delimiter=';'\)"),
    ("a.tsv", b"a\tb\n1\tx\n2\ty\n", AB),
    ("a.tsv", b"a,b\n1,x\n", r"offline.csv\(path, delimiter=','\)"),
    ("a.csv", "a,b\né,x\n2,y\n".encode("latin-1"), ["0xe9.*encoding='cp1252'", AB[1]]),
    ("a.csv", "a,é\n1,x\n".encode("latin-1"), r"line 1: .*offline.csv\(path, encoding='cp1252'\)"),
    ("a.csv", "a,b\n1,x\n".encode("utf-16"), "line 1: not UTF-8 .* 'utf-16' UTF-16"),
    ("a.csv.gz", gzip.compress(b"a,b\n1,x\n2,y\n", mtime=0), AB),
    # JSON lines
    ("a.jsonl", LINES, ROWS),
    ("a.ndjson", LINES, ROWS),
    ("a.json", LINES, ROWS),
    ("a.jsonl", b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"), ROWS),
    ("a.jsonl", b"\n \n" + LINES + b"\n", ROWS),
    ("a.jsonl", b"", []),
    ("a.jsonl", '{"a": "\u2028é\\ud83d"}'.encode(), [{"a": "\u2028é\ud83d"}]),
    (
        "a.jsonl",
        b'{"a": 1}\n\n{"a": 1\n{"a": 2}\n',
        [ROWS[0], r"row 1 \(counted from 0\): '.*/a\.jsonl', line 3: not JSON", ROWS[1]],
    ),
    pytest.param("a.jsonl", LINES + b"[" * 100_000, [*ROWS, "not JSON"], id="nested too deep"),
    ("a.jsonl", b'{"a": 1}\n[1]\n', [ROWS[0], "a row is a dict of columns, not list .1."]),
    (
        "a.jsonl",
        b'{"a": 1}\n{"a": "\xe9"}\n',
        [ROWS[0], r"offline.jsonl\(path, encoding='cp1252'\)"],
    ),
    (
        "a.jsonl",
        LINES.decode().encode("utf-16"),
        "no row .* can be read: .*line 1: not UTF-8 .* 'utf-16' UTF-16",
    ),
    ("a.jsonl", b"1\n2\n", "a row is a dict of columns, not int 1"),
    ("a.jsonl.gz", b"hello", "a.jsonl.gz' cannot be read"),
    # JSON arrays
    ("a.json", json.dumps(ROWS, indent=2).encode(), ROWS),
    ("a.json", b"\xef\xbb\xbf\n " + json.dumps(ROWS).encode(), ROWS),
    ("a.json", b"[]", []),
    ("a.json", b'[{"a": 1}, 2]', [ROWS[0], "a row is a dict of columns, not int 2"]),
    ("a.jsonl", b"[1]\n[2]\n", "begins with '\\[' is no array of rows: .*not JSON"),
    ("a.json", b'{"rows": [\n{"a": 1},\n{"a": 2}\n]}', "is one JSON value on several lines"),
    # others
    ("a.txt", b"x", "the suffix is '.txt'; files that can be read end in .parquet, .jsonl"),
    ("a.parquet", b"PAR1", "a.parquet' cannot be read"),
    ("a.parquet.gz", b"", "the suffix is '.gz'"),
]


def read(opened: Open, source: Any) -> list[Any]:
    """Return the rows of a source, with the sentence for each row that is a fault."""
    found: list[Any] = []
    source = opened(source)
    for window in source.windows(None):
        window.check(source.name)
        values = {name: window.values(name) for name in window.columns}
        for place in range(window.size):
            row: Any = {name: values[name][place] for name in values}
            found.append(window.faults.get(place, row))
    return found


def check(opened: Open, source: Any, expected: Any) -> None:
    """Check that a source has the expected rows, or is refused."""
    if isinstance(expected, str):
        with pytest.raises(SourceError, match=expected) as refused:
            read(opened, source)
        assert "\n" not in str(refused.value)
        return
    found = read(opened, source)
    assert len(found) == len(expected)
    for row, each in zip(found, expected, strict=True):
        if isinstance(each, str):
            assert re.search(each, row)
        else:
            assert repr(row) == repr(each)


@pytest.mark.parametrize(("name", "content", "expected"), FILES)
def test_a_file_is_read_exactly_or_refused(
    name: str, content: bytes, expected: Any, tmp_path: Path, opened: Open
) -> None:
    (tmp_path / name).write_bytes(content)
    check(opened, tmp_path / name, expected)


SETTINGS: list[tuple[Callable[..., Any], dict[str, Any], bytes, Any]] = [
    (csv, {"delimiter": ";"}, b"a;b\n1,5;x\n", [{"a": "1,5", "b": "x"}]),
    (csv, {}, b"a;b\n1\n", [{"a;b": "1"}]),
    (csv, {"encoding": "latin-1"}, "a,b\né,x\n".encode("latin-1"), [{"a": "é", "b": "x"}]),
    (csv, {"quote": "'"}, b"a,b\n'1,5',x\n", [{"a": "1,5", "b": "x"}]),
    (csv, {"quote": None}, b'a,b\n5" pipe,"x\n', [{"a": '5" pipe', "b": '"x'}]),
    (csv, {"quote": '\\"'}, b'a,b\n1,"say \\"hi\\", she"\n', [{"a": "1", "b": 'say "hi", she'}]),
    (
        csv,
        {"header": False},
        b"1,x\n2,y\n",
        [{"column0": "1", "column1": "x"}, {"column0": "2", "column1": "y"}],
    ),
    (csv, {"header": ["a", "b"]}, b"1,x\n2,y\n", AB),
    (csv, {"header": ["a"]}, b"1,x\n2,y\n", "no row of .* 2 values, but there are 1 columns"),
    (
        jsonl,
        {"encoding": "utf-16"},
        '{"a": "é\u2028"}\n\n{"a": 1}'.encode("utf-16"),
        [{"a": "é\u2028"}, {"a": 1}],
    ),
    (jsonl, {"encoding": "utf-16"}, json.dumps(ROWS, indent=1).encode("utf-16"), ROWS),
    (csv, {"encoding": "UTF-8"}, b"\xef\xbb\xbfa,b\n2,y\n", AB[1:]),
    (jsonl, {"encoding": "nonsense"}, LINES, "LookupError: unknown encoding: nonsense"),
]


@pytest.mark.parametrize(("make", "settings", "content", "expected"), SETTINGS)
def test_settings_say_how_text_is_written(
    make: Callable[..., Any],
    settings: dict[str, Any],
    content: bytes,
    expected: Any,
    tmp_path: Path,
    opened: Open,
) -> None:
    (tmp_path / "rows.txt").write_bytes(content)
    check(opened, make(tmp_path / "rows.txt", **settings), expected)
    (tmp_path / "rows.txt.gz").write_bytes(gzip.compress(content))
    check(opened, make([f"{tmp_path}/*.gz"], **settings), expected)


DAY = dt.datetime(2024, 1, 1)
COLUMNS: list[tuple[Any, Any, Any]] = [
    (pa.array([1], pa.int32()), pa.array([2**40]), [1, 2**40]),
    (pa.array([1]), pa.array([2.5]), [1.0, 2.5]),
    (pa.array([2**60 + 1]), pa.array([2.5]), "Integer value .* not in range"),
    (pa.array([DAY], pa.timestamp("us")), pa.array([DAY], pa.timestamp("ms")), [DAY, DAY]),
    (pa.nulls(1), pa.array(["x"]), [None, "x"]),
    (pa.array([["a"]]), pa.array([["b"]], pa.large_list(pa.large_string())), [["a"], ["b"]]),
    (pa.array(["a"]).dictionary_encode(), pa.array(["b"]), ["a", "b"]),
    (
        pa.array([{"x": 1}]),
        pa.array([{"x": 2, "y": "z"}]),
        [{"x": 1, "y": None}, {"x": 2, "y": "z"}],
    ),
    (pa.array([Decimal("1.5")]), pa.array([Decimal("22.25")]), [Decimal("1.50"), Decimal("22.25")]),
    (pa.array(["a"]), pa.array([b"b"]), "has text and binary in the column 'v'"),
    (pa.array(["a"]), pa.array([1]), "v has incompatible types"),
    (
        pa.array([DAY], pa.timestamp("us")),
        pa.array([DAY], pa.timestamp("us", "UTC")),
        "incompatible",
    ),
]


@pytest.mark.parametrize(("one", "other", "expected"), COLUMNS)
def test_tables_of_several_types_are_unified(
    one: Any, other: Any, expected: Any, tmp_path: Path, opened: Open
) -> None:
    for name, array in (("a", one), ("b", other)):
        pq.write_table(pa.table({"v": array}), tmp_path / f"{name}.parquet")
    rows = expected if isinstance(expected, str) else [{"v": value} for value in expected]
    check(opened, tmp_path, rows)


def test_a_column_that_a_table_lacks_is_null(tmp_path: Path, opened: Open) -> None:
    pq.write_table(pa.table({"v": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"w": ["x"], "v": [2]}), tmp_path / "b.parquet")
    check(opened, tmp_path, [{"v": 1, "w": None}, {"v": 2, "w": "x"}])


def pandas(**columns: Any) -> Any:
    return pytest.importorskip("pandas").DataFrame(columns)


EMPTY = pa.table({"a": pa.array([], pa.int64())})
OBJECTS: dict[str, tuple[Callable[[], Any], Any]] = {
    "a filtered frame": (lambda: (f := pandas(a=[1, 2, 3]))[f.a > 1], [{"a": 2}, {"a": 3}]),
    "a frame with a named index": (
        lambda: pandas(a=["x", "y"], b=[0, 1]).set_index("b"),
        [{"b": 0, "a": "x"}, {"b": 1, "a": "y"}],
    ),
    "a dataset with a transform": (
        lambda: HubDataset(pa.table({"a": [1]}), "custom"),
        [{"a": "custom 1"}],
    ),
    "a dataset with chosen columns": (
        lambda: HubDataset(pa.table({"a": [1, 2], "b": [3, 4]}), None, ["a"]),
        ROWS,
    ),
    "a list of texts": (lambda: ["some text", "more text"], "rows|for text in texts"),
    "no rows": (list, []),
    "an empty table": (lambda: EMPTY, []),
    "an empty stream": (lambda: pa.RecordBatchReader.from_batches(EMPTY.schema, []), []),
    "a dict of columns": (lambda: {"a": [1, 2]}, "the dict is no list of rows"),
    "a set": (lambda: {1}, ["row 0 .*: a row is a dict of columns, not int 1"]),
    "texts and numbers": (
        lambda: ["a", 1],
        r"the list can be read: row 0 .*: a row is a dict of columns, not str 'a'",
    ),
    "an iterator of what cannot be kept": (
        lambda: iter([{"a": lambda: 1}]),
        "cannot be kept for a second reading .* pass a list",
    ),
    "a number": (lambda: 3, "3 is no source; sources are paths"),
    "two columns of one name": (
        lambda: pa.table([[1], [2]], names=["a", "a"]),
        "has two columns 'a'; names must differ",
    ),
    "an array": (
        lambda: pa.chunked_array([[1]]),
        "the pyarrow ChunkedArray, as a stream of Arrow, cannot be read",
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_is_read_exactly_or_refused(name: str, opened: Open) -> None:
    make, expected = OBJECTS[name]
    check(opened, make(), expected)


DOCUMENTS = [
    {"id": "a", "chunks": ["x", "y"], "n": 1},
    {"id": "b", "chunks": [], "n": 2},
    {"id": "c", "chunks": None, "n": 3},
    {"id": "d", "chunks": ["z"], "n": 4},
]


@pytest.mark.parametrize("kind", [list, iter, pa.Table.from_pylist])
def test_the_elements_of_a_list_are_rows_of_their_own(
    kind: Callable[[Any], Any], opened: Open
) -> None:
    names = ("id", "chunks", "n", "place", "key")
    expected: list[Any] = [
        dict(zip(names, values, strict=True))
        for values in (
            ("a", "x", 1, 0, '["a", 0]'),
            ("a", "y", 1, 1, '["a", 1]'),
            ("d", "z", 4, 0, '["d", 0]'),
        )
    ]
    expected.insert(2, "row 2 .*: column 'chunks' holds NoneType None in place of a list")
    check(opened, explode(kind(DOCUMENTS), "chunks", key="id"), expected)
    found = read(opened, explode(kind(DOCUMENTS), "chunks"))
    assert [found[at]["key"] for at in (0, 1, 3)] == ["[0, 0]", "[0, 1]", "[3, 0]"]


def test_a_source_that_cannot_be_exploded_is_refused(opened: Open) -> None:
    check(opened, explode(DOCUMENTS, "chunk"), "has no column 'chunk'; .* did you mean 'chunks'")
    rows = [{"chunks": [1], "key": 1}]
    check(opened, explode(rows, "chunks"), "the list has a column 'key'; rename it first")
    (fault,) = read(opened, explode([{"chunks": "text"}], "chunks"))
    assert "holds str 'text' in place of a list" in fault
