"""Rows as they are read: sources, their windows, and values as Python objects.

- A row is named by its number in the source, counted from 0, in every message. Where lines can be
  told (JSONL), the line and its file are named besides.
- A column that a source is known to lack is refused before anything is read. Rows of JSONL and
  dicts may have columns of their own: one in `required` that a row lacks is refused with the row,
  any other is None there.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ..errors import SourceError
from ._arrow import cast, to_python, without_views

if TYPE_CHECKING:
    from ._files import Files

__all__ = [
    "WINDOW_BYTES",
    "WINDOW_ROWS",
    "ArrowSource",
    "RowSource",
    "Source",
    "Window",
    "missing_column",
    "row_name",
    "shorten",
]

WINDOW_ROWS = 2048
"""Rows read at once, at most."""

WINDOW_BYTES = 64 << 20
"""Bytes of text and binary values after which a window ends though it has room for more rows."""

_PRINTER = reprlib.Repr()
_PRINTER.maxstring = _PRINTER.maxother = _PRINTER.maxlong = 80


def shorten(value: object) -> str:
    """The value as messages have it: its `repr`, cut in the middle where it is long."""
    return _PRINTER.repr(value)


def row_name(number: int) -> str:
    """A row as messages have it."""
    return f"row {number} (counted from 0)"


@dataclass
class Window:
    """Rows of a source that follow each other, column by column."""

    first: int
    """Number of the first row in the source."""
    size: int
    """Rows."""
    columns: Mapping[str, Any]
    """Arrow arrays where the source is Arrow's, else lists of Python values."""
    where: Callable[[int], str] = row_name
    """Name of the row with a given number in the source, for messages."""
    _values: dict[str, list[Any]] = field(default_factory=dict, repr=False)

    def values(self, name: str) -> list[Any]:
        """The column as Python objects; not to be changed. `SourceError` names the row whose value
        Python has no equal for.
        """
        if (values := self._values.get(name)) is None:
            column = self.columns[name]
            if not isinstance(column, list):
                column = self._convert(name, column)
            values = self._values[name] = column
        return values

    def _convert(self, name: str, array: Any) -> list[Any]:
        try:
            return to_python(array)
        except (pa.ArrowException, ValueError, OverflowError):
            for place in range(len(array)):
                try:
                    to_python(array.slice(place, 1))
                except (pa.ArrowException, ValueError, OverflowError) as error:
                    raise SourceError(
                        f"{self.where(self.first + place)}: the value in column {name!r}, of type "
                        f"{array.type}, has no equal in Python ({error}); cast the column first, "
                        "for instance to timestamp[us] or to int64"
                    ) from error
            raise


def missing_column(name: str, place: str, names: Sequence[str]) -> SourceError:
    """The error for a column that `place`, which has the columns `names`, lacks."""
    close = get_close_matches(name, names, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    there = ", ".join(repr(known) for known in names) or "none"
    return SourceError(f"{place} has no column {name!r}; its columns are {there}{hint}")


class Source:
    """Rows that can be read from the start any number of times, in the same order each time."""

    name: str
    """Path or kind of object, for messages."""
    files: Files | None = None
    """Files that it reads, if it reads any."""
    columns: list[str] | None = None
    """Names of the columns; None if only the rows know."""
    rows: int | None = None
    """Number of rows; None if it is known only once they have been read."""

    def windows(
        self,
        columns: Sequence[str] | None,
        size: int = WINDOW_ROWS,
        *,
        required: Sequence[str] | None = None,
    ) -> Iterator[Window]:
        """All rows from the first on, at most `size` at once, with these columns (None: all).

        A row that lacks a column in `required` (None: in `columns`) is refused.
        """
        if self.columns is not None:
            for column in {**dict.fromkeys(columns or ()), **dict.fromkeys(required or ())}:
                if column not in self.columns:
                    raise missing_column(column, self.name, self.columns)
        return self._windows(columns, size, columns if required is None else required)

    def _windows(
        self, columns: Sequence[str] | None, size: int, required: Sequence[str] | None
    ) -> Iterator[Window]:
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """`SourceError` if files are not as they were when the source was opened."""
        if self.files:
            self.files.check_unchanged()

    def close(self) -> None:
        """The end of all reading; what it needed to keep is deleted."""


class RowSource(Source):
    """Rows that come as dicts."""

    def _rows(self) -> Iterator[Any]:
        raise NotImplementedError

    def _row_name(self, number: int) -> str:
        return row_name(number)

    def _windows(
        self, columns: Sequence[str] | None, size: int, required: Sequence[str] | None
    ) -> Iterator[Window]:
        first = 0
        for rows in self._blocks(self._rows(), size):
            names = dict.fromkeys(chain.from_iterable(rows) if columns is None else columns)
            self._check(rows, first, names, required or ())
            data = {name: [row.get(name) for row in rows] for name in names}
            yield Window(first, len(rows), data, self._row_name)
            first += len(rows)

    def _check(
        self,
        rows: list[Mapping[str, Any]],
        first: int,
        names: Mapping[str, None],
        required: Sequence[str],
    ) -> None:
        for name in names:
            if not isinstance(name, str):
                place = next(place for place, row in enumerate(rows) if name in row)
                raise SourceError(
                    f"{self._row_name(first + place)}: the name of a column is {shorten(name)}, a "
                    f"{type(name).__name__}; names are strings"
                )
        for name in required:
            for place, row in enumerate(rows):
                if name not in row:
                    raise missing_column(name, self._row_name(first + place), list(row))

    def _blocks(self, rows: Iterable[Any], size: int) -> Iterator[list[Mapping[str, Any]]]:
        block: list[Mapping[str, Any]] = []
        held = 0
        for number, row in enumerate(rows):
            if type(row) is not dict and not isinstance(row, Mapping):
                raise SourceError(
                    f"{self._row_name(number)} of {self.name}: a row is a dict of columns, not "
                    f"{shorten(row)}, a {type(row).__name__}"
                )
            block.append(row)
            held += _weight(row)
            if len(block) == size or held >= WINDOW_BYTES:
                yield block
                block, held = [], 0
        if block:
            yield block


def _weight(row: Mapping[str, Any]) -> int:
    """Bytes of the values that may be large, roughly."""
    held = 0
    for value in row.values():
        kind = type(value)
        if kind is str or kind is bytes:
            held += len(value)
        elif kind not in _SMALL:
            held += getattr(value, "nbytes", 0)
    return held


_SMALL = {int, float, bool, type(None), list, dict}


class ArrowSource(Source):
    """Rows that come as Arrow's record batches; one type for each column."""

    schema: Any
    """Arrow's schema of all columns."""

    def _use(self, schema: Any) -> None:
        self.schema = pa.schema([part.with_type(without_views(part.type)) for part in schema])
        self.columns = schema.names
        if twice := [name for name in schema.names if schema.names.count(name) > 1]:
            raise SourceError(f"{self.name} has two columns {twice[0]!r}; names must differ")

    def _batches(self, columns: Sequence[str]) -> Iterator[Any]:
        raise NotImplementedError

    def _windows(
        self, columns: Sequence[str] | None, size: int, required: Sequence[str] | None
    ) -> Iterator[Window]:
        del required  # all columns are known, and `windows` has checked them
        names = list(dict.fromkeys(self.schema.names if columns is None else columns))
        first = 0
        read = names or self.schema.names[:1]  # a table without columns has no rows
        for pieces in _regroup(self._batches(read), size):
            table = pa.Table.from_batches(pieces)
            data = {name: table.column(name).combine_chunks() for name in names}
            rows = table.num_rows
            yield Window(first, rows, data)
            first += rows


def _regroup(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Batches cut and gathered to groups of `size` rows, or fewer where these are large."""
    pieces: list[Any] = []
    rows, room = 0, WINDOW_BYTES
    for batch in batches:
        offset = 0
        while offset < batch.num_rows:
            piece = _plain(batch.slice(offset, size - rows))
            if is_full := piece.nbytes > room:
                piece = piece.slice(0, max(1, piece.num_rows * room // piece.nbytes))
            pieces.append(piece)
            offset += piece.num_rows
            rows += piece.num_rows
            room -= piece.nbytes
            if is_full or rows == size:
                yield pieces
                pieces, rows, room = [], 0, WINDOW_BYTES
    if pieces:
        yield pieces


def _plain(batch: Any) -> Any:
    arrays = [cast(array, without_views(array.type)) for array in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)
