"""The SQLite database of one owner: opened, locked, with the errors of a file.

1. The connection locks the file for itself until it is closed. SQLite's lock ends with the process,
   however the process ends, and stays while the process is stopped.
2. Threads share the connection, one at a time. Nothing else opens the file: a second descriptor of
   this process, once closed, would take the locks along (POSIX). The lock may not hold on a disk of
   a network.
3. A transaction is on disk once it is committed (`synchronous`), but for the order of the source,
   which is there with the next commit of rows.
4. A file that is no progress file is read, and not written.
5. No cursor is kept in a variable: a traceback that somebody keeps would keep it, and a connection
   with a statement is not closed, so that the next run would find the file locked.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

from ...errors import RunLocked, RunMismatch

APPLICATION: Final = 0x62617463
"""Mark of a progress file in its header: "batc"."""
LAYOUT: Final = 6
"""Version of its tables."""
LOCK_S: Final = 0.2
"""Time for which the lock is waited for: of runs that open a new file together, one is to win."""
WINDOW: Final = 512
"""Values that one query looks up. SQLite takes 999 values everywhere."""
TOGETHER: Final = 64
"""Rows that one statement inserts: it takes half the time of as many statements, and the lock of
the interpreter once."""
_SETTINGS: Final = (
    "journal_mode = wal",
    "synchronous = full",
    "fullfsync = 1",  # macOS: fsync alone leaves data in the cache of the disk
    "checkpoint_fullfsync = 1",
    "secure_delete = 0",  # some systems overwrite deleted data, at the cost of a second write
    "cache_size = -8192",  # KiB
    "wal_autocheckpoint = 4096",  # pages of 4 KiB
)


class Database:
    """A progress file that this process has locked, with these tables."""

    def __init__(self, path: Path, tables: str) -> None:
        """Open the file, or make one.

        Raises `RunLocked` if another run has it, `RunMismatch` if it is no progress file or one of
        another layout, `OSError` if it cannot be opened or written.
        """
        self.path = path
        self._lock = threading.Lock()  # held by the thread that uses the connection
        try:
            self._conn = sqlite3.connect(
                path, timeout=LOCK_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.OperationalError as error:
            reason = f"no progress file can be made here ({error})"
            raise OSError(errno.ENOENT, reason, str(path)) from error
        try:
            with self.use() as conn:
                self._take_over(conn, tables)
        except BaseException:
            self._conn.close()
            raise

    def _take_over(self, conn: sqlite3.Connection, tables: str) -> None:
        names = "schema_version", "application_id", "user_version"
        try:
            conn.execute("pragma locking_mode = exclusive")
            found = [conn.execute(f"pragma {name}").fetchone()[0] for name in names]
            if found[0] and found[1:] != [APPLICATION, LAYOUT]:
                raise RunMismatch(
                    f"{self.path} is no progress file of this version of batched (layout "
                    f"{LAYOUT}); move it away, or finish with the version that wrote it"
                )
            for setting in _SETTINGS:
                conn.execute(f"pragma {setting}")
            conn.execute("begin immediate")
            if not found[0]:
                for statement in tables.split(";"):
                    conn.execute(statement)
                conn.execute(f"pragma application_id = {APPLICATION}")
                conn.execute(f"pragma user_version = {LAYOUT}")
            conn.execute("commit")
        except sqlite3.DatabaseError as error:
            if _code(error) == sqlite3.SQLITE_BUSY:
                raise RunLocked(
                    f"{self.path} is in use by another run; wait until that has ended, or end it: "
                    "its committed rows stay"
                ) from None
            if _code(error) == sqlite3.SQLITE_NOTADB:
                raise RunMismatch(f"{self.path} is no progress file; move it away") from None
            raise

    @contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection to this thread alone."""
        with self._lock:
            try:
                yield self._conn
            except sqlite3.DatabaseError as error:
                if not _code(error):  # misuse, not the file
                    raise
                number, reason = errno.EIO, "SQLite failed"
                if _code(error) == sqlite3.SQLITE_FULL:
                    number = errno.ENOSPC
                    reason = (
                        "no room; committed rows stay, and the same run goes on once there is some"
                    )
                raise OSError(number, f"{reason} ({error})", str(self.path)) from error

    @contextmanager
    def transaction(self, *, synced: bool = True) -> Iterator[sqlite3.Connection]:
        """Run the statements of this thread as one transaction.

        Unless it is `synced`, it is on disk only with the next one that is.
        """
        with self.use() as conn:
            conn.execute(f"pragma synchronous = {'full' if synced else 'normal'}")
            conn.execute("begin immediate")
            try:
                yield conn
                conn.execute("commit")
            except BaseException:
                if conn.in_transaction:  # some errors have ended it
                    conn.execute("rollback")
                raise

    def close(self) -> None:
        """Close the file, and release its lock."""
        with self._lock:
            self._conn.close()


def insert(
    conn: sqlite3.Connection, table: str, rows: Sequence[Sequence[Any]], conflict: str = "ignore"
) -> bool:
    """Insert rows, and return whether none stood there; `conflict` lets them stay, or replaces."""
    if not rows:
        return True
    statement = f"insert or {conflict} into {table} values "
    row = f"({marks(rows[0])})"
    inserted, whole = 0, len(rows) - len(rows) % TOGETHER
    for first in range(0, whole, TOGETHER):
        values = list(chain.from_iterable(rows[first : first + TOGETHER]))
        inserted += conn.execute(statement + ",".join([row] * TOGETHER), values).rowcount
    if rest := rows[whole:]:
        inserted += conn.executemany(statement + row, rest).rowcount
    return inserted == len(rows)


def marks(values: Sequence[Any]) -> str:
    """Return a question mark for each value."""
    return ",".join("?" * len(values))


def windows(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the values in parts that one query can look up."""
    for first in range(0, len(values), WINDOW):
        yield values[first : first + WINDOW]


def _code(error: sqlite3.DatabaseError) -> int:
    """Return the primary result code of SQLite; 0 if the error is not SQLite's."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF
