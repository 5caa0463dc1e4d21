"""Sources: every row as it is, in order, any number of times, in bounded memory."""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batched.errors import SourceError
from batched.offline.sources.opening import open_source
from opened_sources import HubDataset, Open, opened, rows_of
from stage import python

__all__ = ["opened"]

pytestmark = pytest.mark.once

ROWS: list[dict[str, Any]] = [
    {"id": "00000", "text": "NA", "n": 1},
    {"id": "b", "text": 'two\nlines, "quoted"', "n": 2**62 + 1},
    {"id": "c", "text": "", "n": None},
    {"id": "d", "text": "é\u2028", "n": -1},
    {"id": "e", "text": "nan", "n": 0},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, use_dictionary=False)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def pandas(rows: list[dict[str, Any]]) -> Any:
    pd = pytest.importorskip("pandas")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return pd.DataFrame({**columns, "n": pd.array(columns["n"], "Int64")})


class MapStyle:
    """A dataset as torch has them: items by number, and an iteration that would never end."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number % len(self.rows)]


TABLE = pa.Table.from_pylist
SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string()), ("n", pa.int64())])

OBJECTS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "table": TABLE,
    "batch": lambda rows: TABLE(rows).to_batches()[0],
    "reader": lambda rows: TABLE(rows).to_reader(max_chunksize=3),
    "chunks": lambda rows: pa.concat_tables([TABLE([row], SCHEMA) for row in rows]),
    "polars": lambda rows: pytest.importorskip("polars").DataFrame(rows),
    "query": lambda rows: OBJECTS["polars"](rows).lazy(),
    "pandas": pandas,
    "duckdb": lambda rows: pytest.importorskip("duckdb").connect().from_arrow(TABLE(rows)),
    "dataset": lambda rows: HubDataset(TABLE(rows)),
    "list": list,
    "map style": MapStyle,
    "generator": lambda rows: (row for row in rows),
}


def source_of(kind: str, rows: list[dict[str, Any]], folder: Path) -> Any:
    """Return rows as an object of that kind, or as the path of a file with that suffix."""
    return write(folder / f"rows{kind}", rows) if kind.startswith(".") else OBJECTS[kind](rows)


@pytest.mark.parametrize("kind", [*OBJECTS, ".parquet", ".jsonl"])
def test_rows_are_read_whole_and_by_several_readers_at_once(
    kind: str, tmp_path: Path, opened: Open
) -> None:
    source = opened(source_of(kind, ROWS, tmp_path))
    first, second = source.windows(["id"], 1), source.windows(["id"], 1)
    seen = [next(first).values("id"), next(second).values("id"), next(second).values("id")]
    assert seen == [["00000"], ["00000"], ["b"]]
    for size in 2, 1, 2048, 3:
        assert rows_of(source, size=size) == ROWS
    assert [window.values("id") for window in first] == [["b"], ["c"], ["d"], ["e"]]
    assert rows_of(source, ["n", "id"]) == [{"n": row["n"], "id": row["id"]} for row in ROWS]
    assert sum(window.size for window in source.windows([], 2)) == 5
    assert source.rows in (5, None)
    source.check_unchanged()


def test_jsonl_that_the_standard_library_wrote_is_read_exactly(
    tmp_path: Path, opened: Open
) -> None:
    values = [
        *(2**63, 2**64, -(2**63) - 1, 10**30, 2**63 - 1, -(2**63), 0.1234567890123456789),
        *(float("inf"), float("nan"), -0.0, 1e300, "\ud800", "9" * 40, [2**70, {"a": 2**70}]),
    ]
    path = write(tmp_path / "rows.jsonl", [{"a": value} for value in values])
    assert repr([row["a"] for row in rows_of(opened(path))]) == repr(values)


def test_a_torn_parquet_file_is_refused_where_it_is_torn(tmp_path: Path, opened: Open) -> None:
    path = write(tmp_path / "a.parquet", [{"id": number} for number in range(1000)])
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(400) + content[404:])
    source = opened(path)
    with pytest.raises(SourceError, match=r"a\.parquet' cannot be read: .+") as caught:
        rows_of(source)
    assert "\n" not in str(caught.value)


def test_torn_compressed_text_is_refused_after_the_rows_before(
    tmp_path: Path, opened: Open
) -> None:
    packed = gzip.compress(b"".join(b'{"a": %d}\n' % number for number in range(20_000)))
    (tmp_path / "a.jsonl.gz").write_bytes(packed[:-9])
    windows = opened(tmp_path / "a.jsonl.gz").windows(["a"], 2)
    assert next(windows).values("a") == [0, 1]
    with pytest.raises(SourceError, match=r"a\.jsonl\.gz' cannot be read: .*[Tt]runcated"):
        list(windows)


def test_paths_that_lead_nowhere_are_refused(tmp_path: Path, opened: Open) -> None:
    write(tmp_path / "a.csv", ROWS)
    write(tmp_path / "a.jsonl", ROWS)
    for name, message in (
        ("none*.csv", r"no file matches '.*none\*\.csv'"),
        ("none.csv", "no file matches"),
        ("", "no file matches '.*'; a folder is read for its Parq"),
        ("a.*", r"several formats \(csv, json\)"),
    ):
        with pytest.raises(SourceError, match=message):
            opened(f"{tmp_path}/{name}")


@pytest.mark.parametrize("kind", ["table", "dataset", "reader", ".parquet", ".csv"])
def test_a_column_that_is_not_there_is_refused_before_anything_is_read(
    kind: str, tmp_path: Path, opened: Open
) -> None:
    source = opened(source_of(kind, ROWS, tmp_path))
    message = r"no column 'txt'; its columns are 'id', 'text', 'n'; did you mean 'text'\?"
    with pytest.raises(SourceError, match=message):
        source.windows(["id", "txt"])
    with pytest.raises(SourceError, match=message):
        source.windows(None, required=["txt"])


RAGGED = [{"id": 1, "text": "a"}, {"id": 2, "note": "x"}, {"text": "c", "id": 3}]


@pytest.mark.parametrize("kind", ["list", "generator", ".jsonl"])
def test_a_column_that_a_row_lacks_is_none_unless_it_is_required(
    kind: str, tmp_path: Path, opened: Open
) -> None:
    source = opened(source_of(kind, RAGGED, tmp_path))
    assert rows_of(source, None, 10) == [
        {"id": 1, "text": "a", "note": None},
        {"id": 2, "text": None, "note": "x"},
        {"id": 3, "text": "c", "note": None},
    ]
    assert rows_of(source, ["note"], required=[])[0] == {"note": None}
    message = "row 1 (counted from 0): has no column 'text'; its columns are 'id', 'note'"
    for columns, required in ((["id", "text"], None), (None, ["text"])):
        (window,) = source.windows(columns, required=required)
        assert list(window.faults) == [1]
        assert window.faults[1] == message
        assert window.values("id") == [1, 2, 3]


def test_a_generator_that_was_read_is_refused(opened: Open) -> None:
    source = (row for row in ROWS)
    assert rows_of(opened(source)) == ROWS
    with pytest.raises(SourceError, match="the generator has been read to its end"):
        opened(source)


def test_a_row_that_a_sequence_cannot_give_is_a_fault(opened: Open) -> None:
    class Torn(MapStyle):
        def __getitem__(self, number: int) -> dict[str, Any]:
            if number == 1:
                raise FileNotFoundError("1.jpg")
            return super().__getitem__(number)

    (window,) = opened(Torn(ROWS)).windows(["id"])
    assert window.values("id") == ["00000", None, "c", "d", "e"]
    assert window.faults[1].endswith("the row cannot be read: FileNotFoundError: 1.jpg")


@pytest.mark.parametrize(("value", "kind"), [(1001, pa.timestamp("ns")), (2**62, pa.duration("s"))])
def test_a_value_that_python_has_no_equal_for_is_a_fault(
    value: int, kind: Any, opened: Open
) -> None:
    table = pa.table({"x": pa.array([0, value], pa.int64()).cast(kind, safe=False), "y": [1, 2]})
    (window,) = opened(table).windows(None)
    assert [each is None for each in window.values("x")] == [False, True]
    assert list(window.faults) == [1]
    assert window.faults[1].startswith("row 1 (counted from 0): the value in column 'x', of type")
    assert window.values("y") == [1, 2]
    assert window.columns["x"].equals(table["x"].combine_chunks())  # and kept as it is


def test_an_iterator_is_read_no_further_than_the_limit(tmp_path: Path) -> None:
    reached = []

    def rows() -> Iterator[dict[str, int]]:
        for number in count():
            reached.append(number)
            yield {"n": number}

    source = open_source(rows(), spool=tmp_path / "spool", limit=100)
    assert rows_of(source) == [{"n": number} for number in range(100)]
    assert reached == [*range(100)]
    source.close()


@pytest.mark.parametrize("kind", [*OBJECTS, ".parquet", ".jsonl"])
def test_a_limit_is_a_number_of_rows(kind: str, tmp_path: Path) -> None:
    for limit in (0, 3, 9):
        given = source_of(kind, ROWS, tmp_path)
        source = open_source(given, spool=tmp_path / f"spool{limit}", limit=limit)
        assert rows_of(source) == rows_of(source, None, 2) == ROWS[:limit]
        assert source.rows == len(ROWS[:limit])
        source.close()


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
@pytest.mark.parametrize("kind", ["generator", "reader"])
def test_a_disk_without_room_for_the_spool_is_named(
    kind: str, tmp_path: Path, opened: Open
) -> None:
    import resource

    given = OBJECTS[kind]([{"id": number, "text": f"{number:500}"} for number in range(9000)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ExitStack() as at_the_end:
        at_the_end.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, before[1]))
        with pytest.raises(SourceError, match="the rows cannot be kept .* make room") as full:
            opened(given)
        assert f"second reading in {tmp_path}/spool0 (OSError: " in str(full.value)


def test_an_iterator_that_fails_is_never_taken_for_one_that_ended(opened: Open) -> None:
    def rows() -> Iterator[dict[str, int]]:
        yield from ({"n": number} for number in range(5000))
        raise ZeroDivisionError("at 5000")

    with pytest.raises(SourceError, match="row 5000 .* generator cannot be read: ZeroDiv"):
        opened(rows())


@pytest.mark.parametrize(
    "kind", ["list", "generator", "table", "polars", ".jsonl", ".csv", ".parquet"]
)
def test_windows_of_large_values_have_fewer_rows(
    kind: str, tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in "tables", "base":  # the first one imports the number of the second
        monkeypatch.setattr(f"batched.offline.sources.{module}.WINDOW_BYTES", 10_000)
    rows = [{"id": str(n), "text": f"{n % 10}" * 999 + f"{n}", "n": "1"} for n in range(40)]
    source = opened(source_of(kind, rows, tmp_path))
    windows = list(source.windows(None))
    texts = [value for window in windows for value in window.values("text")]
    assert texts == [row["text"] for row in rows]
    assert 4 <= max(window.size for window in windows) <= 11
    first = next(iter(source.windows(["id"])))
    assert first.size == 40 or kind in ("list", "generator", ".jsonl", ".csv", ".parquet")


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("a", lambda path: write(path, ROWS * 2)),
        ("a", lambda path: os.utime(path, ns=(1, 1))),
        ("b", Path.unlink),
        ("c", lambda path: write(path, ROWS)),
    ],
    ids=["size", "time", "gone", "added"],
)
def test_files_that_change_during_the_run_are_noticed(
    name: str, edit: Callable[[Path], object], tmp_path: Path, opened: Open
) -> None:
    write(tmp_path / "a.csv", ROWS)
    write(tmp_path / "b.csv", ROWS)
    source = opened(f"{tmp_path}/*.csv")
    source.check_unchanged()
    edit(tmp_path / f"{name}.csv")
    with pytest.raises(SourceError, match=rf"{name}\.csv' was changed, added or removed"):
        source.check_unchanged()


PEAK = """
import re, sys
from pathlib import Path
from batched.offline.sources.opening import open_source

def rows():
    for number in range(count):
        yield {{"id": number, "text": f"{{number:0400}}"}}

for path in {paths}:
    count = int(Path(path).stem)
    source = open_source(path if Path(path).suffix else rows(), spool=Path(path + "spool"))
    read = 0
    for _ in range(2):
        for window in source.windows(None):
            window.values("text")
            read += window.size
    source.close()
    assert read == 2 * count
    print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "suffix",
    [".jsonl", *(pytest.param(each, marks=pytest.mark.slow) for each in ("", ".csv", ".parquet"))],
)
def test_memory_is_bounded_for_any_size(suffix: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{count}{suffix}" for count in (5_000, 20_000)]
    for path in paths:
        rows = [{"id": number, "text": f"{number:01600}"} for number in range(int(path.stem))]
        if suffix == ".parquet":
            table = pa.Table.from_pylist(rows)
            pq.write_table(table, path, row_group_size=len(rows), compression="none")
        elif suffix:
            write(path, rows)
    done = python(PEAK.format(paths=[*map(str, paths)]), timeout=60)
    assert not done.returncode, done.stderr
    less, more = map(int, done.stdout.split())
    assert more - less < 12_000, "15,000 rows more are 24,000 kB of text more"
