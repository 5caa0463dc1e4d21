"""Progress files of tests: commits with values that follow from their keys, and queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batched.offline.progress.commit import Commit, Key, letter_text
from batched.offline.progress.store import Progress
from batched.offline.types.columns import Columns


def value(key: Key, step: int = 0) -> str:
    return f"{key!r} of step {step}"


def done(keys: Sequence[Key], step: int = 0, note: str = "") -> Commit:
    return results(keys, [value(key, step) + note for key in keys], step)


def results(keys: Sequence[Key], values: Sequence[Any], step: int = 0) -> Commit:
    read = Columns(["out"]).read(values)
    assert not read.misfits
    return Commit(step, [(key, 7) for key in keys], read)


def failed(keys: Sequence[Key], step: int = 0) -> Commit:
    error = letter_text("inference", "ValueError: bad row", "File ...", 3)
    return Commit(step, ended=[(key, 7, error) for key in keys])


def outputs(progress: Progress, keys: Sequence[Key]) -> dict[tuple[Key, int], Any]:
    return {
        at: progress.chunk(row.chunk)[0][row.place]
        for at, row in progress.committed(keys).items()
        if row.chunk is not None and row.place is not None
    }


def query(progress: Progress, statement: str) -> list[tuple[Any, ...]]:
    with progress.use() as conn:
        return conn.execute(statement).fetchall()
