"""Text files as sources: JSON lines and CSV, plain or compressed.

- JSON lines: one object a line. NaN, infinities and integers over 64 bits are read as they were
  written; blank lines are skipped.
- CSV, and TSV with tabs: the first line has the names. All values are text: "NA", "" and "00000"
  stay. A quotation mark out of place ends the reading: the end of its row is not known.
- Text is UTF-8, with or without a byte order mark.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from functools import partial
from posixpath import splitext
from typing import Any, Final

import orjson
import pyarrow as pa

from ...errors import SourceError
from .base import Fault, Rows, RowSource
from .errors import check_names, refusing
from .files import COMPRESSED, Files

Parser = Callable[[str, Any], Rows]
"""Reader of the rows of an open file, by its path and the file."""

_BUFFER: Final = 1 << 20
"""Bytes of a file that are read at once."""

_LARGEST_FIELD: Final = 1 << 30
"""Bytes of a CSV value; the standard library's 128 KiB are less than many a document."""

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

_TO_ZEROS: Final = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER: Final = b"0" * 19
"""Digits of the smallest integer over 63 bits; orjson makes floats of integers over 64."""


class TextSource(RowSource):
    """Text files, and the place that reading has come to."""

    files: Files

    def __init__(self, files: Files, parse: Parser) -> None:
        """Take files of text, and the parser of one file."""
        super().__init__(files.name, self._read_all, files=files)
        self._parse = parse
        self._before = 0  # bytes of files that are read to the end
        self._file: Any = None  # file that is being read
        self._seen = (0, 0)  # rows, and bytes that held them

    def _read_all(self) -> Rows:
        self._before = 0
        for path, (size, _) in self.files.found.items():
            yield from self.read_file(path, self._parse)
            self._before += size

    def read_file(self, path: str, parse: Parser) -> Rows:
        """Read the rows of one file."""
        shown = self.files.show(path)
        opened = self.files.filesystem.open_input_file
        with refusing(partial(repr, shown)), io.BufferedReader(opened(path), _BUFFER) as file:
            self._file = file
            if codec := COMPRESSED.get(splitext(path.lower())[1]):
                plain = pa.CompressedInputStream(file, codec)
                yield from parse(shown, io.BufferedReader(plain))
            else:
                yield from parse(shown, file)

    def _note(self, rows: int) -> None:
        self._seen = rows, self._before + (0 if self._file.closed else self._file.tell())

    def estimate_rows(self) -> int | None:
        """Return the number of rows, estimated from the bytes read so far."""
        rows, read = self._seen
        return self.rows if self.rows is not None or not read else rows * self.files.size // read


def read_json(path: str, file: Iterable[bytes]) -> Rows:
    """Read rows from lines of JSON."""
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line and not line.isspace():
            yield _parse(line), (path, number)


def _parse(line: bytes) -> Any:
    if _LONG_NUMBER not in line.translate(_TO_ZEROS):
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError:
            pass  # NaN, perhaps, which the standard library reads
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Fault(f"not UTF-8 ({error})")
    except (ValueError, RecursionError) as error:
        return Fault(f"not JSON ({error})")


def open_csv(files: Files) -> TextSource:
    """Open files of separated values; all have the same columns."""
    csv.field_size_limit(max(csv.field_size_limit(), _LARGEST_FIELD))
    records = partial(_read_records, "\t" if files.format == "tsv" else ",")
    source = TextSource(files, partial(_read_csv, records))
    headers: list[list[str]] = []
    for path, shown in zip(files.found, files.paths, strict=True):
        header, _ = next(source.read_file(path, records), ([], None))
        if not header:
            raise SourceError(f"{shown!r} is empty; the first line of a CSV file names columns")
        if why := _fault_of("".join(header)):
            raise SourceError(f"{shown!r}, line 1: {why}")
        check_names(repr(shown), header)
        headers.append(header)
    files.check_columns(headers)
    source.columns = headers[0]
    return source


def _read_records(delimiter: str, path: str, file: Any) -> Rows:
    text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
    # strict: an open quotation mark would swallow the rest of the file
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        for record in reader:
            if record:  # no blank line
                yield record, (path, reader.line_num)
    except csv.Error as error:
        raise SourceError(f"{path!r}, line {reader.line_num}: not CSV ({error})") from error


def _read_csv(read: Parser, path: str, file: Any) -> Rows:
    records = read(path, file)
    header, _ = next(records)
    for record, line in records:
        text = "".join(record)
        if len(record) != len(header):
            why = f"{len(record)} values, but the first line names {len(header)} columns"
            yield Fault(why), line
        elif not text.isascii() and (why := _fault_of(text)):
            yield Fault(why), line
        else:
            yield dict(zip(header, record, strict=True)), line


def _fault_of(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"not UTF-8 (byte 0x{ord(text[error.start]) & 0xFF:02x})"
    return ""
