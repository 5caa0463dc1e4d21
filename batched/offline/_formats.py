"""Rows as Parquet, JSONL and CSV.

The same rows give the same bytes, however they are cut into windows: row groups and parts end by
what the rows hold, and each row group is written in one piece.

| value | Parquet | JSONL | CSV |
|---|---|---|---|
| None | null | null | an empty cell (`""` in a file of one column) |
| str | string | text | text; empty text is `""` |
| bool, int | the like | the like | `true`, `false`, digits |
| float | double | shortest exact text; `NaN`, `-Infinity` | as `repr` has it; `nan`, `-inf` |
| datetime | timestamp | ISO 8601; with a zone, in UTC as `+00:00` | the same |
| date, time | the like | ISO 8601 | the same |
| timedelta | duration | seconds | the same |
| Decimal | decimal128 | text of all digits | all digits |
| bytes | binary | base64 | the same |
| list, dict, array | list, struct, fixed_size_list | array, object | JSON |
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ._values import to_python

BLOCK_ROWS = 1_024
"""Rows after which a row group may end."""
GROUP_ROWS = 64 * BLOCK_ROWS
"""Rows of a row group; as many as DuckDB and others read at once in one thread."""
GROUP_BYTES = 16 << 20
"""Bytes, before compression, that end a row group sooner: they are held in memory."""

JSON = orjson.OPT_SERIALIZE_NUMPY
JSON_LINE = JSON | orjson.OPT_APPEND_NEWLINE

LINE_END = b"\r\n"  # RFC 4180
QUOTED = re.compile('[",\r\n]').search


class Parquet:
    """Rows as one Parquet file, or as many of bounded size; `targets` are paths, or open files that
    are left open.
    """

    def __init__(
        self,
        targets: Iterator[Any],
        schema: Any,
        most_rows: float = math.inf,
        most_bytes: float = math.inf,
    ) -> None:
        # dictionaries differ with the rows that are read together
        self._schema = pa.schema(
            [field.with_type(_without_dictionary(field.type)) for field in schema],
            schema.metadata,
        )
        # of columns of numbers the dictionary is tried in vain
        texts = [field.name for field in self._schema if _is_text(field.type)]
        self._settings = {"compression": "zstd", "use_dictionary": texts or False}
        self._targets = targets
        self._most_rows = most_rows
        self._most_bytes = most_bytes
        self._open()

    def _open(self) -> None:
        self._file: Any = pq.ParquetWriter(next(self._targets), self._schema, **self._settings)
        self._file_rows = self._file_bytes = 0
        self._group: list[Any] = []
        self._group_rows = self._group_bytes = 0

    def write(self, columns: Mapping[str, Any]) -> None:
        arrays = [_as_array(columns[field.name], field.type) for field in self._schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        start = 0
        while start < batch.num_rows:
            if self._file is None:
                self._open()
            left = min(BLOCK_ROWS - self._file_rows % BLOCK_ROWS, self._most_rows - self._file_rows)
            piece = batch.slice(start, int(min(batch.num_rows - start, left)))
            start += piece.num_rows
            self._add(piece)

    def _add(self, piece: Any) -> None:
        self._group.append(piece)
        added = sum(map(_data_bytes, piece.columns))
        self._group_bytes += added
        self._file_bytes += added
        self._group_rows += piece.num_rows
        self._file_rows += piece.num_rows
        if self._file_rows >= self._most_rows:
            self.close()
        elif self._file_rows % BLOCK_ROWS == 0:
            if self._file_bytes >= self._most_bytes:
                self.close()
            elif self._group_rows >= GROUP_ROWS or self._group_bytes >= GROUP_BYTES:
                self._end_group()

    def _end_group(self) -> None:
        # in one piece, because pages end where pieces do
        table = pa.Table.from_batches(self._group, self._schema).combine_chunks()
        self._group = []
        self._group_rows = self._group_bytes = 0
        if table.num_rows:
            self._file.write_table(table, row_group_size=table.num_rows)
            del table
            # Arrow's allocator kept 100 MB of what a million rows of text had needed
            pa.default_memory_pool().release_unused()

    def close(self) -> None:
        if self._file is not None:
            self._end_group()
            self._file.close()
            self._file = None


class Lines:
    """Rows as lines of text; `target` is a path, or an open file that is left open."""

    def __init__(
        self,
        target: Any,
        names: list[str],
        lines: Callable[[list[str], Iterator[Any]], list[bytes]],
    ) -> None:
        self._opened = isinstance(target, Path)
        self._file = target
        if self._opened:
            self._file = open(target, "wb", buffering=1 << 20)  # noqa: SIM115  # `close` does
        self._names = names
        self._lines = lines

    def write(self, columns: Mapping[str, Any]) -> None:
        values = [_as_values(columns[name]) for name in self._names]
        self._file.write(b"".join(self._lines(self._names, zip(*values, strict=True))))

    def close(self) -> None:
        if self._opened:
            self._file.close()


def json_lines(names: list[str], rows: Iterator[Sequence[Any]]) -> list[bytes]:
    lines = []
    for row in rows:
        record = dict(zip(names, row, strict=True))
        line = orjson.dumps(record, _json_value, JSON_LINE)
        if b"null" in line:  # which NaN and infinities become
            line = orjson.dumps(_with_odd_floats(record), _json_value, JSON_LINE)
        lines.append(line)
    return lines


def _with_odd_floats(value: Any) -> Any:
    """The value with NaN and infinities as the standard library writes them."""
    if isinstance(value, dict):
        return {name: _with_odd_floats(item) for name, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value if np.isfinite(value).all() else [_with_odd_floats(item) for item in value]
    if isinstance(value, (list, tuple)):
        return [_with_odd_floats(item) for item in value]
    if isinstance(value, (float, np.floating)) and not math.isfinite(value):
        name = "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        return orjson.Fragment(name)
    return value


def _json_value(value: Any) -> Any:
    """What orjson takes in place of a value that it does not know."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, np.generic):  # a key from a list of dicts, say
        return value.item()
    raise TypeError(f"a {type(value).__name__} has no form as text")


def csv_lines(names: list[str], rows: Iterator[Sequence[Any]]) -> list[bytes]:
    # a line without any character would be no row to most readers
    none = "" if len(names) > 1 else '""'
    return [
        ",".join([none if value is None else _cell(value) for value in row]).encode() + LINE_END
        for row in rows
    ]


def _cell(value: Any) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        text = value
    elif isinstance(value, bool):
        return "true" if value else "false"
    elif isinstance(value, (int, float)):
        return str(value)
    elif isinstance(value, (dict, list, tuple, np.ndarray)):
        text = orjson.dumps(_with_odd_floats(value), _json_value, JSON).decode()
    elif isinstance(value, (date, time)):
        text = value.isoformat()
    else:
        text = str(_json_value(value))
    if not text or QUOTED(text):
        return '"' + text.replace('"', '""') + '"'
    return text


def _as_array(column: Any, kind: Any) -> Any:
    if isinstance(column, list):
        return pa.array(column, kind)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column if column.type == kind else column.cast(kind)


def _as_values(column: Any) -> list[Any]:
    """Python values of a column, datetimes of nanoseconds as text."""
    if isinstance(column, list):
        return column
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
        zone = "" if column.type.tz is None else "+00:00"
        return [
            None if nanoseconds is None else _iso_format(nanoseconds, zone)
            for nanoseconds in column.cast(pa.int64()).to_pylist()
        ]
    return to_python(column)


def _iso_format(nanoseconds: int, zone: str) -> str:
    microseconds, rest = divmod(nanoseconds, 1_000)
    moment = datetime(1970, 1, 1) + timedelta(microseconds=microseconds)
    if rest:
        return f"{moment.isoformat(timespec='microseconds')}{rest:03}{zone}"
    return moment.isoformat() + zone


def _without_dictionary(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: Any) -> bool:
    types = pa.types
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(is_kind(kind) for is_kind in texts)


def _data_bytes(array: Any) -> int:
    """Bytes of the values: by what they are, not by the buffers that happen to hold them."""
    kind, types = array.type, pa.types
    if _is_text(kind):
        return pc.call_function("binary_length", [array]).sum().as_py() or 0
    if types.is_struct(kind):
        return sum(map(_data_bytes, array.flatten()))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _data_bytes(array.flatten())
    return 8 * len(array)
