"""Spools: files that keep the rows of a source with one pass for further passes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from ...errors import SourceError
from .base import WINDOW_ROWS, ArrowSource, Rows, RowSource, gather
from .errors import explain

_BATCH_ROWS: Final = 1 << 16
"""Rows of a batch that are written at once, and read back at once."""


class _Spool:
    """Pieces of an iterator, written to a file as they are read for the first time.

    A reader that comes to the end of the file reads on. An error of the iterator is the error of
    every later reader, too: the rest is unknown.
    """

    def __init__(
        self, path: Path, pieces: Iterator[bytes], end: Callable[[], object] = int
    ) -> None:
        """Open the file of the spool; `end` stops the iterator."""
        self._stop = end
        self._path = path
        self._pieces = pieces
        self._file = path.open("w+b", buffering=0)  # a full disk must not spoil later reading
        self._places: list[tuple[int, int]] = []
        """Offset and length of each piece (bytes)."""
        self._end: BaseException | None = None
        """`StopIteration` once all is read, or the error that ended the reading."""

    def __iter__(self) -> Iterator[bytes]:
        for number in count():
            if number == len(self._places) and not self._read_on():
                return
            offset, length = self._places[number]
            self._file.seek(offset)
            yield self._file.read(length)

    def _read_on(self) -> bool:
        if self._end is None:
            try:
                self._write(next(self._pieces))
                return True
            except BaseException as error:
                self._end = error
        if not isinstance(self._end, StopIteration):
            raise self._end
        return False

    def _write(self, piece: bytes) -> None:
        try:
            offset = self._file.seek(0, 2)
            rest = memoryview(piece)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise SourceError(
                f"the rows cannot be kept for a second reading in {self._path} ({explain(error)}); "
                "make room on that disk, or have progress= on another one"
            ) from error
        self._places.append((offset, len(piece)))

    def close(self) -> None:
        self._stop()
        self._file.close()
        self._path.unlink(missing_ok=True)


def spool_rows(rows: Rows, name: str, path: Path) -> RowSource:
    """Open the rows of an iterator; the spool keeps the types of their values."""
    spool = _Spool(path, map(_pickle, gather(rows, WINDOW_ROWS, name)))

    def read() -> Rows:
        for piece in spool:
            yield from zip(*pickle.loads(piece), strict=True)

    return RowSource(name, read, end=spool.close)


def _pickle(block: Any) -> bytes:
    try:
        return pickle.dumps(block, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise SourceError(
            f"a row cannot be kept for a second reading ({explain(error)}); pass a list of the "
            "rows, or values that can be pickled"
        ) from error


def spool_batches(
    schema: Any, batches: Iterable[Any], name: str, path: Path, end: Callable[[], object]
) -> ArrowSource:
    """Open the record batches of a stream, which `end` stops."""
    spool = _Spool(path, _serialize(batches, schema, name), end)

    def read() -> Iterator[Any]:
        for piece in spool:
            yield from pa.ipc.open_stream(piece)

    return ArrowSource(name, schema, lambda _: read(), end=spool.close)


def _serialize(batches: Iterable[Any], schema: Any, name: str) -> Iterator[bytes]:
    for batch in batches:
        if sorted(batch.schema.names) != sorted(schema.names):
            raise SourceError(
                f"{name} has batches of different columns: first {schema.names}, later "
                f"{batch.schema.names}"
            )
        for offset in range(0, batch.num_rows, _BATCH_ROWS):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch.slice(offset, _BATCH_ROWS))
            yield sink.getvalue().to_pybytes()
