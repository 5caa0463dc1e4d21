"""The order of the present source: its keys by row, in the progress file.

1. The table is written only where it differs from the source, in thousands of rows at a time. They
   are sorted by key: each page of the index of keys is then written once.
2. Rows of the table before the first note belong to this run. Later rows may belong to an earlier
   run, and do not make a key stand twice.
3. Each commit saves the notes that are not in the table yet, as text in the table `noted`. So after
   a kill the order of all committed rows is known.
4. Row numbers as keys are never looked up. Any other key is looked up only if another key of this
   run may have the same hash, in a table of fixed size.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from typing import Final

import numpy as np

from .commit import Key
from .database import Database, insert, marks, windows

NOTES: Final = 32_768
"""Rows of the source that one transaction writes. Of a million keys in random order each costs 5 us
then, and 13 if they are written in windows of 2,048."""
SLOTS: Final = 2**24
"""Hashes of the table. Of 1 million keys 3 % are looked up, of 10 million 25 %, at 5 us."""


class SourceOrder:
    """The table `source`, and the notes of one run that are to be written to it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._notes: list[Key | None] = []  # keys to be written, from row `_first` on
        self._first = 0
        self._saved = 0  # number of them that are in the table `noted`
        self._numbered = True  # all keys of this run are the numbers of their rows
        # by hash, whether this run had a key with it; takes memory only where it is written
        self._seen = np.zeros(SLOTS, bool)
        self._recover()

    def note(self, first: int, keys: Sequence[Key | None]) -> list[int]:
        """Note keys of the source from row `first` on; return the places of keys noted before.

        Callers note all keys, in order, and then call `end`. The second row of a key is noted
        without a key, as is a row that has none.
        """
        twice: list[int] = []
        if self._numbered and keys != list(range(first, first + len(keys))):
            self._numbered = False
            self._seen[:first] = True  # the hash of a row number is that number
        if not self._numbered:
            known = self._find(keys)
            if known or len({*keys}) < len(keys):
                keys = [*keys]
                for place, key in enumerate(keys):
                    if key in known and key is not None:
                        twice.append(place)
                        keys[place] = None
                    known.add(key)
        self._notes += keys
        if len(self._notes) >= NOTES:
            self.write()
        return twice

    def _find(self, keys: Sequence[Key | None]) -> set[Key | None]:
        """Return the keys among these that were noted before."""
        slots = np.fromiter(map(hash, keys), np.int64, len(keys)) & (SLOTS - 1)
        doubtful = [keys[place] for place in np.flatnonzero(self._seen[slots]).tolist()]
        self._seen[slots] = True
        known = set(self._notes).intersection(doubtful) if doubtful else set[Key | None]()
        with self._database.use() as conn:
            for some in windows(doubtful):
                statement = f"select key from source where key in ({marks(some)}) and +row < ?"
                known.update([key for (key,) in conn.execute(statement, (*some, self._first))])
        return known

    def end(self, rows: int) -> None:
        """Note that the source has so many rows, all of which were noted.

        Drop failed rows that the source no longer has: their dead letters are of no use.
        """
        self.write()
        with self._database.transaction() as conn:
            conn.execute("delete from source where row >= ?", (rows,))
            conn.execute(
                "delete from rows where status = 'failed' and "
                "not exists (select 1 from source where source.key = rows.key)"
            )

    def save(self, conn: sqlite3.Connection) -> None:
        """Save the notes of which no trace is in the file, in a transaction of the caller."""
        if new := self._notes[self._saved :]:
            row = self._first + self._saved
            conn.execute("insert into noted values (?, ?)", (row, json.dumps(new)))
            self._saved += len(new)

    def write(self) -> None:
        """Write the notes, if they differ from the table."""
        first, notes = self._first, self._notes
        inside, bounds = "from source where row between ? and ?", (first, first + len(notes) - 1)
        with self._database.transaction() as conn:
            standing = conn.execute(f"select key {inside} order by row", bounds).fetchall()
            if [key for (key,) in standing] != notes:
                if standing:
                    conn.execute(f"delete {inside}", bounds)
                rows = list(enumerate(notes, first))
                with suppress(TypeError):  # of integers and strings
                    rows.sort(key=itemgetter(1))
                # a key may have moved here from a later row
                insert(conn, "source", rows, "replace")
            if self._saved:
                conn.execute("delete from noted")
            # in the transaction: a commit in another thread must not save these notes again
            self._notes, self._first, self._saved = [], first + len(notes), 0

    def _recover(self) -> None:
        """Write the notes that a killed run has saved."""
        with self._database.use() as conn:
            saved = conn.execute("select row, keys from noted order by row").fetchall()
        if saved:
            self._first = saved[0][0]
            self._notes = list(chain.from_iterable([json.loads(keys) for _, keys in saved]))
            self._saved = len(self._notes)
            self.write()
            self._first = 0
