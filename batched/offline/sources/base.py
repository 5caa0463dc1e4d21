"""Sources, their windows of rows, and values as Python objects.

1. A row is named by its number in the source, counted from 0; a line of text that cannot be read,
   by its file and line, too.
2. A row that cannot be read is a fault of its window. It keeps its number, and the values of the
   columns that it has.
3. A source is refused if it has several rows and none of the first window can be read.
4. A column that the source is known to lack is refused before any row is read. Rows of JSON and
   dicts have columns of their own: a row that lacks a required one is a fault.
5. Lists of numbers in Arrow columns become numpy arrays that can be written to. A list with a null
   in it stays a list.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from ...errors import SourceError
from ..types.arrow import plain_schema, to_python
from ..types.values import show
from .errors import check_names, explain, lack, missing_column, refusing, row_name
from .files import Files

WINDOW_ROWS: Final = 2048
"""Rows of a window, at most."""

WINDOW_BYTES = 64 << 20
"""Bytes of values after which a window ends, though it has room for more rows."""

Rows = Iterator[Any]
"""Rows, each a mapping or a `Fault`."""


class Fault(str):
    """Reason why a row cannot be read, in place of the row."""

    __slots__ = ()


@dataclass
class Window:
    """Consecutive rows of a source, column by column."""

    first: int
    """Number of the first row in the source."""
    size: int
    """Rows."""
    columns: Mapping[str, Any]
    """Arrow arrays if the source is Arrow's, else lists of Python values."""
    faults: dict[int, str] = field(default_factory=dict)
    """Sentence for each row that cannot be read, by its place in the window."""
    _values: dict[str, list[Any]] = field(default_factory=dict, repr=False)

    def check(self, source: str) -> None:
        """Raise a SourceError if these are the first rows of the source, and none can be read."""
        if not self.first and len(self.faults) == self.size > 1:
            raise SourceError(f"no row of {source} can be read: {self.faults[0]}")

    def values(self, name: str) -> list[Any]:
        """Return a column as Python objects, which must not be changed.

        A value that Python has no equal for is None, and a fault of its row.
        """
        if name not in self._values:
            column = self.columns[name]
            if not isinstance(column, list):
                column = self._convert(name, column)
            self._values[name] = column
        return self._values[name]

    def _convert(self, name: str, array: Any, place: int = 0) -> list[Any]:
        try:
            return to_python(array)
        except Exception as error:
            if len(array) > 1:
                return [self._convert(name, array.slice(at, 1), at)[0] for at in range(len(array))]
            self.note_fault(
                place,
                f"the value in column {name!r}, of type {array.type}, has no equal in Python "
                f"({explain(error)}); cast the column first, for instance to timestamp[us] or to "
                "int64",
            )
            return [None]

    def note_fault(self, place: int, reason: str) -> None:
        """Record why the row at a place cannot be read; its first reason stays."""
        self.faults.setdefault(place, f"{row_name(self.first + place)}: {reason}")


class Source:
    """Rows that can be read from the start any number of times, in the same order each time."""

    columns: list[str] | None = None
    """Names of the columns; None if only the rows know."""
    limit: int = sys.maxsize
    """Number of rows that are read at most."""
    schema: Any = None
    """Arrow's schema of all columns; None if rows are Python's."""
    estimate: int | None = None
    """Number of rows, estimated when the source was opened; None without an estimate."""
    form: str = ""
    """Settings by which files are read."""
    spool: Path | None = None
    """File that `close` deletes if it is there."""
    _windows: Callable[..., Iterator[Window]]

    def __init__(self, name: str, rows: int | None = None, files: Files | None = None) -> None:
        self.name = name
        """Path or kind of object, for messages."""
        self.rows = rows
        """Number of rows; None until it is known."""
        self.files = files
        """Files that the source reads, if it reads any."""

    def windows(
        self,
        columns: Sequence[str] | None,
        size: int = WINDOW_ROWS,
        *,
        required: Sequence[str] | None = None,
    ) -> Iterator[Window]:
        """Read all rows from the first on, at most `size` at once, with `columns` (None: all).

        A row that lacks a column in `required` (None: in `columns`) is a fault.
        """
        needed = columns or () if required is None else required
        known = self.columns
        for column in (*(columns or ()), *needed):
            if known is not None and column not in known:
                raise missing_column(column, self.name, known)
        return self._windows(columns, size, needed)

    def close(self) -> None:
        """Delete the spool, if there is one."""
        if self.spool:
            self.spool.unlink(missing_ok=True)

    def check_unchanged(self) -> None:
        """Raise `SourceError` if files changed since the source was opened."""
        if self.files:
            self.files.check_unchanged()


class RowSource(Source):
    """Rows that come as dicts."""

    def __init__(self, name: str, read: Callable[[], Rows], **about: Any) -> None:
        """Make a source; `read` reads all rows from the first on, `about` goes to `Source`."""
        super().__init__(name, **about)
        self._read = read

    def _windows(
        self, columns: Sequence[str] | None, size: int, required: Sequence[str]
    ) -> Iterator[Window]:
        first = 0
        for rows in gather(islice(self._read(), self.limit), size, self.name):
            window = Window(first, len(rows), {})
            for place, row in enumerate(rows):
                if why := _fault(row, required):
                    window.note_fault(place, why)
                    if not isinstance(row, Mapping):
                        rows[place] = {}
            # a window of nothing but faults has the required columns, too
            every = chain(chain.from_iterable(rows), required)
            names = dict.fromkeys(every if columns is None else columns)
            window.columns = {name: [row.get(name) for row in rows] for name in names}
            first += len(rows)
            yield window
        self.rows = first


def _fault(row: Any, required: Sequence[str]) -> str | None:
    if isinstance(row, Fault):
        return row
    if not isinstance(row, dict | Mapping):
        return f"a row is a dict of columns, not {show(row)}"
    lacking = [name for name in required if name not in row]
    return lack(lacking[0], list(map(str, row))) if lacking else None


def gather(rows: Rows, size: int, name: str) -> Iterator[list[Any]]:
    """Gather rows to lists of `size`, or to shorter lists where rows are large."""
    block: list[Any] = []
    first = held = 0
    with refusing(lambda: f"{row_name(first + len(block))} of {name}"):
        for row in rows:
            block.append(row)
            held += _weight(row)
            if len(block) == size or held >= WINDOW_BYTES:
                yield block
                first += len(block)
                block, held = [], 0
    if block:
        yield block


def _weight(value: Any) -> int:
    """Return the bytes of the parts of a value that may be large, roughly."""
    if isinstance(value, dict):
        return sum(map(_weight, value.values()))
    if isinstance(value, list | tuple) and not isinstance(next(iter(value), 0), int | float):
        return sum(map(_weight, value))
    return getattr(value, "nbytes", 0) or sys.getsizeof(value)


class ArrowSource(Source):
    """Rows that come as Arrow's record batches, with one type for each column."""

    def __init__(
        self, name: str, schema: Any, read: Callable[[list[str]], Iterable[Any]], **about: Any
    ) -> None:
        """Make a source; `read` reads record batches of columns, `about` goes to `Source`."""
        super().__init__(name, **about)
        self._read = read
        self.schema = plain_schema(schema)
        self.columns = self.schema.names
        check_names(name, schema.names)

    def _windows(
        self, columns: Sequence[str] | None, size: int, required: Sequence[str]
    ) -> Iterator[Window]:
        del required  # all columns are known, and `windows` has checked them
        names = list(dict.fromkeys(self.schema.names if columns is None else columns))
        read = names or self.schema.names[:1]  # a table without columns has no rows
        schema = pa.schema([self.schema.field(name) for name in read])
        first = 0
        with refusing(lambda: f"{row_name(first)} of {self.name}, or one soon after it,"):
            for whole in self._read(read):
                batch = conform(whole.slice(0, self.limit - first), schema)
                room = batch.num_rows * WINDOW_BYTES // max(1, batch.nbytes)
                step = max(1, min(size, room))
                for offset in range(0, batch.num_rows, step):
                    part = batch.slice(offset, step)
                    yield Window(first, part.num_rows, {name: part.column(name) for name in names})
                    first += part.num_rows
                if first == self.limit:
                    return


def unify(schemas: Sequence[Any], name: str) -> Any:
    """Return the schema that takes the values of all schemas; text and bytes have none."""
    with refusing(lambda: name):
        plain = [pa.schema([]), *map(plain_schema, schemas)]
        found = pa.unify_schemas(plain, promote_options="permissive")
    for each in chain.from_iterable(schemas):
        now = found.field(each.name).type
        if "string" in str(each.type) and "string" not in str(now):
            raise SourceError(f"{name} has text and {now} in the column {each.name!r}")
    return found


def conform(batch: Any, schema: Any) -> Any:
    """Return a batch with the columns of a schema; a missing one is null."""
    arrays = [
        batch.column(each.name).cast(each.type)
        if each.name in batch.schema.names
        else pa.nulls(batch.num_rows, each.type)
        for each in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
