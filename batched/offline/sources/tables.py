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

import pyarrow.parquet as pq

from .base import WINDOW_BYTES, WINDOW_ROWS, ArrowSource, unify
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


def _read_parquet(files: Files, columns: list[str]) -> Iterator[Any]:
    for path in files.found:
        opened = files.filesystem.open_input_file
        with refusing(partial(repr, files.show(path))), opened(path) as file:
            reader = pq.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False)
            groups = map(reader.metadata.row_group, range(reader.num_row_groups))
            widths = [group.total_byte_size / max(1, group.num_rows) for group in groups]
            yield from reader.iter_batches(  # a column "a.b" brings the field b of a, too
                max(1, min(WINDOW_ROWS, int(WINDOW_BYTES / max(1, *widths)))),
                columns=columns,
                use_threads=False,  # each more that decodes keeps some memory
            )


def open_tables(files: Files) -> ArrowSource:
    """Open Parquet files."""

    def footer(path: str) -> tuple[Any, int]:
        with refusing(partial(repr, files.show(path))):
            found = pq.read_metadata(path, filesystem=files.filesystem)
            return found.schema.to_arrow_schema().remove_metadata(), found.num_rows

    with ThreadPoolExecutor(_OPENERS) as pool:
        schemas, rows = zip(*pool.map(footer, files.found), strict=True)
    read = partial(_read_parquet, files)
    return ArrowSource(files.name, unify(schemas, files.name), read, rows=sum(rows), files=files)
