"""The progress file: the committed rows of a run, and the order of its source.

1. A commit is one transaction. Its values go to the table `chunks`, many to a chunk; keys, and the
   chunk and place of each value, go to the table `rows`. A commit that was interrupted leaves no
   trace in the file.
2. Keys are strings or 64-bit integers. Their columns have no type, so that 1 and "1" differ.
3. Rows whose keys the source no longer has are kept, because the keys may come back. They are in no
   result. Failed rows among them are dropped at the end of the source.
4. Chunks without rows are dropped by `drop_steps`, with which each run begins. The file uses that
   room again. A chunk with one row left stays whole.
5. The file has no types of columns. The type of a column of the result is decided from the kinds of
   the values of all rows (`kinds`).
6. Each window of the source is one transaction, before any of its rows is computed. Rows of the
   table `source` before the present window belong to this run; later rows may belong to an earlier
   run, and do not make a key stand twice.
"""

from __future__ import annotations

import ast
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa

from ..types.columns import Values
from ..types.packing import unpack
from ..types.values import Kind, Unfit, common_kind
from .commit import Commit, Committed, Key, Letter, Status
from .database import Database, insert, marks, windows

Phase = Literal["source", "output"]
"""Origin of a letter: the row could not be read, or the result cannot hold the row."""
# `run`: notes. `rows`: one row of the source in one step. `chunks`: values. `source`: the order of
# the source. `letters`: dead letters that belong to no step
_TABLES: Final = """
create table run(name primary key, value) without rowid;
create table rows(key, step, status, chunk, place, input, error, primary key(key, step))
    without rowid;
create index failed on rows(step) where status = 'failed';
create table chunks(id integer primary key, step, kind, bytes, data blob);
create table source(row integer primary key, key);
create unique index source_key on source(key);
create table letters(phase, row, key, error, primary key(phase, row)) without rowid
"""
CACHED: Final = 32
"""Chunks that stay in memory for later rows, at most."""
CACHED_BYTES = 64 << 20
"""Bytes of these chunks, at most; lists of floats take four times as many as objects."""
_LETTERS: Final = "select row, key, null, error from letters where phase = "
# all dead letters: rows that were not read, rows that failed in a step, rows without an output
_DEAD: Final = (
    f"{_LETTERS} 'source' union all "
    "select null, key, step, error from rows indexed by failed "
    f"where status = 'failed' union all {_LETTERS} 'output'"
)


class Progress(Database):
    """Progress file of one run, locked by this process."""

    def __init__(self, path: Path) -> None:
        """Open the progress file at `path`, or create it. Lock it until `close`.

        Raises:
            RunLocked: another run has locked the file.
            RunMismatch: the file is no progress file, or one of another version of the tables. The
                file is not changed.
            OSError: the file cannot be opened or written.
        """
        super().__init__(path, _TABLES)

    # --- notes

    def get(self, name: str) -> Any:
        """Return the JSON value of the note `name`; None if there is none."""
        found = self._query("select value from run where name = ?", name)
        return json.loads(found[0][0]) if found else None

    def put_all(self, values: Mapping[str, Any]) -> None:
        """Store notes, JSON values by name, in one transaction."""
        with self.transaction() as conn:
            _put(conn, values)

    def _query(self, statement: str, *values: Any) -> list[Any]:
        with self.use() as conn:
            return conn.execute(statement, values).fetchall()

    # --- rows

    def commit(self, commits: Sequence[Commit]) -> None:
        """Commit the rows of `commits` in one transaction.

        A row that is committed already is replaced, and its results of later steps are dropped.
        """
        # compressed before the transaction, for which other threads wait
        stored = [_chunks(commit.values) if commit.values else [] for commit in commits]
        statement = "insert into chunks(step, kind, bytes, data) values (?, ?, ?, ?)"
        with self.transaction() as conn:
            for commit, chunks in zip(commits, stored, strict=True):
                step, rows = commit.step, iter(commit.rows)
                _put(conn, commit.notes)
                for count, *chunk in chunks:
                    at = conn.execute(statement, (step, *chunk)).lastrowid
                    some = enumerate(islice(rows, count))
                    self._store(
                        conn,
                        [
                            (key, step, "ok", at, place, hashed, None)
                            for place, (key, hashed) in some
                        ],
                    )
                self._store(
                    conn,
                    [
                        (key, step, "failed" if error else "filtered", None, None, hashed, error)
                        for key, hashed, error in commit.ended
                    ],
                )

    def _store(self, conn: sqlite3.Connection, rows: list[tuple[Any, ...]]) -> None:
        """Write `rows`. Where a row replaces another, drop its results of later steps."""
        if not insert(conn, "rows", rows):
            insert(conn, "rows", rows, "replace")
            later = "delete from rows where key = ? and step > ?"
            conn.executemany(later, [row[:2] for row in rows])

    def committed(self, keys: Sequence[Key]) -> dict[tuple[Key, int], Committed]:
        """Return the committed states of rows with these `keys`, by key and step."""
        found: dict[tuple[Key, int], Committed] = {}
        for some in windows(keys):
            rows = self._query(
                "select key, step, status, chunk, place, input from rows "
                f"where key in ({marks(some)})",
                *some,
            )
            found |= {row[:2]: Committed._make(row[2:]) for row in rows}
        return found

    @property
    def is_empty(self) -> bool:
        """Whether no row has a result. Rows that have failed are computed again."""
        return not self._query("select 1 from rows where status != 'failed' limit 1")

    def drop_steps(self, step: int, notes: Mapping[str, Any]) -> None:
        """Drop the rows of `step` and of all later steps, and chunks without rows. Store notes."""
        with self.transaction() as conn:
            _put(conn, notes)
            conn.execute("delete from rows where step >= ?", (step,))
            conn.execute(
                "delete from chunks where id not in "
                "(select chunk from rows where chunk is not null)"
            )

    def counts(self) -> dict[int, dict[Status, int]]:
        """Return the number of rows by step and status."""
        # only failed rows have an error, and only ok rows have a chunk; to group by `status` takes
        # twice the time
        counts = self._query(
            "select step, count(*), count(error), count(chunk) from rows group by step"
        )
        return {
            step: {"ok": ok, "failed": failed, "filtered": rows - ok - failed}
            for step, rows, failed, ok in counts
        }

    # --- values

    @cached_property
    def chunk(self) -> Callable[[int | None], list[Any]]:
        """Function that returns the columns of a chunk.

        A column is a list of values, or an array with a row for each value. Some chunks stay in
        memory.
        """
        ((largest,),) = self._query("select coalesce(max(bytes), 0) from chunks")
        keep = lru_cache(max(1, min(CACHED, CACHED_BYTES // (int(largest) + 1))))
        return keep(self._read_chunk)

    def _read_chunk(self, number: int | None) -> list[Any]:
        ((size, data),) = self._query("select bytes, data from chunks where id = ?", number)
        return unpack(data if len(data) == size else pa.decompress(data, size, "zstd", True))

    @property
    def nbytes(self) -> int:
        """Size of all chunks before compression (bytes)."""
        return int(self._query("select coalesce(sum(bytes), 0) from chunks")[0][0])

    def kinds(self, step: int) -> list[list[Kind] | None]:
        """Return the kinds of the columns in the chunks of a step.

        None stands for a chunk with values of no common kind.
        """
        stored = self._query("select distinct kind from chunks where step = ?", step)
        return [kinds and ast.literal_eval(kinds) for (kinds,) in stored]

    # --- the source

    def note_source(self, first: int, keys: Sequence[Key | None]) -> list[int]:
        """Note keys of the source from row `first` on; return the places of keys noted before.

        Callers note all keys, in order, and then call `end_source`. The second row of a key is
        noted without a key, as is a row that has none.
        """
        twice: list[int] = []
        noted = list(keys)
        last = first + len(noted) - 1
        with self.transaction(synced=False) as conn:
            statement = "select key from source where row between ? and ? order by row"
            standing = conn.execute(statement, (first, last)).fetchall()
            if [key for (key,) in standing] == noted:  # as an earlier run has noted them
                return twice
            known: set[Key | None] = set()
            for some in windows(noted):
                statement = f"select key from source where key in ({marks(some)}) and +row < ?"
                known.update([key for (key,) in conn.execute(statement, (*some, first))])
            for place, key in enumerate(keys):
                if key in known and key is not None:
                    twice.append(place)
                    noted[place] = None
                known.add(key)
            # a key may have moved here from a later row
            insert(conn, "source", list(enumerate(noted, first)), "replace")
        return twice

    def end_source(self, rows: int) -> None:
        """Note that the source has so many rows, all of which were noted.

        Drop failed rows that the source no longer has: their dead letters are of no use.
        """
        with self.transaction() as conn:
            conn.execute("delete from source where row >= ?", (rows,))
            conn.execute(
                "delete from rows where status = 'failed' and "
                "not exists (select 1 from source where source.key = rows.key)"
            )

    @property
    def source_rows(self) -> int:
        """Number of rows of the source that were read."""
        return int(self._query("select coalesce(max(row) + 1, 0) from source")[0][0])

    def keys_of_rows(self, first: int, size: int) -> dict[int, Key | None]:
        """Return the keys of `size` rows of the source from row `first` on, by row."""
        where = "row >= ? and row < ? and key is not null"
        return dict(self._query(f"select row, key from source where {where}", first, first + size))

    def locate_values(self, first: int, size: int) -> list[tuple[int, int, int, int]]:
        """Return where the values of `size` rows of the source are, from row `first` on.

        Each entry is a row, a step, the chunk of the value, and its place in the chunk.
        """
        return self._query(
            "select source.row, step, chunk, place from source join rows using (key) "
            "where source.row >= ? and source.row < ? and status = 'ok'",
            *(first, first + size),
        )

    def failures(self, first: int, size: int) -> dict[int, str]:
        """Return the errors (JSON), by row, of failed rows among `size` rows from `first` on."""
        where = "where row >= ? and row < ?"
        return dict(
            self._query(
                f"select row, error from source join rows using (key) {where} "
                f"and status = 'failed' union all select row, error from letters {where}",
                *(first, first + size) * 2,
            )
        )

    # --- dead letters

    def clear_letters(self, phase: Phase) -> None:
        """Delete the dead letters of `phase`."""
        with self.transaction() as conn:
            conn.execute("delete from letters where phase = ?", (phase,))

    def add_letters(self, phase: Phase, letters: Sequence[Letter]) -> None:
        """Store dead letters of `phase`. A letter replaces an earlier letter of the same row."""
        with self.transaction() as conn:
            insert(conn, "letters", [(phase, *letter) for letter in letters], "replace")

    def dead_letters(self) -> list[dict[str, Any]]:
        """Return all dead letters.

        Rows that could not be read come first, by row. Rows that failed in a step follow, by step
        and key, and then rows that the result cannot hold. A letter has the keys key, step,
        attempts, phase, error and traceback.
        """
        names = [step["name"] for step in self.get("steps") or ()]
        return [
            {
                "key": row if key is None else key,
                "step": "" if step is None else names[step],
                **json.loads(error),
            }
            for row, key, step, error in self._query(_DEAD)
        ]

    def close(self) -> None:
        """Close the file, and release its lock and the memory of its chunks."""
        self.__dict__.pop("chunk", None)
        super().close()


def _chunks(values: Values) -> list[tuple[int, str | None, int, bytes]]:
    """Return chunks of values, each with its rows, its kinds and its size before compression.

    Kinds are the `repr` of a list; None if values of a column have no common kind.
    """
    kinds = None
    with suppress(Unfit):
        kinds = repr(list(map(common_kind, values.kinds)))
    return [
        # bytes of the same number are not compressed
        (rows, kinds, len(data), min(data, pa.compress(data, "zstd", asbytes=True), key=len))
        for rows, data in values.packed
    ]


def _put(conn: sqlite3.Connection, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        conn.execute("insert or replace into run values (?, ?)", (name, json.dumps(value)))
