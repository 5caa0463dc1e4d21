"""Objects as sources: tables of any library that speaks Arrow, datasets, dicts.

What can be read from the start again, in the same order, is read where it lies: tables in memory,
`datasets.Dataset`, sequences (whatever has a length and numbers its rows). All else is written to a
spool file as it is read for the first time, and read from there afterwards: iterators and
generators have only one pass, a duckdb relation or a `ray.data.Dataset` computes its rows anew and
may order them otherwise, a data loader shuffles. The spool keeps the values' types.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import SourceError
from ._window import WINDOW_ROWS, ArrowSource, RowSource, Source, shorten

__all__ = ["open_object"]

_IN_MEMORY = {"pyarrow", "pandas", "polars"}
"""Packages whose objects, but for readers, are whole in memory."""

_SPOOLED_ROWS = 1 << 16
"""Rows of a batch that are written at once, and read back at once."""


class _Spool:
    """Pieces of an iterator, written to a file as they are read for the first time.

    Any number of readers may go over it at once; the first that comes to the end of the file reads
    on. An error of the iterator is that of every later reader, too: what comes after it is unknown.
    """

    def __init__(self, path: Path, pieces: Iterator[bytes]) -> None:
        self._path = path
        self._pieces = pieces
        self._file = path.open("w+b")
        self._places: list[tuple[int, int]] = []
        """Offset and length of each piece."""
        self._end: BaseException | None = None
        """`StopIteration` once all has been read, or the error that ended it."""
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[bytes]:
        for number in count():
            with self._lock:
                if number == len(self._places) and not self._read_on():
                    return
                offset, length = self._places[number]
                self._file.seek(offset)
                piece = self._file.read(length)
            yield piece

    def _read_on(self) -> bool:
        if self._end is None:
            try:
                piece = next(self._pieces)
                offset = self._file.seek(0, 2)
                self._file.write(piece)
                self._places.append((offset, len(piece)))
                return True
            except BaseException as error:
                self._end = error
        if not isinstance(self._end, StopIteration):
            raise self._end
        return False

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


class _SpooledRows(RowSource):
    def __init__(self, rows: Iterator[Any], name: str, spool: Path) -> None:
        self.name = name
        self._spool = _Spool(spool, self._pickled(rows))

    def _pickled(self, rows: Iterator[Any]) -> Iterator[bytes]:
        first = 0
        for block in self._blocks(rows, WINDOW_ROWS):
            try:
                piece = pickle.dumps(block, pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                raise self._unpicklable(block, first) from error
            yield piece
            first += len(block)

    def _unpicklable(self, block: Sequence[Mapping[str, Any]], first: int) -> SourceError:
        for number, row in enumerate(block, first):
            for name, value in row.items():
                try:
                    pickle.dumps(value)
                except Exception as error:
                    return SourceError(
                        f"{self._row_name(number)}: column {name!r} has a {type(value).__name__}, "
                        f"which cannot be kept for a second reading ({error}); pass a list of the "
                        "rows, or values that can be pickled"
                    )
        kind = type(block[0])
        return SourceError(
            f"{self._row_name(first)} or one after it is a {kind.__name__} that cannot be kept for "
            "a second reading; pass a list of the rows, or plain dicts"
        )

    def _rows(self) -> Iterator[Any]:
        for piece in self._spool:
            yield from pickle.loads(piece)

    def close(self) -> None:
        self._spool.close()


class _SpooledBatches(ArrowSource):
    def __init__(self, reader: Any, name: str, spool: Path) -> None:
        self.name = name
        self._use(reader.schema)
        self._reader = reader
        self._spool = _Spool(spool, _serialized(reader))

    def _batches(self, columns: Sequence[str]) -> Iterator[Any]:
        for piece in self._spool:
            for batch in pa.ipc.open_stream(piece):
                yield batch.select(list(columns))

    def close(self) -> None:
        self._spool.close()
        self._reader.close()


class _RayBlocks:
    """Blocks of a `ray.data.Dataset`, computed as they are read, with the types of the first."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._name = name
        blocks = dataset.iter_batches(batch_size=None, batch_format="pyarrow")
        self._batches = (batch for block in blocks for batch in block.to_batches())
        self._first = next(self._batches, None)
        self.schema: Any = None if self._first is None else self._plain(self._first).schema

    def __iter__(self) -> Iterator[Any]:
        while self._first is not None:
            batch = self._plain(self._first)
            if not batch.schema.equals(self.schema):
                batch = self._cast(batch)
            yield batch
            del batch  # the next one has all memory for itself
            self._first = next(self._batches, None)

    def close(self) -> None:
        """Has Ray end what it still computes."""
        with suppress(ValueError):  # the reader is at it, and ends with the run
            self._batches.close()

    def _plain(self, batch: Any) -> Any:
        """The batch with lists for tensors."""
        arrays = [self._without_tensors(*each) for each in zip(batch.schema, batch, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)

    def _without_tensors(self, column: Any, array: Any) -> Any:
        kind = getattr(column.type, "extension_name", "")
        if not kind.startswith("ray.data.") and kind != "arrow.fixed_shape_tensor":
            return array
        if getattr(column.type, "ndim", len(getattr(column.type, "shape", ()))) == 1:
            storage = array.storage
            return storage.field("data") if pa.types.is_struct(storage.type) else storage
        raise SourceError(
            f"{self._name}: column {column.name!r} holds {column.type}, which a result cannot "
            "hold; drop_columns leaves it out, and what a step needs of it can be opened by its "
            "preprocess= from a path"
        )

    def _cast(self, batch: Any) -> Any:
        """The batch with the types of the first one."""
        try:
            table = pa.Table.from_batches([batch]).select(self.schema.names).cast(self.schema)
        except (pa.ArrowException, KeyError) as error:
            raise SourceError(
                f"{self._name} has blocks of different types: first {_shown(self.schema)}, later "
                f"{_shown(batch.schema)} ({error}); have map_batches give them one type"
            ) from error
        (batch,) = table.combine_chunks().to_batches()
        return batch


def _shown(schema: Any) -> str:
    return ", ".join(f"{part.name}: {part.type}" for part in schema) or "no columns"


def _serialized(reader: Any) -> Iterator[bytes]:
    for batch in reader:
        for offset in range(0, batch.num_rows, _SPOOLED_ROWS):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch.slice(offset, _SPOOLED_ROWS))
            yield sink.getvalue().to_pybytes()


class _Table(ArrowSource):
    def __init__(self, table: Any, name: str) -> None:
        self.name, self.rows = name, table.num_rows
        self._use(table.schema)
        self._table = table

    def _batches(self, columns: Sequence[str]) -> Iterator[Any]:
        return iter(self._table.select(list(columns)).to_batches())


class _Dataset(ArrowSource):
    """A `datasets.Dataset`, with the choice and order of rows that it stands for."""

    def __init__(self, dataset: Any) -> None:
        self.name, self.rows = _name(dataset), dataset.num_rows
        self._dataset = dataset.with_format("arrow")
        self._use(dataset.features.arrow_schema)

    def _batches(self, columns: Sequence[str]) -> Iterator[Any]:
        for table in self._dataset.select_columns(list(columns)).iter(batch_size=WINDOW_ROWS):
            yield from table.to_batches()


class _Sequence(RowSource):
    def __init__(self, sequence: Any) -> None:
        self.name, self.rows = _name(sequence), len(sequence)
        self._sequence = sequence

    def _rows(self) -> Iterator[Any]:
        # by number, since not all that have a length end their iteration
        return (self._sequence[number] for number in range(len(self._sequence)))


def _name(source: object) -> str:
    kind = type(source)
    package = kind.__module__.split(".")[0]
    return f"the {kind.__name__}" if package == "builtins" else f"the {package} {kind.__name__}"


def open_object(source: Any, spool: Path) -> Source:
    """The source of the rows of an object."""
    name = _name(source)
    package = type(source).__module__.split(".")[0]
    if package == "polars" and type(source).__name__ == "LazyFrame":
        raise SourceError(
            "a polars LazyFrame is a query, not rows: pass its .collect(), or where that is too "
            "large the path of a file that its .sink_parquet() wrote"
        )
    if hasattr(source, "with_format") and hasattr(source, "num_rows"):
        if not isinstance(source.num_rows, int):
            raise SourceError(f"{name} has several splits; pass one of {list(source.num_rows)}")
        return _Dataset(source)
    if package == "ray" and hasattr(source, "iter_batches"):
        computed = _RayBlocks(source, name)
        if computed.schema is None:
            return _Sequence([])
        blocks = _SpooledBatches(computed, name, spool)
        if type(source).__name__ == "MaterializedDataset":  # others would be computed to be counted
            blocks.rows = source.count()
        return blocks
    if hasattr(source, "__arrow_c_stream__"):
        try:
            reader = pa.RecordBatchReader.from_stream(source)
            if package in _IN_MEMORY and not isinstance(source, pa.RecordBatchReader):
                return _Table(reader.read_all(), name)
        except (pa.ArrowException, TypeError) as error:
            raise SourceError(f"{name} is no Arrow table: {error}") from error
        return _SpooledBatches(reader, name, spool)
    if isinstance(source, Mapping):
        raise SourceError(
            f"{name} is no list of rows; a dict of columns is made one by pyarrow.table(...)"
        )
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return _Sequence(source)
    try:
        rows = iter(source)
    except TypeError:
        raise SourceError(
            f"{shorten(source)} is no source; sources are paths, tables of Arrow, polars, pandas "
            "or duckdb, datasets, those of Ray, too, and lists or iterators of dicts"
        ) from None
    return _SpooledRows(rows, name, spool)
