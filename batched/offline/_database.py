"""The SQLite database of one owner: opened, locked, fenced, and its errors those of a file.

1. The connection locks the file for itself until it is closed. SQLite's lock ends with the process,
   however that ends, and stays while it is stopped.
2. Threads share that connection, one at a time. Nothing else opens the file: a second descriptor of
   this process, once closed, would take the locks along (POSIX).
3. A transaction is on disk once it is committed (`synchronous`), and begins by confirming its owner
   (`_owner.py`).
4. A file that is none of ours is read, and not written.
5. No cursor is kept in a variable: a traceback that somebody keeps would keep it, and a connection
   with a statement is not closed, so that the next run would find the file locked.
"""

from __future__ import annotations

import errno
import sqlite3
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

from ..errors import RunLocked, RunMismatch
from ._owner import Owner, describe_owner

APPLICATION: Final = 0x62617463
"""Mark of a progress file in its header: "batc"."""
LAYOUT: Final = 1
"""Version of its tables."""
LOCK_S: Final = 0.2
"""Time for which the lock is waited for: of runs that open a new file together, one is to win."""
WINDOW: Final = 2048
"""Values that one query looks up."""
TOGETHER: Final = 64
"""Rows that one statement inserts: it takes half the time of as many statements, and the lock of
the interpreter once. SQLite takes 999 values everywhere."""
_SETTINGS: Final = (
    "journal_mode = wal",
    "synchronous = full",
    "fullfsync = 1",  # macOS: fsync alone leaves data in the cache of the disk
    "checkpoint_fullfsync = 1",
    "secure_delete = 0",  # some systems overwrite what is deleted, which costs as much again
    "cache_size = -8192",  # KiB
    "wal_autocheckpoint = 4096",  # pages of 4 KiB
)
_OS_ERRORS: Final = {
    sqlite3.SQLITE_FULL: (
        errno.ENOSPC,
        "no room; what is committed stays, and the same run goes on once there is some",
    ),
    sqlite3.SQLITE_READONLY: (errno.EROFS, "cannot be written"),
}
_never_closed: list[sqlite3.Connection] = []


class Database:
    """A progress file that this process has locked, with these tables."""

    def __init__(self, path: Path, tables: str) -> None:
        """Opens the file, or makes one.

        Raises `RunLocked` if another run has it, `RunMismatch` if it is no progress file or one of
        a newer layout, `OSError` if it cannot be opened or written.
        """
        self.path = path
        self._owner = Owner(path)
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
        try:
            conn.execute("pragma locking_mode = exclusive")
            new = self._check(conn)
            for setting in _SETTINGS:
                conn.execute(f"pragma {setting}")
            conn.execute("begin immediate")
            self._owner.take_over()
            if new:
                for statement in tables.split(";"):
                    conn.execute(statement)
                conn.execute(f"pragma application_id = {APPLICATION}")
                conn.execute(f"pragma user_version = {LAYOUT}")
            conn.execute("commit")
        except sqlite3.DatabaseError as error:
            if _code(error) == sqlite3.SQLITE_BUSY:
                raise RunLocked(
                    f"{self.path} is in use by {describe_owner(self.path)}; wait until that has "
                    "ended, or end it: what it has committed stays"
                ) from None
            if _code(error) == sqlite3.SQLITE_NOTADB:
                raise RunMismatch(f"{self.path} is no progress file; move it away") from None
            raise

    def _check(self, conn: sqlite3.Connection) -> bool:
        """True for a new file; raises `RunMismatch` for one that this version cannot use."""
        (tables,) = conn.execute("select count(*) from sqlite_master").fetchone()
        (application,) = conn.execute("pragma application_id").fetchone()
        (layout,) = conn.execute("pragma user_version").fetchone()
        if not tables:
            return True
        if application != APPLICATION:
            raise RunMismatch(f"{self.path} is a database, but no progress file; move it away")
        if layout > LAYOUT:
            raise RunMismatch(
                f"{self.path} was written by a newer version of batched (layout {layout}; this one "
                f"knows {LAYOUT}); update batched, or move the file away"
            )
        return False

    @contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        """The connection, for this thread alone."""
        with self._lock:
            try:
                yield self._conn
            except sqlite3.DatabaseError as error:
                if not _code(error):  # misuse, not the file
                    raise
                number, reason = _OS_ERRORS.get(_code(error), (errno.EIO, "SQLite failed"))
                raise OSError(number, f"{reason} ({error})", str(self.path)) from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection, for this thread alone; all that it does is committed, or nothing.

        Raises `RunLocked` if another process has taken over.
        """
        with self.use() as conn:
            self._owner.confirm()
            conn.execute("begin immediate")
            try:
                yield conn
                conn.execute("commit")
            except BaseException:
                if conn.in_transaction:  # some errors have ended it
                    conn.execute("rollback")
                raise

    def close(self) -> None:
        """Gives the file back."""
        with self._lock:
            if self._owner.leave():
                self._conn.close()
            elif sys.version_info >= (3, 12):
                # SQLite would write back, and delete, a log that is another process's by now.
                self._conn.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE)
                self._conn.close()
            else:
                _never_closed.append(self._conn)


def insert(
    conn: sqlite3.Connection, table: str, rows: Sequence[Sequence[Any]], conflict: str = "ignore"
) -> bool:
    """Inserts rows; False if some stood there, which `conflict` lets stay, or replaces."""
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
    return ",".join("?" * len(values))


def windows(conn: sqlite3.Connection, values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    size = min(WINDOW, conn.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER) - 1)  # and one more
    for first in range(0, len(values), size):
        yield values[first : first + size]


def _code(error: sqlite3.DatabaseError) -> int:
    """Primary result code of SQLite; 0 if the error is not SQLite's."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF
