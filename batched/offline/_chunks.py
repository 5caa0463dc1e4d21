"""Chunks: the outputs of one commit as bytes, an Arrow IPC stream compressed with zstd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa


def to_bytes(batches: Sequence[Any]) -> bytes:
    """Batches of one schema as one chunk."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]  # pyarrow has no stubs


def from_bytes(data: bytes) -> Any:
    """The chunk's rows as one batch."""
    with pa.ipc.open_stream(data) as reader:
        table = reader.read_all().combine_chunks()
        batches = table.to_batches()
        return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
