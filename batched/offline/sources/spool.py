"""Spools: files that keep the rows of a source with one pass for further passes.

All rows are written when the source is opened. Values of rows keep their Python types. Tables of
Arrow may have different types, and get those that the schemas of all of them have in common.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from ...errors import SourceError
from .base import WINDOW_ROWS, ArrowSource, Rows, RowSource, gather, unify
from .errors import explain


def spool_rows(rows: Rows, name: str, path: Path) -> RowSource:
    """Write the rows of an iterator to a file, and open it."""
    count = 0
    with _writing(path) as file:
        for block in gather(rows, WINDOW_ROWS, name):
            pickle.dump(block, file, pickle.HIGHEST_PROTOCOL)
            count += len(block)

    def read() -> Rows:
        with path.open("rb") as file:
            while file.peek(1):
                yield from pickle.load(file)

    return RowSource(name, read, rows=count)


def spool_tables(tables: Iterable[Any], name: str, path: Path, limit: int) -> ArrowSource:
    """Write tables of Arrow, at most `limit` rows, to a file, and open it."""
    count = 0
    schemas: dict[Any, None] = {}
    with _writing(path) as file:
        for table in tables:
            part = table.slice(0, limit - count)
            schemas[part.schema] = None
            count += part.num_rows
            with pa.ipc.new_stream(file, part.schema) as writer:
                writer.write_table(part, WINDOW_ROWS)
            if count == limit:
                break

    def read(_: list[str]) -> Iterator[Any]:
        with path.open("rb") as file:
            while file.peek(1):
                yield from pa.ipc.open_stream(file)

    return ArrowSource(name, unify(list(schemas), name), read, rows=count)


@contextmanager
def _writing(path: Path) -> Iterator[Any]:
    """Open the file of a spool, which is deleted if it cannot be filled."""
    try:
        with path.open("wb") as file:
            yield file
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, SourceError) or not isinstance(error, Exception):
            raise
        raise SourceError(
            f"the rows cannot be kept for a second reading in {path} ({explain(error)}); make room "
            "on that disk, have progress= on another one, or pass a list of the rows"
        ) from error
