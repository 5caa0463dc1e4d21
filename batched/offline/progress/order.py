"""The order of the present source: its keys by row, in the progress file.

Each window of the source is one transaction, before any of its rows is computed. Rows of the table
before the present window belong to this run; later rows may belong to an earlier run, and do not
make a key stand twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from .commit import Key
from .database import Database, insert, marks, windows


class SourceOrder:
    """The table `source`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def note(self, first: int, keys: Sequence[Key | None]) -> list[int]:
        """Note keys of the source from row `first` on; return the places of keys noted before.

        Callers note all keys, in order, and then call `end`. The second row of a key is noted
        without a key, as is a row that has none.
        """
        twice: list[int] = []
        noted = list(keys)
        last = first + len(noted) - 1
        with self._database.transaction(synced=False) as conn:
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

    def end(self, rows: int) -> None:
        """Note that the source has so many rows, all of which were noted.

        Drop failed rows that the source no longer has: their dead letters are of no use.
        """
        with self._database.transaction() as conn:
            conn.execute("delete from source where row >= ?", (rows,))
            conn.execute(
                "delete from rows where status = 'failed' and "
                "not exists (select 1 from source where source.key = rows.key)"
            )
