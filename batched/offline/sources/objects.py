"""Objects as sources: tables of any library that speaks Arrow, datasets, dicts.

Objects that can be read from the start again, in the same order, are read in place: tables in
memory, `datasets.Dataset`, `pyarrow.dataset.Dataset`, sequences (a length, and items by number).
All other objects are written to a spool as they are read for the first time. Iterators have one
pass. A duckdb relation or a `ray.data.Dataset` computes its rows anew, perhaps in another order. A
data loader shuffles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from reprlib import repr as shorten
from typing import Any, Final

import pyarrow as pa

from ...errors import SourceError
from .base import WINDOW_ROWS, ArrowSource, Fault, Rows, RowSource, Source
from .errors import explain, refusing
from .spool import spool_rows, spool_tables

_INDEX: Final = re.compile(r"__index_level_\d+__")
_IN_MEMORY: Final = {"pyarrow", "pandas", "polars"}
"""Packages of tables that are whole in memory, except readers."""


def _open_sequence(sequence: Any, name: str) -> Source:
    """Open rows by number, because the iteration of a map-style dataset may never end."""

    def read() -> Rows:
        for number in range(len(sequence)):
            try:
                yield sequence[number]
            except Exception as error:
                yield Fault(f"the row cannot be read: {explain(error)}")

    return RowSource(name, read, rows=len(sequence))


def _open_dataset(dataset: Any, name: str) -> Source:
    """Open a `datasets.Dataset`, with its choice and order of rows, and its transform if any."""
    form = dataset.format
    if form["type"] or form["columns"] != dataset.column_names:
        return _open_sequence(dataset, name)
    rows = dataset.with_format("arrow")

    def read(columns: list[str]) -> Iterator[Any]:
        for table in rows.select_columns(columns).iter(batch_size=WINDOW_ROWS):
            yield from table.to_batches()

    return ArrowSource(name, dataset.features.arrow_schema, read, rows=dataset.num_rows)


def _open_ray(dataset: Any, name: str, spool: Path, limit: int) -> Source:
    """Open a `ray.data.Dataset`, which Ray computes now."""

    def read() -> Iterator[Any]:
        for block in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            whole = [column.combine_chunks() for column in block.columns]
            yield pa.table(list(map(_plain, block.column_names, whole)), block.column_names)

    return spool_tables(read(), name, spool, limit)


def _plain(name: str, array: Any) -> Any:
    """Return an array of Arrow's own type for Ray's tensors."""
    kind = array.type
    if not getattr(kind, "extension_name", "").startswith("ray.data."):
        return array
    if not pa.types.is_struct(kind.storage_type):
        block = array.to_numpy(zero_copy_only=False)
        is_vector = block.ndim == 2
        return array.storage if is_vector else pa.FixedShapeTensorArray.from_numpy_ndarray(block)
    if kind.ndim == 1:
        return array.storage.field("data")
    raise SourceError(
        f"the column {name!r} of the Ray dataset holds tensors of several shapes; drop it, or "
        "keep paths of files in it that preprocess= opens"
    )


def open_object(source: Any, spool: Path, limit: int) -> Source:
    """Open an object that has rows."""
    kind = type(source)
    package = kind.__module__.split(".")[0]
    name = f"the {kind.__name__}" if package == "builtins" else f"the {package} {kind.__name__}"
    if isinstance(source, Mapping):
        raise SourceError(
            f"{name} is no list of rows; pass one of its splits, or a dict of columns as "
            "pyarrow.table(...)"
        )
    if hasattr(source, "with_format") and hasattr(source, "num_rows"):
        return _open_dataset(source, name)
    if package == "ray" and hasattr(source, "iter_batches"):
        return _open_ray(source, name, spool, limit)
    if package == "pyarrow" and hasattr(source, "get_fragments"):
        from .tables import scan

        return scan(name, source)
    if hasattr(source, "lazy"):  # of polars
        source = source.lazy().collect().to_arrow()  # which has no views of text
    if (
        hasattr(source, "reset_index")
        and package == "pandas"
        and {*source.index.names} - {None, *getattr(source, "columns", ())}
    ):
        source = source.reset_index()  # a named index is a column
    if hasattr(source, "__arrow_c_stream__"):
        with refusing(lambda: f"{name}, as a stream of Arrow,"):
            reader = pa.RecordBatchReader.from_stream(source)
        if package not in _IN_MEMORY or isinstance(source, pa.RecordBatchReader):
            tables = (pa.Table.from_batches([batch]) for batch in reader)
            first = reader.schema.empty_table()  # there may be no batch
            return spool_tables(chain([first], tables), name, spool, limit)
        table = reader.read_all()
        # of a filtered frame of pandas
        table = table.drop_columns([*filter(_INDEX.fullmatch, table.column_names)])
        return ArrowSource(name, table.schema, lambda _: table.to_batches(), rows=table.num_rows)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return _open_sequence(source, name)
    try:
        rows = iter(source)
    except TypeError:
        raise SourceError(
            f"{shorten(source)} is no source; sources are paths, tables of Arrow, polars, pandas "
            "or duckdb, datasets, also of Ray, and lists or iterators of dicts"
        ) from None
    if getattr(source, "gi_frame", name) is None:
        raise SourceError(f"{name} has been read to its end by another loop; make a new one")
    return spool_rows(islice(rows, limit), name, spool)
