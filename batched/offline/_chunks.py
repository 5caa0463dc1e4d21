"""Chunks: results of one step as bytes, an Arrow IPC stream compressed with zstd."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyarrow import ipc

_OPTIONS = ipc.IpcWriteOptions(compression="zstd")


def to_bytes(batches: Sequence[pa.RecordBatch]) -> bytes:
    """Batches of one schema, joined to one that `from_bytes` returns."""
    table = pa.Table.from_batches(batches).combine_chunks()
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema, options=_OPTIONS) as writer:
        for batch in table.to_batches() or batches[:1]:  # a table without rows has none
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_bytes(data: bytes) -> pa.RecordBatch:
    """The batch of which `to_bytes` made these bytes."""
    with ipc.open_stream(data) as reader:
        return reader.read_next_batch()
