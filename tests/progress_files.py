"""Progress files of tests: commits of whose outputs the key tells all, and a look at the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batched.offline._commit import Commit, Key
from batched.offline._progress import Progress


def value(key: Key, step: int = 0) -> str:
    """The output of that row."""
    return f"{key!r} of step {step}"


def done(keys: Sequence[Key], step: int = 0, hashed: int = 7, note: str = "") -> Commit:
    """A commit of rows that are done."""
    batch = pa.RecordBatch.from_pydict({"out": [value(key, step) + note for key in keys]})
    return Commit(step, [(key, hashed, 1) for key in keys], batch, [])


def failed(keys: Sequence[Key], step: int = 0, hashed: int = 7) -> Commit:
    """A commit of rows that failed."""
    error = '{"phase": "inference", "error": "ValueError: bad row", "traceback": "File ..."}'
    return Commit(step, [], None, [(key, hashed, 3, error) for key in keys])


def outputs(progress: Progress, keys: Sequence[Key]) -> dict[tuple[Key, int], Any]:
    """Outputs that are committed of these keys, by key and step."""
    return {
        at: progress.chunk(row.chunk).column("out")[row.place].as_py()
        for at, row in progress.committed(keys).items()
        if row.chunk is not None
    }


def query(progress: Progress, statement: str) -> list[tuple[Any, ...]]:
    """What the database answers."""
    with progress._database.use() as conn:
        return conn.execute(statement).fetchall()


def log_of(path: Path) -> Path:
    """The write-ahead log of a database."""
    return path.with_name(f"{path.name}-wal")
