"""Commits: rows that have ended, and their outputs as chunks.

Batches of one step and one type share a chunk. A row is in one chunk, at one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa

from ._chunks import to_bytes

Key = str | int
Done = tuple[Key, int, int]
"""A row that is done: its key, hash of its input, attempts."""
Status = Literal["ok", "failed"]

CHUNK_BYTES: Final = 64 * 2**20
"""Most bytes of outputs in one chunk, before compression, unless it is a single row."""


class Committed(NamedTuple):
    """What is committed of one row and step."""

    status: Status
    chunk: int | None  # None: it failed
    place: int | None  # in the chunk
    input: int  # hash of what the step read
    attempts: int
    error: str | None  # JSON


@dataclass(slots=True)
class Commit:
    """Rows of one step that have ended, and are to be committed."""

    step: int
    done: list[Done]  # in the order of `batch`
    batch: pa.RecordBatch | None  # outputs of `done`
    failed: list[tuple[Key, int, int, str]]  # key, hash of the input, attempts, error as JSON
    # values to be put under these names together with the rows
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.done) + len(self.failed)

    @property
    def nbytes(self) -> int:
        """Size of the outputs."""
        return 0 if self.batch is None else int(self.batch.nbytes)


def join(commits: Sequence[Commit]) -> Iterator[tuple[int, list[Done], bytes]]:
    """Chunks: step, rows in the order of their outputs, outputs."""
    groups: dict[tuple[int, pa.Schema], list[Commit]] = {}
    for commit in commits:
        if commit.batch is not None:
            groups.setdefault((commit.step, commit.batch.schema), []).append(commit)
    for (step, _), group in groups.items():
        done = [row for commit in group for row in commit.done]
        table = pa.Table.from_batches([commit.batch for commit in group]).combine_chunks()
        first = 0
        for batch in table.to_batches():
            yield from _split(step, done[first : first + batch.num_rows], batch)
            first += batch.num_rows


def _split(
    step: int, done: list[Done], batch: pa.RecordBatch
) -> Iterator[tuple[int, list[Done], bytes]]:
    half = len(done) // 2
    if batch.nbytes > CHUNK_BYTES and half:
        yield from _split(step, done[:half], batch.slice(0, half))
        yield from _split(step, done[half:], batch.slice(half))
    else:
        yield step, done, to_bytes([batch])
