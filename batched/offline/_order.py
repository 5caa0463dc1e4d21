"""The order of the present source: its keys by row, in the progress file.

It is written only where it differs from what stands there, in thousands of rows at a time, sorted
by key: each page of the index of keys is then written once. That index finds keys that stand twice.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from ..errors import SourceError
from ._commit import Key
from ._database import Database, insert, marks, windows

NOTES: Final = 32_768
"""Rows of the source that one transaction writes. Of a million keys in random order each costs 5 us
then, and 13 if they are written in windows of 2,048."""


class SourceOrder:
    """The table `source`, and the notes that are to be written to it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._notes: list[Key] = []  # keys, to be written
        self._first = 0  # row of the first of them

    def note(self, first: int, keys: Sequence[Key]) -> None:
        """Notes keys of the present source, the first being that of row `first`; to be called with
        all of them, in order, and then `end`.

        Raises `SourceError` for a key that stands twice, at most `NOTES` rows later.
        """
        if not self._notes:
            self._first = first
        self._notes += keys
        if len(self._notes) >= NOTES:
            self.write()

    def end(self, rows: int) -> None:
        """Notes that the source has so many rows, all of which were noted."""
        self.write()
        with self._database.use() as conn:
            (last,) = conn.execute("select max(row) from source").fetchone()
        if last is not None and last >= rows:
            with self._database.transaction() as conn:
                conn.execute("delete from source where row >= ?", (rows,))
                _note_removal(conn)

    def write(self) -> None:
        """Writes the notes, if they differ from what stands there."""
        first, keys = self._first, self._notes
        self._notes = []
        with self._database.use() as conn:
            standing = conn.execute(
                "select key from source where row between ? and ? order by row",
                (first, first + len(keys) - 1),
            ).fetchall()
        if [key for (key,) in standing] == keys:
            return
        try:
            rows = sorted(enumerate(keys, first), key=itemgetter(1))
        except TypeError:  # integers and strings
            rows = sorted(enumerate(keys, first), key=lambda row: (isinstance(row[1], str), row[1]))
        with self._database.transaction() as conn:
            if not insert(conn, "source", rows):
                # Rows before these were noted in this run: a key found there stands twice. One
                # found at a later row has moved here.
                _refuse_twice(conn, first, keys)
                insert(conn, "source", rows, "replace")
                _note_removal(conn)


def keys_in_source(conn: sqlite3.Connection) -> str:
    """The condition that a row's key is in the source, which costs a look-up of each; true without
    one as long as no key was ever taken out.
    """
    if conn.execute("select 1 from run where name = 'keys_removed'").fetchone():
        return "exists (select 1 from source where source.key = rows.key)"
    return "true"


def _note_removal(conn: sqlite3.Connection) -> None:
    conn.execute("insert or replace into run values ('keys_removed', 'true')")


def _refuse_twice(conn: sqlite3.Connection, first: int, keys: Sequence[Key]) -> None:
    """Raises `SourceError` for a key that stands twice in the rows from `first` on, or also before
    them.
    """
    rows: dict[Key, int] = {}
    for some in windows(conn, keys):
        rows.update(
            conn.execute(
                f"select key, row from source where key in ({marks(some)}) and +row < ?",
                (*some, first),
            )
        )
    for row, key in enumerate(keys, first):
        if key in rows:
            raise SourceError(
                f"key {key!r} stands twice in the source, in rows {rows[key]} and {row} (the first "
                "row is 0); each row needs a key of its own"
            )
        rows[key] = row
