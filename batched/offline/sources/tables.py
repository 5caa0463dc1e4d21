"""Parquet, Arrow IPC, and every `pyarrow.dataset.Dataset` as sources.

- Parquet files are read in small batches, even from one huge row group, and only the columns asked
  for: the scanner of `pyarrow.dataset` would decode a row group as a whole. The scanner reads IPC
  files, and all objects of `pyarrow.dataset`.
- Folders named `column=value` (Hive), below the folder given or the first wildcard, are columns.
- Files that paths name may have other types and columns: each column gets the type that takes all
  its values, and null where a file lacks it. Files of a `Dataset` are read as its schema says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from .base import WINDOW_BYTES, WINDOW_ROWS, ArrowSource, conform, unify
from .errors import refusing
from .files import Files

_BUFFER: Final = 1 << 20
"""Bytes of a Parquet column that are read at once; without a buffer its whole row group is."""

_OPENERS: Final = 16
"""Files that are opened at once, for a filesystem that answers slowly."""


def _scan(name: str, files: Files | None, dataset: Any) -> ArrowSource:
    """Open a dataset that its own scanner reads, in the order of its files."""
    read = partial(
        dataset.to_batches,
        batch_size=WINDOW_ROWS,
        batch_readahead=1,
        fragment_readahead=1,
        use_threads=False,
    )
    return ArrowSource(name, dataset.schema, read, files=files)


def _read_parquet(dataset: Any, schema: Any, columns: list[str]) -> Iterator[Any]:
    """Read the Parquet files of a dataset."""
    schema = pa.schema([schema.field(name) for name in columns])
    for fragment in dataset.get_fragments():
        folders = ds.get_partition_keys(fragment.partition_expression)
        with refusing(partial(repr, fragment.path)), fragment.open() as file:
            reader = pq.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False)
            groups = map(reader.metadata.row_group, range(reader.num_row_groups))
            widths = [group.total_byte_size / max(1, group.num_rows) for group in groups]
            for batch in reader.iter_batches(
                max(1, min(WINDOW_ROWS, int(WINDOW_BYTES / max(1, *widths)))),
                columns=columns,
                use_threads=False,  # each more that decodes keeps some memory
            ):
                yield conform(batch, schema, folders)  # "a.b" brings the field b of a, too


def open_tables(files: Files) -> ArrowSource:
    """Open Parquet or IPC files."""
    is_parquet = files.format == "parquet"
    factory = ds.FileSystemDatasetFactory(
        files.filesystem,
        list(files.found),
        ds.ParquetFileFormat() if is_parquet else ds.IpcFileFormat(),
        ds.FileSystemFactoryOptions(
            partition_base_dir=files.base, partitioning=ds.HivePartitioning.discover()
        ),
    )
    with refusing(lambda: files.name):
        *_, folders = factory.inspect_schemas()  # of one file, and of the names of folders
        # of a dataset that is dropped: its fragments keep the footers
        fragments = factory.finish(folders).get_fragments()
        with ThreadPoolExecutor(_OPENERS) as pool:
            schemas, rows = zip(*pool.map(_read_footer, fragments), strict=True)
    schema = unify(schemas, files.name)
    schema = pa.schema([*schema, *[each for each in folders if each.name not in schema.names]])
    if is_parquet:
        read = partial(_read_parquet, factory.finish(folders), schema)
        return ArrowSource(files.name, schema, read, rows=sum(rows), files=files)
    return _scan(files.name, files, factory.finish(schema))


def _read_footer(fragment: Any) -> tuple[Any, int]:
    """Return schema and number of rows of a file; 0 rows of IPC, of which no footer knows it."""
    is_parquet = isinstance(fragment, ds.ParquetFileFragment)
    with refusing(partial(repr, fragment.path)):
        schema = fragment.physical_schema.remove_metadata()
        return schema, fragment.count_rows() if is_parquet else 0


def open_dataset(dataset: Any, name: str) -> ArrowSource:
    """Open a `pyarrow.dataset.Dataset`."""
    files = None
    if paths := getattr(dataset, "files", None):
        filesystem = dataset.filesystem
        is_local = filesystem.type_name == "local"
        paths = [os.path.abspath(path) if is_local else path for path in paths]
        files = Files(filesystem, paths, "" if is_local else f"{filesystem.type_name}://")
    return _scan(name, files, dataset)
