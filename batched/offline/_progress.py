"""The progress file: what is committed of a run, and the order of its source.

1. Rows and their results are one transaction: outputs of a commit are a chunk in `chunks`; keys,
   and the places of their outputs, are in `rows`. A commit that was not finished never was.
2. Keys are strings or 64-bit integers, exact: their columns have no type, so that 1 and "1" differ.
3. Rows of keys that the source no longer has are kept, and count for nothing: they may come back.
4. Chunks of which no row is left are dropped by `forget`, and by `close` if rows were replaced; the
   file uses that room again. A chunk with one row left stays whole.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self, TypedDict

import pyarrow as pa

from ..errors import RunLocked, SourceError
from ._chunks import from_bytes
from ._commit import Commit, Committed, Key, Status, join
from ._database import Database, insert, marks, windows
from ._order import SourceOrder, keys_in_source

PAGE: Final = 1000
"""Dead letters that one query reads."""
_TABLES: Final = """
create table run(name primary key, value) without rowid;
create table rows(key, step, status, chunk, place, input, attempts, error, primary key(key, step))
    without rowid;
create index failed on rows(step) where status = 'failed';
create table chunks(id integer primary key, data blob);
create table source(row integer primary key, key);
create unique index source_key on source(key)
"""


class DeadLetter(TypedDict):
    """A row that failed."""

    key: Key
    step: int
    phase: str
    error: str
    attempts: int
    traceback: str


class Progress:
    """The progress file of one run, which has locked it."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """The progress file at that path, made if there is none, and locked until it is closed.

        Raises `RunLocked` if another run has it, `RunMismatch` if it is no progress file or one of
        a newer layout (it is not touched), `OSError` if it cannot be opened or written.
        """
        return cls(Database(path, _TABLES))

    def __init__(self, database: Database) -> None:
        self._database = database
        self._replaced = False  # chunks may have lost their last row
        self._order = SourceOrder(database)

    def get(self, name: str) -> Any:
        """The JSON value that was put under that name; None if there is none."""
        with self._database.use() as conn:
            found = conn.execute("select value from run where name = ?", (name,)).fetchone()
        return None if found is None else json.loads(found[0])

    def put(self, name: str, value: Any) -> None:
        """Keeps a JSON value under that name."""
        self.put_all({name: value})

    def put_all(self, values: Mapping[str, Any]) -> None:
        """Keeps JSON values under their names, all or none of them."""
        with self._database.transaction() as conn:
            for name, value in values.items():
                _put(conn, name, value)

    def committed(self, keys: Sequence[Key]) -> dict[tuple[Key, int], Committed]:
        """What is committed of these keys, by key and step."""
        found: dict[tuple[Key, int], Committed] = {}
        with self._database.use() as conn:
            for some in windows(conn, keys):
                rows = conn.execute(
                    "select key, step, status, chunk, place, input, attempts, error from rows "
                    f"where key in ({marks(some)})",
                    some,
                ).fetchall()
                found |= {row[:2]: Committed._make(row[2:]) for row in rows}
        return found

    @property
    def is_empty(self) -> bool:
        """Whether nothing is committed."""
        with self._database.use() as conn:
            return conn.execute("select 1 from rows limit 1").fetchone() is None

    def places(self, first: int, size: int) -> list[tuple[int, int, int, int]]:
        """For rows of the source from `first` on that have results: row, step, chunk, and place in
        it; by row, then by step.
        """
        with self._database.use() as conn:
            return conn.execute(
                "select source.row, step, chunk, place from source join rows using (key) "
                "where source.row >= ? and source.row < ? and status = 'ok' "
                "order by source.row, step",
                (first, first + size),
            ).fetchall()

    def chunk(self, number: int) -> pa.RecordBatch:
        """The outputs in the chunk of that number."""
        with self._database.use() as conn:
            (data,) = conn.execute("select data from chunks where id = ?", (number,)).fetchone()
        return from_bytes(data)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Commits these rows in one transaction.

        A row that is committed already is replaced. One that failed takes its later steps along;
        one that is done does not, as they may not read it: their hash of the input tells.
        """
        chunks = list(join(commits))  # compressed before others have to wait
        failed = [(commit.step, *row) for commit in commits for row in commit.failed]
        notes = [note for commit in commits for note in commit.notes.items()]
        with self._database.transaction() as conn:
            for name, value in notes:
                _put(conn, name, value)
            for step, done, data in chunks:
                number = conn.execute("insert into chunks(data) values (?)", (data,)).lastrowid
                self._store(
                    conn,
                    [
                        (key, step, "ok", number, place, hashed, attempts, None)
                        for place, (key, hashed, attempts) in enumerate(done)
                    ],
                )
            self._store(
                conn,
                [
                    (key, step, "failed", None, None, hashed, attempts, error)
                    for step, key, hashed, attempts, error in failed
                ],
            )
            if failed:
                later = "delete from rows where key = ? and step > ?"
                at = [(key, step) for step, key, *_ in failed]
                self._replaced |= conn.executemany(later, at).rowcount > 0

    def _store(self, conn: sqlite3.Connection, rows: list[tuple[Any, ...]]) -> None:
        if not insert(conn, "rows", rows):
            insert(conn, "rows", rows, "replace")
            self._replaced = True

    def forget(self, step: int) -> None:
        """Drops what is committed of that step and of all later ones, and the types of their
        columns.
        """
        with self._database.transaction() as conn:
            conn.execute(
                "delete from run where name like 'columns %' and cast(substr(name, 9) as int) >= ?",
                (step,),
            )
            if conn.execute("delete from rows where step >= ?", (step,)).rowcount:
                _drop_chunks(conn)

    def note_source(self, first: int, keys: Sequence[Key]) -> None:
        """Notes keys of the present source, the first being that of row `first`; to be called with
        all of them, in order, and then `end_source`.

        Raises `SourceError` for a key that stands twice, at most `NOTES` rows later.
        """
        self._order.note(first, keys)

    def end_source(self, rows: int) -> None:
        """Notes that the source has so many rows, all of which were noted."""
        self._order.end(rows)

    def counts(self) -> dict[int, dict[Status, int]]:
        """Rows of the present source by step and status."""
        with self._database.use() as conn:
            # by `error`, as grouping by `status` takes twice the time
            counts = conn.execute(
                "select step, count(*), count(error) from rows "
                f"where {keys_in_source(conn)} group by step"
            ).fetchall()
        return {step: {"ok": rows - failed, "failed": failed} for step, rows, failed in counts}

    def dead_letters(self) -> Iterator[DeadLetter]:
        """Rows of the present source that failed, by step and key; commits may go on meanwhile."""
        last: tuple[int, Key] = (-1, 0)
        while True:
            with self._database.use() as conn:
                page = conn.execute(
                    "select step, key, attempts, error from rows where status = 'failed' "
                    f"and (step, key) > (?, ?) and {keys_in_source(conn)} "
                    f"order by step, key limit {PAGE}",
                    last,
                ).fetchall()
            for step, key, attempts, error in page:
                last = step, key
                said = json.loads(error)
                yield {
                    "key": key,
                    "step": step,
                    "phase": said["phase"],
                    "error": said["error"],
                    "attempts": attempts,
                    "traceback": said["traceback"],
                }
            if len(page) < PAGE:
                return

    def close(self) -> None:
        """Gives the file back; nothing can be done with it afterwards."""
        # What stands here a later run can do without, or will say again.
        with suppress(OSError, RunLocked, SourceError):
            self._order.write()
            if self._replaced:
                with self._database.transaction() as conn:
                    _drop_chunks(conn)
        self._database.close()


def _put(conn: sqlite3.Connection, name: str, value: Any) -> None:
    conn.execute("insert or replace into run values (?, ?)", (name, json.dumps(value)))


def _drop_chunks(conn: sqlite3.Connection) -> None:
    """Drops chunks of which no row is left."""
    conn.execute(
        "delete from chunks where id not in (select chunk from rows where chunk is not null)"
    )
