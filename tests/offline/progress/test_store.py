"""The progress file: rows and results are one commit; keys, order of the source, replaced rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batched.offline.progress.commit import Commit, Committed, Key, Letter, letter_text
from batched.offline.progress.database import WINDOW
from batched.offline.progress.store import Progress
from batched.offline.report import dead_letters
from batched.offline.types import columns as _columns
from progress_files import done, failed, outputs, query, value

STEPS = {"steps": [{"name": "clean"}, {"name": "embed"}]}


@pytest.fixture
def progress(tmp_path: Path) -> Iterator[Progress]:
    with closing(Progress(tmp_path / "vectors.parquet.progress")) as progress:
        yield progress


def note(progress: Progress, keys: Sequence[Key | None], size: int = WINDOW) -> list[int]:
    """Note the source of another run, and return the rows of keys that stand twice."""
    twice: list[int] = []
    for first in range(0, len(keys), size):
        places = progress.note_source(first, keys[first : first + size])
        twice += [first + place for place in places]
    progress.end_source(len(keys))
    return twice


def source(progress: Progress) -> list[Any]:
    rows = query(progress, "select row, key from source order by row")
    assert [row for row, _ in rows] == list(range(len(rows)))
    return [key for _, key in rows]


# --- rows and results


def test_a_large_commit_is_split_into_chunks(
    progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_columns, "MAX_BYTES", 500)
    keys: list[Key] = [f"key {n}" for n in range(100)]
    large: list[Key] = ["x" * 2000]  # more than a chunk in a single row
    progress.commit([done(keys), done(large)])
    assert outputs(progress, keys + large) == {(key, 0): value(key) for key in keys + large}
    chunks = query(
        progress, "select bytes, count(*) from rows join chunks on id = chunk group by id"
    )
    assert len(chunks) > 5
    assert all(size <= 500 or rows == 1 for size, rows in chunks)


def test_a_commit_that_fails_leaves_nothing(progress: Progress) -> None:
    bad: Any = object()  # which SQLite cannot store
    with pytest.raises(sqlite3.Error):
        progress.commit([done(["a"]), Commit(0, ended=[("b", 1, bad)])])
    assert progress.committed(["a"]) == {}
    assert query(progress, "select count(*) from chunks") == [(0,)]
    progress.commit([done(["a"])])
    assert set(progress.committed(["a"])) == {("a", 0)}


def test_a_number_and_its_digits_are_two_keys(progress: Progress) -> None:
    keys: list[Key] = [1, "1", "01", "1 ", "", "a", "A", "a\0b", "a\0c", "ä", "a\u0308"]
    keys += [2**63 - 1, -(2**63), 0, "0", "😀", "NaN", "null"]
    note(progress, keys)
    assert source(progress) == keys
    progress.commit([done(keys)])
    found = outputs(progress, keys)
    assert found == {(key, 0): value(key) for key in keys}
    assert {type(key) for key, _ in found} == {int, str}
    assert outputs(progress, ["a\0b"]) == {("a\0b", 0): value("a\0b")}


def test_any_number_of_keys_is_looked_up(progress: Progress) -> None:
    keys: list[Key] = [f"key {n}" for n in range(3 * WINDOW + 5)]
    with progress.use() as conn:
        conn.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)  # as of an older SQLite
    progress.commit([done(keys)])
    assert len(progress.committed(keys)) == len(keys)
    assert progress.committed([]) == {}
    note(progress, keys)
    note(progress, keys[::-1])
    assert source(progress) == keys[::-1]


# --- rows that are committed again


def test_a_row_that_is_committed_again_loses_its_results_of_later_steps(progress: Progress) -> None:
    progress.commit([done(["a", "b"], step) for step in (0, 1, 2)])
    progress.commit([failed(["a"], step=1), done(["b"], 1)])
    states = {at: row.status for at, row in progress.committed(["a", "b"]).items()}
    ok = dict.fromkeys([("a", 0), ("b", 0), ("b", 1)], "ok")
    assert states == {**ok, ("a", 1): "failed"}


def test_a_step_is_forgotten_with_all_later_ones_and_with_results_that_were_replaced(
    progress: Progress,
) -> None:
    progress.commit([done(["a", "b"]), failed(["c"], 1)])
    progress.commit([done(["a", "b"], step, note=" anew") for step in (0, 1, 2)])
    progress.drop_steps(1, {"key": "id"})
    assert set(progress.committed(["a", "b", "c"])) == {("a", 0), ("b", 0)}
    assert outputs(progress, ["a", "b"]) == {(key, 0): f"{value(key)} anew" for key in "ab"}
    assert query(progress, "select count(*) from chunks") == [(1,)]
    assert progress.dead_letters() == []


# --- the order of the source


@pytest.mark.once
@settings(max_examples=50, deadline=None)
@example(runs=[list("abcde"), list("edcba"), list("abxde"), list("abc"), []], size=1)
@example(runs=[[0, 1, 2, 1, 4]] * 2, size=2)
@example(runs=[["b", "a", None, "c", "a", None]] * 2, size=2)
@given(
    runs=st.lists(st.lists(st.integers(0, 30) | st.sampled_from("abc12") | st.none()), max_size=4),
    size=st.integers(1, 7),
)
def test_any_source_is_noted_in_order_with_each_key_once_whatever_the_file_had_before(
    tmp_path_factory: pytest.TempPathFactory, runs: list[list[Key | None]], size: int
) -> None:
    progress = Progress(tmp_path_factory.mktemp("progress") / "file")
    for keys in runs:
        twice = [row for row, key in enumerate(keys) if key is not None and key in keys[:row]]
        assert note(progress, keys, size) == twice
        assert source(progress) == [None if row in twice else key for row, key in enumerate(keys)]
        assert progress.source_rows == len(keys)
    progress.close()


# --- counts and dead letters


def test_rows_are_counted_by_step_and_status(progress: Progress) -> None:
    assert progress.counts() == {}
    filtered = Commit(1, ended=[("c", 7, None), (5, 7, None)])
    progress.commit([done(["a", "b", "c"]), failed(["d", 4]), done(["a"], 1), failed(["b"], 1)])
    progress.commit([filtered])
    assert progress.counts() == {
        0: {"ok": 3, "failed": 2, "filtered": 0},
        1: {"ok": 1, "failed": 1, "filtered": 2},
    }
    assert progress.committed([5])[5, 1] == Committed("filtered", None, None, 7)


def test_dead_letters_of_rows_that_left_the_source_go_and_results_wait_for_them(
    progress: Progress,
) -> None:
    progress.put_all(STEPS)
    progress.commit([done(["a", "b"]), failed(["c", "d"]), failed(["a"], step=1)])
    progress.note_source(0, ["b", "c"])
    assert len(progress.dead_letters()) == 3  # the source may have more rows
    progress.end_source(2)
    assert [letter["key"] for letter in progress.dead_letters()] == ["c"]
    assert set(outputs(progress, ["a", "b", "c", "d"])) == {("a", 0), ("b", 0)}
    assert progress.counts() == {0: {"ok": 2, "failed": 1, "filtered": 0}}


def test_dead_letters_tell_all_of_a_failure_and_hold_no_lock(progress: Progress) -> None:
    progress.put_all(STEPS)
    progress.commit([failed(["b", 1], step=1), failed(["c"], step=0)])
    progress.close()
    letters = dead_letters(progress.path)
    first = next(letters)
    Progress(progress.path).close()  # no run has locked it
    assert [first, *letters] == [
        {
            "key": key,
            "step": step,
            "phase": "inference",
            "error": "ValueError: bad row",
            "attempts": 3,
            "traceback": "File ...",
        }
        for step, key in (("clean", "c"), ("embed", 1), ("embed", "b"))
    ]


def test_rows_outside_of_all_steps_are_dead_letters_by_row(progress: Progress) -> None:
    progress.put_all(STEPS)
    progress.commit([failed(["a"])])
    progress.add_letters("source", [Letter(7, None, letter_text("source", "no JSON"))])
    for _ in range(2):  # one for each row
        progress.add_letters("output", [Letter(3, "k", letter_text("output", "no type"))])
    found = [(letter["key"], letter["phase"]) for letter in progress.dead_letters()]
    assert found == [(7, "source"), ("a", "inference"), ("k", "output")]
    progress.clear_letters("output")
    progress.clear_letters("source")
    assert [letter["phase"] for letter in progress.dead_letters()] == ["inference"]
