"""Opening of sources: everything that `offline.run` accepts as rows.

A source is read from the start as often as needed, in windows of bounded size, always in the same
order. `files` finds paths, `text` and `tables` read them; `objects` reads objects.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import SourceError
from ..types.values import show
from .base import Fault, Rows, RowSource, Source
from .files import TABLE, find_files
from .keys import keys_of
from .objects import open_object
from .spool import spool_rows
from .text import Text, TextSource, read_json


@dataclass(frozen=True)
class Exploded:
    """A source whose rows are the elements of a list column of another source."""

    source: Any
    column: str
    key: str | None = None


def explode(source: Any, column: str, *, key: str | None = None) -> object:
    """Return a source that has a row for each element of a list, for instance for each chunk.

    A row has the columns of its row in `source`, with the element in place of the list, and two
    more: `place`, which is counted from 0, and `key`, the JSON text of `[key, place]`. So the run
    has `key="key"`. An empty list gives no row. A list that is null is a dead letter.

    Args:
        source: a source of any kind.
        column: the column of lists.
        key: the column that identifies the rows of `source`; None: their number.
    """
    return Exploded(source, column, key)


def open_source(source: object, *, spool: Path, limit: int | None = None) -> Source:
    """Open paths, a glob, a folder, a URI, "-" (JSON lines of standard input), or an object.

    `spool` is a file for the rows of a source with one pass. `close` deletes it. `limit` is the
    number of rows that are read at most.
    """
    most = sys.maxsize if limit is None else limit
    opened = _open(source, spool, most)
    opened.spool, opened.limit = spool, most
    opened.rows = opened.rows and min(opened.rows, most)
    opened.estimate = opened.estimate and min(opened.estimate, most)
    return opened


def _open(source: Any, spool: Path, limit: int) -> Source:
    if isinstance(source, str) and source == "-":
        rows = islice(read_json("<stdin>", sys.stdin.buffer), limit)
        return spool_rows(rows, "standard input", spool)
    if isinstance(source, Exploded):
        return _open_exploded(source, _open(source.source, spool, sys.maxsize))
    form = source if isinstance(source, Text) else None
    source = form.paths if form else source
    given: Any = source if isinstance(source, list | tuple) else [source]
    if not given or not all(isinstance(path, str | os.PathLike) for path in given):
        return open_object(source, spool, limit)
    files = find_files(list(map(os.fspath, given)))
    if form is None and files.format == TABLE:
        from .tables import open_tables  # loads pandas, which takes long

        return open_tables(files)
    return TextSource(files, form or Text(source, files.format))


def _open_exploded(given: Exploded, source: Source) -> Source:
    required = [given.column, *filter(None, [given.key])]

    def read() -> Rows:
        for window in source.windows(None, required=required):
            columns = {name: window.values(name) for name in window.columns}
            if taken := {"key", "place"} & columns.keys():
                raise SourceError(f"{source.name} has a column {min(taken)!r}; rename it first")
            keys = keys_of(window, given.key)
            for at, parts in enumerate(columns[given.column]):
                row = {name: values[at] for name, values in columns.items()}
                if why := window.faults.get(at):
                    yield Fault(why)
                elif not isinstance(parts, list | tuple | np.ndarray):
                    yield Fault(f"column {given.column!r} holds {show(parts)} in place of a list")
                else:
                    for place, part in enumerate(parts):
                        key = json.dumps([keys[at], place], ensure_ascii=False)
                        yield {**row, given.column: part, "place": place, "key": key}

    opened = RowSource(source.name, read, files=source.files)
    opened.form = f"{given.column} {given.key} {source.form}"
    return opened
