"""The join of a source with committed results: each row has its own; types are decided last."""

from __future__ import annotations

import json
import os
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batched.errors import SourceError
from batched.offline.progress import store as _store
from batched.offline.progress.commit import Key, Letter, letter_text
from batched.offline.progress.store import Progress
from batched.offline.results import merge as _merge
from batched.offline.results.formats import Lines, Parquet
from batched.offline.results.merge import Merge
from batched.offline.results.opening import open_result
from batched.offline.sources.opening import open_source
from batched.offline.types.columns import Columns
from progress_files import results

pytestmark = pytest.mark.once


class Case:
    """A progress file, and merges of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress = Progress(folder / "progress")
        self.letters: list[Letter] = []

    def commit(
        self, keys: Sequence[Key], values: Sequence[Any], step: int = 0, batch: int = 2048
    ) -> None:
        """Commit values of one column, several at a time, and note the keys of the source."""
        for first in range(0, len(keys), batch):
            some = slice(first, first + batch)
            self.progress.commit([results(keys[some], values[some], step)])
        self.note(keys)

    def note(self, keys: Sequence[Key | None]) -> None:
        """Note the keys of the source of another run."""
        self.progress.note_source(0, keys)
        self.progress.end_source(len(keys))

    def source(self, text: str) -> str:
        """Write a source of JSON lines, and return its path."""
        path = self.folder / "in.jsonl"
        path.write_text(text)
        return str(path)

    def merge(
        self,
        source: Any,
        dest: str,
        columns: Sequence[Columns] = (Columns(["out"]),),
        **settings: Any,
    ) -> list[dict[str, Any]]:
        """Return the rows of the result."""
        opened = open_source(source, spool=self.folder / "spool")
        result = open_result(f"{self.folder}/results/{dest}", overwrite=True)
        with closing(opened):
            merge = Merge(opened, self.progress, result, columns, **settings)
            for window in opened.windows(None) if opened.schema is None else ():
                merge.note_kinds(window)
            with closing(result):
                merge.write(self.letters.extend)
                result.publish(len)
        assert not list((self.folder / "results").glob("*.writing"))
        return read(result.path)


def read(path: str) -> list[dict[str, Any]]:
    if path.endswith(".jsonl"):
        return [json.loads(line) for line in Path(path).read_text().splitlines()]
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    (tmp_path / "results").mkdir()
    case = Case(tmp_path)
    yield case
    case.progress.close()


# --- each row has its own result ---


def test_a_row_needs_a_result_of_every_step_and_a_later_step_may_replace_columns(
    case: Case,
) -> None:
    case.commit(range(10), [f"first {n}" for n in range(10)])
    case.commit(range(0, 10, 2), list(range(0, 10, 2)), step=1)
    case.commit(range(0, 10, 4), [float(n) for n in range(0, 10, 4)], step=2)
    case.note(range(10))
    columns = [Columns(["a"]), Columns(["out"]), Columns(["out"])]
    rows = case.merge([{"id": n, "a": "source"} for n in range(10)], "r/", columns=columns)
    assert rows == [{"id": n, "a": f"first {n}", "out": float(n)} for n in (0, 4, 8)]


# --- chunks are read once, and memory is bounded ---


@pytest.mark.parametrize(
    ("batch", "make", "dest"),
    [
        (5, lambda n: np.full(3, n, np.float32), "r.parquet"),
        (50, lambda n: np.full(n % 4, n, np.float32), "r/"),
        (50, lambda n: {"n": n, "list": [n] * (n % 3), "maybe": None if n % 5 else n}, "r.jsonl"),
    ],
)
def test_any_order_of_the_source_gives_its_rows_and_the_usual_one_reads_each_chunk_once(
    batch: int,
    make: Callable[[int], Any],
    dest: str,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = list(range(500))
    values = list(map(make, keys))
    case.commit(keys, values, batch=batch)
    case.commit(keys, values, step=1, batch=batch)
    order = random.Random(0).sample(keys, len(keys))
    columns = [Columns(["first"]), Columns(["out"])]
    monkeypatch.setattr(_merge, "WINDOW_ROWS", 30)
    for rows in (keys, order):
        case.note(rows)
        found = case.merge([{"id": n} for n in rows], dest, key="id", columns=columns)
        chunk: Any = case.progress.chunk
        read = chunk.cache_info().misses
        assert rows is order or read == 2 * len(keys) // batch
        expected = json.loads(json.dumps([values[n] for n in rows], default=np.ndarray.tolist))
        assert [row["first"] for row in found] == [row["out"] for row in found] == expected
        assert [row["id"] for row in found] == rows


def test_results_of_any_size_are_written_piece_by_piece(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_merge, "WINDOW_BYTES", 1 << 20)
    keys = list(range(64))
    case.commit(keys, [bytes([n]) * (1 << 18) for n in keys], batch=2)
    written: list[int] = []
    write = Parquet.write

    def record(self: Any, table: Any) -> None:
        written.append(table.nbytes)
        write(self, table)

    monkeypatch.setattr(Parquet, "write", record)
    rows = case.merge([{"id": n} for n in keys], "r.parquet")
    assert [row["out"][0] for row in rows] == keys
    assert len(written) > 10
    assert max(written) < 2 << 20


def test_few_large_chunks_are_in_memory_at_once(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = list(range(40))
    case.commit(keys, [np.full(1000, n, np.float64) for n in keys], batch=2)
    monkeypatch.setattr(_store, "CACHED_BYTES", 70_000)
    read, found, most = case.progress._read_chunk, list[Any](), 0

    def chunk(number: int) -> list[Any]:
        nonlocal most
        columns = read(number)
        found.append(weakref.ref(columns[0]))
        most = max(most, sum(each() is not None for each in found))
        return columns

    monkeypatch.setattr(case.progress, "_read_chunk", chunk)
    assert len(case.merge([{"id": n} for n in keys], "r.parquet")) == 40
    assert (len(found), most) == (20, 5)


# --- the type of a column is decided last ---


def test_in_a_conflict_the_rows_of_the_source_decide_however_committed(case: Case) -> None:
    values = [1, None, "x", 2**60, 3, "y", 5] + ["of a row that left"] * 5
    keys = list(range(len(values)))
    case.commit(keys, values, batch=3)
    case.note(keys[:7])
    rows = case.merge([{"id": n} for n in range(7)], "r.parquet")
    assert [row["out"] for row in rows] == [1, None, 2**60, 3, 5]


def test_a_dict_without_fields_gives_no_type_where_none_can_be_stored(case: Case) -> None:
    case.commit(range(2), [{}, {"a": {}, "b": [{}]}])
    rows = case.merge([{"n": {}}, {"n": {"x": {}}}], "r.parquet")
    assert rows == [{"n": {"x": None}, "out": {"a": None, "b": None}}]
    assert [letter.row for letter in case.letters] == [1]
    assert case.merge([{"n": {}}, {"n": {"x": {}}}], "r.jsonl") == [
        {"n": {}, "out": {}},
        {"n": {"x": {}}, "out": {"a": {}, "b": [{}]}},
    ]


def test_rows_of_the_minority_are_left_out_of_a_typed_result_and_stay_committed(
    case: Case,
) -> None:
    keys = list(range(100))
    values: list[Any] = [n / 2 for n in keys]
    values[0] = "odd"
    case.commit(keys, values, batch=40)
    source = [{"id": n} for n in keys]
    rows = case.merge(source, "r.parquet")
    assert rows == [{"id": n, "out": n / 2} for n in keys[1:]]
    (letter,) = case.letters
    assert (letter.row, letter.key) == (0, 0)
    error = "column 'out': the column holds float, and this row's value is str 'odd'"
    assert letter.error == letter_text("output", error)
    # text takes all values
    assert case.merge(source, "r.jsonl")[:2] == [{"id": 0, "out": "odd"}, {"id": 1, "out": 0.5}]
    assert len(case.letters) == 1


def test_kept_values_without_a_common_type_are_left_out(case: Case) -> None:
    case.commit(range(4), ["a", "b", "c", "d"])
    rows = case.merge(case.source('{"n":7}\n{"n":"n/a"}\n{}\n{"n":8.5}\n'), "r.parquet")
    assert rows == [{"n": 7.0, "out": "a"}, {"n": None, "out": "c"}, {"n": 8.5, "out": "d"}]
    assert [letter.row for letter in case.letters] == [1]
    assert "column 'n': " in case.letters[0].error


def test_kept_values_are_written_from_json_to_json_as_they_were_read(case: Case) -> None:
    lines = [
        '{"n":7,"x":{}}',
        '{"n":"n/a","x":"\\ud800"}',
        '{"n":36893488147419103232,"x":[NaN,-Infinity]}',
        '{"n":null,"x":[1,"a",{"b":null}]}',
    ]
    case.commit(range(4), ["a", "b", "c", "d"])
    case.merge(case.source("\n".join(lines)), "r.jsonl")
    written = (case.folder / "results" / "r.jsonl").read_text().splitlines()
    expected = [json.loads(line) | {"out": out} for line, out in zip(lines, "abcd", strict=True)]
    assert str(list(map(json.loads, written))) == str(expected)
    assert not case.letters


def test_a_kept_time_that_text_cannot_hold_is_left_out_and_parquet_keeps_it(case: Case) -> None:
    pytest.importorskip("pandas", reason="pyarrow needs pandas for times in ns")
    case.commit(range(2), ["a", "b"])
    table = pa.table({"at": pa.array([0, 1], pa.timestamp("ns"))})
    rows = case.merge(table, "r.jsonl")
    assert rows == [{"at": "1970-01-01T00:00:00", "out": "a"}]
    assert [letter.row for letter in case.letters] == [1]
    case.merge(table, "r.parquet")
    written = pq.read_table(case.folder / "results" / "r.parquet")
    assert written.column("at").cast(pa.int64()).to_pylist() == [0, 1]


def test_a_declared_type_holds_also_where_nothing_succeeded(case: Case) -> None:
    case.note(range(2))
    declared = {"out": pa.list_(pa.float32(), 4)}
    rows = case.merge(pa.table({"id": [0, 1]}), "r.parquet", columns=[Columns(["out"], declared)])
    assert rows == []
    assert pq.read_schema(case.folder / "results" / "r.parquet") == pa.schema(
        {"id": pa.int64(), **declared}
    )


# --- rows are never joined with results of other rows ---


@pytest.mark.parametrize(
    ("now", "how"),
    [
        (["a", "x", "c"], "row 1 .* had the key 'b', and has 'x' now"),
        (["a", "b", "c", "d"], "it has more rows now"),
    ],
)
def test_a_source_that_changed_since_it_was_read_is_refused(
    now: list[str], how: str, case: Case
) -> None:
    case.commit(["a", "b", "c"], [1, 2, 3])
    with pytest.raises(SourceError, match=f"has changed since the run read it: {how}; run again"):
        case.merge([{"id": key} for key in now], "r.jsonl", key="id")
    assert not os.listdir(case.folder / "results")


def test_a_file_that_is_replaced_while_the_result_is_written_is_refused(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.commit(range(1), ["a"])
    source = case.source('{"n":1}\n')
    close = Lines.close

    def replace(rows: Lines) -> None:
        close(rows)
        case.source('{"n":22}\n')

    monkeypatch.setattr(Lines, "close", replace)
    with pytest.raises(SourceError, match="was changed"):
        case.merge(source, "r.jsonl")
    assert not os.listdir(case.folder / "results")


def test_rows_that_cannot_be_read_have_no_result(case: Case) -> None:
    case.commit(range(3), [1, 2, 3])  # the line was whole in an earlier run
    rows = case.merge(case.source('{"n":1}\n{broken\n{"n":3}\n'), "r.jsonl")
    assert rows == [{"n": 1, "out": 1}, {"n": 3, "out": 3}]
    assert not case.letters


# --- failed rows may be kept ---


def test_failed_rows_are_kept_with_their_error_if_asked(case: Case) -> None:
    case.commit([0, 3, 4], [0.5, 1.5, "odd"])
    case.progress.add_letters("source", [Letter(1, None, letter_text("source", "no JSON"))])
    case.note([0, None, 3, 4])
    source = case.source('{"n":0}\n{broken\n{"n":3}\n{"n":4}\n')
    rows = case.merge(source, "r.parquet", keep_failed=True)
    *errors, misfit = [row.pop("_error") for row in rows]
    assert errors == [None, "no JSON", None]
    assert misfit.startswith("column 'out': ")
    outputs = [(0, 0.5), (None, None), (3, 1.5), (4, None)]
    assert rows == [{"n": n, "out": out} for n, out in outputs]
