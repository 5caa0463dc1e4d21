"""Parquet files, and every `pyarrow.dataset.Dataset`, as sources.

- Parquet files are read in small batches, even from one huge row group, and only the columns asked
  for: the scanner of `pyarrow.dataset`, which reads its objects, would decode a row group as a
  whole.
- Files that paths name may have other types and columns: each column gets the type that takes all
  its values, and null where a file lacks it. Files of a `Dataset` are read as its schema says.
"""

from __future__ import annotations

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


def scan(name: str, dataset: Any) -> ArrowSource:
    """Open a dataset that its own scanner reads, in the order of its files."""
    read = partial(
        dataset.to_batches,
        batch_size=WINDOW_ROWS,
        batch_readahead=1,
        fragment_readahead=1,
        use_threads=False,
    )
    return ArrowSource(name, dataset.schema, read)


def _read_parquet(files: Files, schema: Any, columns: list[str]) -> Iterator[Any]:
    schema = pa.schema([schema.field(name) for name in columns])
    for path in files.found:
        opened = files.filesystem.open_input_file
        with refusing(partial(repr, files.show(path))), opened(path) as file:
            reader = pq.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False)
            groups = map(reader.metadata.row_group, range(reader.num_row_groups))
            widths = [group.total_byte_size / max(1, group.num_rows) for group in groups]
            for batch in reader.iter_batches(
                max(1, min(WINDOW_ROWS, int(WINDOW_BYTES / max(1, *widths)))),
                columns=columns,
                use_threads=False,  # each more that decodes keeps some memory
            ):
                yield conform(batch, schema)  # "a.b" brings the field b of a, too


def open_tables(files: Files) -> ArrowSource:
    """Open Parquet files."""

    def footer(path: str) -> tuple[Any, int]:
        with refusing(partial(repr, files.show(path))):
            fragment = ds.ParquetFileFormat().make_fragment(path, files.filesystem)
            return fragment.physical_schema.remove_metadata(), fragment.count_rows()

    with ThreadPoolExecutor(_OPENERS) as pool:
        schemas, rows = zip(*pool.map(footer, files.found), strict=True)
    schema = unify(schemas, files.name)
    read = partial(_read_parquet, files, schema)
    return ArrowSource(files.name, schema, read, rows=sum(rows), files=files)
