"""Files as sources: Parquet, JSONL and CSV, by a path, a glob, or a folder of Parquet files.

- Several files are read in the sorted order of their paths, as one source; all are of one kind.
- Parquet is read by batches and only the columns asked for, also from one huge row group.
- JSONL is one object a line. NaN, infinities and integers over 64 bits are read as they were
  written; blank lines are skipped.
- CSV has a first line of names and is text throughout: "NA", "" and "00000" stay. A quotation mark
  that is never closed is refused.
- Text is UTF-8, with or without a byte order mark.
"""

from __future__ import annotations

import csv
import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import SourceError
from ._result import is_remote, without_credentials
from ._window import (
    WINDOW_BYTES,
    WINDOW_ROWS,
    ArrowSource,
    RowSource,
    Source,
    missing_column,
    row_name,
)

__all__ = ["Files", "open_files"]

_READ_BUFFER = 1 << 20
"""Bytes of a Parquet column read at once; without a buffer its whole row group is."""

_LARGEST_FIELD = 1 << 30
"""Bytes of a CSV value; the standard library's 128 KiB are less than many a document."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Files:
    """The files that a path stands for, and their size and time when they were found."""

    def __init__(self, path: str) -> None:
        if is_remote(path):
            raise SourceError(
                f"the source {without_credentials(path)} is a URI; give a path on this machine, or "
                "a table or a stream that a library reads from there"
            )
        self.path = path
        self.paths = self._find()
        if not self.paths:
            raise SourceError(
                f"the folder {path!r} has no .parquet file"
                if self._is_folder
                else f"no file matches {path!r}"
            )
        kinds = sorted({Path(found).suffix.lower() for found in self.paths})
        if len(kinds) > 1:
            raise SourceError(
                f"{path!r} matches files of several kinds ({', '.join(kinds)}); a source has one"
            )
        if kinds[0] not in _KINDS:
            raise SourceError(
                f"{path!r}: the suffix is {kinds[0]!r}; files that can be read end in "
                f"{', '.join(_KINDS)}"
            )
        self.kind = kinds[0]
        self._stamps = {found: _stamp(found) for found in self.paths}

    @property
    def _is_folder(self) -> bool:
        return os.path.isdir(os.path.expanduser(self.path))

    @property
    def stamps(self) -> list[list[Any]]:
        """Each file with its size and time when it was found."""
        return [[found, *(stamp or ())] for found, stamp in self._stamps.items()]

    def _find(self) -> list[str]:
        path = os.path.expanduser(self.path)
        if self._is_folder:
            path = os.path.join(glob.escape(path), "*.parquet")
        elif os.path.exists(path):
            return [path]  # brackets and all
        return sorted(found for found in glob.glob(path, recursive=True) if os.path.isfile(found))

    def check_unchanged(self) -> None:
        """`SourceError` if a file was changed, added or removed since."""
        now = self._find()
        for found in sorted(self._stamps.keys() | set(now)):
            if found not in now:
                fault = "is gone"
            elif found not in self._stamps:
                fault = "was added"
            elif _stamp(found) != self._stamps[found]:
                fault = "was changed"
            else:
                continue
            raise SourceError(
                f"{found!r} {fault} while the run read {self.path!r}; run again: rows that are as "
                "they were are not computed again"
            )


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


class _ParquetSource(ArrowSource):
    def __init__(self, files: Files) -> None:
        self.files, self.name, self.rows = files, repr(files.path), 0
        schemas = []
        for path in files.paths:
            with _parquet(path) as file:
                schemas.append(file.schema_arrow.remove_metadata())
                self.rows += file.metadata.num_rows
        self._use(schemas[0])
        for path, schema in zip(files.paths[1:], schemas[1:], strict=True):
            if missing := set(self.schema.names) - set(schema.names):
                raise missing_column(min(missing), repr(path), schema.names)
            if more := set(schema.names) - set(self.schema.names):
                raise missing_column(min(more), repr(files.paths[0]), self.schema.names)
            try:
                self.schema = pa.unify_schemas([self.schema, schema])  # null to any type, no more
            except pa.ArrowException as error:
                raise SourceError(
                    f"{path!r} and {files.paths[0]!r} differ in the type of a column: {error}"
                ) from error

    def _batches(self, columns: Sequence[str]) -> Iterator[Any]:
        assert self.files
        wanted = pa.schema([self.schema.field(name) for name in columns])
        for path in self.files.paths:
            with _parquet(path) as file:
                rows = min(WINDOW_ROWS, _rows_that_fit(file.metadata, columns))
                # by this thread alone: each more that decodes keeps some memory
                batches = file.iter_batches(rows, columns=list(columns), use_threads=False)
                while batch := _next_batch(batches, path):
                    # "a.b" also brings the field b of a column a
                    batch = batch.select(list(columns))
                    if batch.schema.types != wanted.types:
                        batch = pa.Table.from_batches([batch]).cast(wanted).combine_chunks()
                        yield from batch.to_batches()
                    else:
                        yield batch


def _parquet(path: str) -> Any:
    try:
        return pq.ParquetFile(path, buffer_size=_READ_BUFFER, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path!r} cannot be read as Parquet: {_line(error)}") from error


def _next_batch(batches: Iterator[Any], path: str) -> Any:
    try:
        return next(batches, None)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path!r} cannot be read to its end: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _rows_that_fit(metadata: Any, columns: Sequence[str]) -> int:
    """Rows of which these columns come to `WINDOW_BYTES`, by the largest row group."""
    most = 1.0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = (group.column(place) for place in range(group.num_columns))
        size = sum(
            chunk.total_uncompressed_size
            for chunk in chunks
            if chunk.path_in_schema in columns or chunk.path_in_schema.split(".")[0] in columns
        )
        most = max(most, size / max(1, group.num_rows))
    return max(1, int(WINDOW_BYTES / most))


class _JsonlSource(RowSource):
    def __init__(self, files: Files) -> None:
        self.files, self.name = files, repr(files.path)

    def _lines(self) -> Iterator[tuple[str, int, bytes]]:
        assert self.files
        for path in self.files.paths:
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if number == 1:
                        line = line.removeprefix(_BYTE_ORDER_MARK)
                    if line and not line.isspace():
                        yield path, number, line

    def _rows(self) -> Iterator[Any]:
        for path, number, line in self._lines():
            yield _parse(path, number, line)

    def _row_name(self, number: int) -> str:
        for row, (path, line, _) in enumerate(self._lines()):
            if row == number:
                return f"{path!r}, line {line}, {row_name(number)}"
        return row_name(number)


_TO_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 19
"""Digits of the smallest integer over 63 bits; orjson makes floats of those over 64."""


def _parse(path: str, number: int, line: bytes) -> Any:
    if _LONG_NUMBER not in line.translate(_TO_ZEROS):
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError:
            pass  # NaN, perhaps, which the standard library reads
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise SourceError(f"{path!r}, line {number}: not UTF-8 ({error})") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path!r}, line {number}: not JSON ({error})") from error


class _CsvSource(RowSource):
    def __init__(self, files: Files) -> None:
        self.files, self.name = files, repr(files.path)
        csv.field_size_limit(max(csv.field_size_limit(), _LARGEST_FIELD))
        for path in files.paths:
            header = next(self._records(path), None)
            if not header:
                raise SourceError(f"{path!r} is empty; the first line of a CSV file names columns")
            if twice := [name for name in header if header.count(name) > 1]:
                raise SourceError(f"{path!r} has two columns {twice[0]!r}; names must differ")
            if self.columns is None:
                self.columns = header
            elif set(header) != set(self.columns):
                raise SourceError(
                    f"{path!r} has the columns {header}, but {files.paths[0]!r} has {self.columns}"
                )

    def _records(self, path: str) -> Iterator[list[str]]:
        with open(path, encoding="utf-8-sig", newline="") as file:
            # strict: an open quotation mark would swallow the rest of the file
            reader = csv.reader(file, strict=True)
            width = 0
            try:
                for record in reader:
                    if not record:
                        continue  # a blank line
                    width = width or len(record)
                    if len(record) != width:
                        raise SourceError(
                            f"{path!r}, line {reader.line_num}: {len(record)} values, but the "
                            f"first line names {width} columns"
                        )
                    yield record
            except csv.Error as error:
                raise SourceError(f"{path!r}, line {reader.line_num}: not CSV ({error})") from error
            except UnicodeDecodeError as error:
                raise SourceError(
                    f"{path!r}, after line {reader.line_num}: not UTF-8 ({error})"
                ) from error

    def _rows(self) -> Iterator[Any]:
        assert self.files
        for path in self.files.paths:
            records = self._records(path)
            header = next(records, [])
            for record in records:
                yield dict(zip(header, record, strict=True))


_KINDS = {".parquet": _ParquetSource, ".jsonl": _JsonlSource, ".csv": _CsvSource}


def open_files(path: str) -> Source:
    """The source of the files that a path, a glob or a folder stands for."""
    files = Files(path)
    return _KINDS[files.kind](files)
