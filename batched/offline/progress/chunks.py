"""Chunks: packed values of one step, compressed where that pays.

A value decodes to its canonical form, in any chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final

import pyarrow as pa

from ..types.columns import MAX_BYTES, Values
from ..types.packing import unpack
from ..types.values import Unfit, common_kind

SAMPLE_BYTES: Final = 64 * 2**10
WORTHWHILE: Final = 0.8
"""Share of its size to which a sample must shrink. Embeddings shrink to 0.9, slowly."""

Stored = tuple[str | None, int, bytes]
"""Kinds of the columns (`repr` of a list; None if values of a column have no common kind), size
before compression (bytes), data."""


def encode_chunks(values: Sequence[Values]) -> Iterator[tuple[int, Stored]]:
    """Yield the number of rows and the chunk of consecutive rows."""
    columns = zip(*[each.kinds for each in values], strict=True)
    kinds = None
    with suppress(Unfit):
        kinds = repr([common_kind(chain.from_iterable(column)) for column in columns])
    rows, size = 0, 0
    parts: list[bytes] = []
    for count, part in chain.from_iterable([each.packed for each in values]):
        if rows and size + len(part) > MAX_BYTES:
            yield rows, (kinds, size, _compress(b"".join(parts)))
            rows, parts, size = 0, [], 0
        rows, size = rows + count, size + len(part)
        parts.append(part)
    if rows:
        yield rows, (kinds, size, _compress(b"".join(parts)))


def decode_values(size: int, data: bytes) -> list[Any]:
    """Return the columns of a chunk: lists of values, or arrays with a row for each value."""
    return unpack(data if len(data) == size else pa.decompress(data, size, "zstd", asbytes=True))


def _compress(raw: bytes) -> bytes:
    """Return bytes of the same number only if they are not compressed."""
    sample = raw[len(raw) // 2 :][:SAMPLE_BYTES]
    if len(pa.compress(sample, "zstd", asbytes=True)) < WORTHWHILE * len(sample):
        data: bytes = pa.compress(raw, "zstd", asbytes=True)
        return min(raw, data, key=len)
    return raw
