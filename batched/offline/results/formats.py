"""Rows as Parquet, JSONL and CSV.

| value | Parquet | JSONL | CSV |
|---|---|---|---|
| None | null | null | an empty cell (`""` in a file of one column) |
| str | string | text | text; empty text is `""` |
| bool, int | the same | the same | `true`, `false`, digits |
| float | double | shortest exact text; `NaN`, `-Infinity` | its `repr`; `nan`, `-inf` |
| datetime | timestamp | ISO 8601; with a zone, in UTC as `+00:00` | the same |
| date, time | the same | ISO 8601 | the same |
| timedelta | duration | seconds | the same |
| Decimal | decimal128 | text of all digits | all digits |
| bytes | binary | base64 | the same |
| UUID, path | text | text | the same |
| interval of Arrow | none | ISO 8601, as P1M2DT0.5S | the same |
| list, dict, array | list, struct, fixed_size_list | array, object | JSON |
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from math import isfinite
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from ..types.values import read

GROUP_ROWS: Final = 65_536
"""Rows that end a row group."""
GROUP_BYTES: Final = 16 << 20
"""Bytes, before compression, that end a row group sooner: they are held in memory."""
PART_ROWS: Final = 1_000_000
"""Rows that end a file of a folder, at the end of a row group."""
PART_BYTES: Final = 1 << 30
"""Bytes, before compression, that end a file of a folder sooner."""

TEXT: Final = "string", "binary"
"""Ends of the names of Arrow's types of text and bytes."""

LINE_END: Final = "\r\n"  # RFC 4180
ESCAPED: Final = "backslashreplace"  # of lone surrogates
QUOTED = re.compile('[",\r\n]').search


class Parquet:
    """Rows as Parquet files.

    There is one file, or several if there are several `targets`: paths, or open files that are left
    open.
    """

    def __init__(self, targets: Iterator[Any], schema: pa.Schema) -> None:
        self._schema = schema
        # a dictionary of numbers rarely pays
        texts = [each.name for each in schema if str(each.type).endswith(TEXT)]
        self._dictionaries: Any = texts or False
        self._targets = targets
        self._open(next(targets))

    def _open(self, target: Any) -> None:
        self._file: Any = pq.ParquetWriter(
            target, self._schema, compression="zstd", use_dictionary=self._dictionaries
        )
        self._rows = self._bytes = 0  # of the file
        self._group: list[pa.Table] = []

    def write(self, table: pa.Table) -> None:
        """Add rows, and write the row group if it is large enough."""
        is_full = self._rows >= PART_ROWS or self._bytes >= PART_BYTES
        if is_full and (target := next(self._targets, None)) is not None:
            self.close()
            self._open(target)
        self._group.append(table)
        group = pa.concat_tables(self._group)  # without a copy
        if group.num_rows >= GROUP_ROWS or group.nbytes >= GROUP_BYTES:
            self._end_group()

    def _end_group(self) -> None:
        table = pa.concat_tables(self._group).combine_chunks()  # pages end with the pieces
        self._group = []
        self._rows += table.num_rows
        self._bytes += table.nbytes
        self._file.write_table(table, row_group_size=max(1, table.num_rows))
        del table
        # else Arrow's allocator keeps 100 MB after a million rows of text
        pa.default_memory_pool().release_unused()

    def close(self) -> None:
        """Write the rest. A second call does nothing."""
        if self._group:
            self._end_group()
        self._file.close()


class Lines:
    """Rows as lines of text in the file `target`."""

    def __init__(self, target: Path, names: list[str], *, is_json: bool) -> None:
        self._file = open(target, "wb", buffering=1 << 20)  # noqa: SIM115  # `close` does
        self._names = names
        self._is_json = is_json
        if not is_json:
            self.write({name: [name] for name in names})

    def write(self, columns: Mapping[str, list[Any]]) -> None:
        """Write rows as columns of canonical values."""
        names = self._names
        rows = zip(*[columns[name] for name in names], strict=True)
        if self._is_json:
            lines = [_json(dict(zip(names, row, strict=True))) + b"\n" for row in rows]
        else:
            # a line without any character would be no row to most readers
            none = "" if len(names) > 1 else '""'
            cells = [[none if value is None else _cell(value) for value in row] for row in rows]
            lines = [(",".join(row) + LINE_END).encode(errors=ESCAPED) for row in cells]
        self._file.write(b"".join(lines))

    def close(self) -> None:
        """Write the rest. A second call does nothing."""
        self._file.close()


def _json(value: Any) -> bytes:
    """Return a value as JSON.

    The standard library writes values that orjson refuses or writes as null: NaN, infinities,
    integers of more than 64 bits, lone surrogates.
    """
    with suppress(TypeError):
        text = orjson.dumps(value, _plain, orjson.OPT_SERIALIZE_NUMPY)
        if b"null" not in text or _is_finite(value):
            return text
    return _STANDARD.encode(value).encode(errors=ESCAPED)


def _is_finite(value: Any) -> bool:
    """Return whether no number in a value is NaN or infinite."""
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, dict) or all(map(_is_finite, value.values()))


def _plain(value: Any) -> Any:
    """Return a value that JSON has in place of one that it lacks."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, np.ndarray):
        # as few digits as the type needs
        return (value.astype(str).astype(float) if value.dtype.kind == "f" else value).tolist()
    if hasattr(value, "months"):
        return f"P{value.months}M{value.days}DT{value.nanoseconds / 1e9:g}S"
    return read(value)[0]


_STANDARD: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        text = value
    elif isinstance(value, bool):
        return "true" if value else "false"
    elif isinstance(value, int | float):
        return str(value)
    elif isinstance(value, dict | list | np.ndarray):
        text = _json(value).decode()
    else:
        text = str(_plain(value))
    if not text or QUOTED(text):
        return '"' + text.replace('"', '""') + '"'
    return text
