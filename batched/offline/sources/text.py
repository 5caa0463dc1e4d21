"""Text files as sources: JSON lines, JSON arrays and CSV, plain or compressed.

- JSON lines: one object a line. NaN, infinities and integers over 64 bits are read as they were
  written; blank lines are skipped. A file that begins with "[" is an array of rows, held in memory.
- CSV, and TSV with tabs: the first line has the names. All values are text: "NA", "" and "00000"
  stay. A quotation mark out of place ends the reading: the end of its row is not known.
- Text is UTF-8, with or without a byte order mark, unless a setting says otherwise.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from csv import QUOTE_MINIMAL, QUOTE_NONE, field_size_limit, reader
from csv import Error as CsvError
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from os import PathLike
from posixpath import splitext
from typing import Any, Final

import orjson

from ...errors import SourceError
from .base import Fault, Rows, RowSource
from .errors import check_names, refusing
from .files import COMPRESSED, Files

Parser = Callable[[str, Any], Rows]
"""Reader of the rows of an open file, by its path and the file."""

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]

_BUFFER: Final = 1 << 20
"""Bytes of a file that are read at once."""

_LARGEST_FIELD: Final = 1 << 30
"""Bytes of a CSV value; the standard library's 128 KiB are less than many a document."""

_TO_ZEROS: Final = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER: Final = b"0" * 19
"""Digits of the smallest integer over 63 bits; orjson makes floats of integers over 64."""


@dataclass(frozen=True)
class Text:
    """Text files, and how they are written."""

    paths: Paths = field(repr=False)
    format: str
    """One of `files.TEXTS`."""
    encoding: str = "utf-8"
    delimiter: str | None = None
    """None: a comma, or a tab for TSV."""
    quote: str | None = '"'
    header: bool | Sequence[str] = True


def csv(
    path: Paths,
    *,
    delimiter: str = ",",
    encoding: str = "utf-8",
    quote: str | None = '"',
    header: bool | Sequence[str] = True,
) -> Text:
    r"""Return CSV files as a source, with settings for the way they are written.

    Args:
        path: a path, several paths, a glob or a URI.
        delimiter: the character between two values.
        encoding: the encoding, by its name in Python, such as `"latin-1"` or `"utf-16"`.
        quote: the quotation mark, which is doubled within a value; `'\\"'` if it has a backslash
            there instead; None if there is none.
        header: whether the first line has the names of the columns; False: the columns are
            `column0`, `column1` and so on. A list of names stands for the header.
    """
    return Text(path, "csv", encoding, delimiter, quote, header)


def jsonl(path: Paths, *, encoding: str = "utf-8") -> Text:
    """Return files of JSON lines as a source, with their encoding by its name in Python."""
    return Text(path, "json", encoding)


class TextSource(RowSource):
    """Text files."""

    files: Files

    def __init__(self, files: Files, form: Text) -> None:
        """Take files of text, and how they are written."""
        super().__init__(files.name, self._read_all, files=files)
        self.form, self._form = repr(form), form
        self._delimiter = form.delimiter or ("\t" if form.format == "tsv" else ",")
        if form.format != "json":
            field_size_limit(_LARGEST_FIELD)
            headers = map(self._find_names, files.found, files.paths)
            self.columns = list(dict.fromkeys(chain.from_iterable(headers)))
        self.estimate = self._estimate()

    def _read_all(self) -> Rows:
        parse: Parser = self._read_csv if self.columns else read_json
        for path in self.files.found:
            yield from self._read_file(path, parse)

    def _estimate(self) -> int | None:
        """Estimate the number of rows by the lines at the begin of the first file."""
        path = next(iter(self.files.found))
        with self.files.filesystem.open_input_file(path) as file:
            text = file.read(_BUFFER)
        is_list = not self.columns and text.lstrip().startswith(b"[")
        if splitext(path)[1] in COMPRESSED or is_list:
            return None
        # a value of CSV may have line breaks
        quoted = rb'"[^"]*"' if self.columns and self._form.quote == '"' else rb"\Z"
        lines = re.sub(quoted, b"", text).count(b"\n")
        return self.files.size * lines // len(text) if lines else None

    def _read_file(self, path: str, parse: Parser) -> Rows:
        """Read the rows of one file."""
        shown, encoding = self.files.show(path), self._form.encoding
        opened = self.files.filesystem.open_input_stream  # which decompresses by the suffix
        with refusing(partial(repr, shown)), io.BufferedReader(opened(path), _BUFFER) as file:
            name = "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding
            end = "\n" if parse is read_json else ""
            text: Any = io.TextIOWrapper(file, name, "surrogateescape", newline=end)
            if parse is read_json:
                text = (line.encode(errors="surrogateescape") for line in text)
            yield from parse(shown, text)

    def _find_names(self, path: str, shown: str) -> list[str]:
        """Return the names of the columns of a CSV file."""
        form = self._form
        first, _ = next(self._read_file(path, self._read_records), ([], 0))
        if not isinstance(form.header, bool):
            return list(form.header)
        if not first:
            raise SourceError(f"{shown!r} is empty; the first line of a CSV file names columns")
        if why := _fault_of("".join(first)):
            raise SourceError(f"{shown!r}, line 1: {why}")
        other = next((each for each in ";\t|," if each in first[0]), None)
        if len(first) == 1 and other and not form.delimiter:
            raise SourceError(
                f"{shown!r}: its first line has no {self._delimiter!r}, but {other!r}; "
                f"offline.csv(path, delimiter={other!r}) splits it there"
            )
        if not form.header:
            return [f"column{place}" for place in range(len(first))]
        check_names(repr(shown), first)
        return list(first)

    def _read_records(self, path: str, text: Any) -> Rows:
        quote = self._form.quote or ""
        # strict: an open quotation mark would swallow the rest of the file
        records = reader(
            text,
            delimiter=self._delimiter,
            quotechar=quote[-1:] or None,
            quoting=QUOTE_MINIMAL if quote else QUOTE_NONE,
            doublequote=len(quote) < 2,
            escapechar=quote[:-1] or None,
            strict=True,
        )
        try:
            for record in records:
                if record:  # no blank line
                    yield record, records.line_num
        except CsvError as error:
            raise SourceError(
                f"{path!r}, line {records.line_num}: not CSV ({error}); offline.csv(path, "
                "quote=...) says how its values are quoted"
            ) from error

    def _read_csv(self, path: str, file: Any) -> Rows:
        names = self.columns or []
        records = self._read_records(path, file)
        if self._form.header is True:
            names, _ = next(records)
        for record, line in records:
            why = _fault_of("".join(record))
            if len(record) != len(names):
                why = f"{len(record)} values, but there are {len(names)} columns"
            if why:
                yield Fault(f"{path!r}, line {line}: {why}")
            else:
                yield dict(zip(names, record, strict=True))


def read_json(path: str, file: Iterable[bytes]) -> Rows:
    """Read rows from lines of JSON, or from an array."""
    is_first = True
    lines = enumerate(file, 1)
    for number, line in lines:
        if line.isspace():
            continue
        if is_first and line.lstrip().startswith(b"["):
            rows = _parse(line + b"".join([more for _, more in lines]), path, number)
            if not isinstance(rows, list):
                raise SourceError(f"a text that begins with '[' is no array of rows: {rows}")
            yield from rows
        elif is_first and line.strip()[-1:] in (b"{", b"[", b","):
            raise SourceError(
                f"{path!r} is one JSON value on several lines; rows are objects, one on each line, "
                "or one array of objects"
            )
        else:
            yield _parse(line, path, number)
        is_first = False


def _parse(line: bytes, path: str, number: int) -> Any:
    if _LONG_NUMBER not in line.translate(_TO_ZEROS):
        with suppress(orjson.JSONDecodeError):  # of NaN, perhaps, which the standard library reads
            return orjson.loads(line)
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        why = f"not UTF-8 ({error}); offline.jsonl(path, {_ENCODINGS}"
    except (ValueError, RecursionError) as error:
        why = f"not JSON ({error})"
    return Fault(f"{path!r}, line {number}: {why}")


def _fault_of(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        return f"not UTF-8 (byte 0x{byte:02x}); offline.csv(path, {_ENCODINGS}"
    return ""


_ENCODINGS: Final = "encoding='cp1252') reads Excel's, 'latin-1' Latin-1, 'utf-16' UTF-16"
