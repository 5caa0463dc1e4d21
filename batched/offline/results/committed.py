"""Committed values of all steps, in the order of the source.

1. The chunk of each row and step, and the place there, are in a file without a name next to the
   progress file: 8 bytes for each row and step.
2. Up to `CACHE_BYTES` of chunks are kept in memory, the latest ones. A source in another order than
   that of the run reads chunks again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from ..progress.store import Progress
from ..types.columns import Kinds
from ..types.values import Kind, read_column

CACHE_BYTES: Final = 128 << 20
"""Bytes of chunks that are kept in memory for later rows."""
QUERY_ROWS: Final = 1 << 15
"""Source rows that are looked up at once."""

Columns = Sequence[Any]
"""Output columns: lists of canonical values, or arrays with a row for each value."""


class Committed:
    """Committed values. Those of a row and step have the position `step * rows + row`."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._rows = rows = progress.source_rows
        self._cache: dict[int, Columns] = {}  # by chunk
        with tempfile.TemporaryFile(dir=progress.path.parent) as file:
            at = np.memmap(file, np.int32, "w+", shape=(2, steps * rows + 1))
        self._chunks, self._places = at[:, :-1]  # by position; chunk 0: there is no value
        for first in range(0, rows, QUERY_ROWS):
            found = progress.locate_values(first, QUERY_ROWS)
            flat = np.fromiter(chain.from_iterable(found), np.int64, 4 * len(found))
            row, step, chunk, place = flat.reshape(-1, 4).T
            at[:, step * rows + row] = chunk, place
        sizes = progress.chunk_sizes()
        self._left = np.bincount(self._chunks)  # values to be read
        self._sizes = np.array([sizes.get(chunk, 0) for chunk in range(len(self._left))])
        self._row_bytes = self._sizes / self._left.clip(1)

    def find(self, first: int, size: int) -> tuple[Any, Any]:
        """Return, for each row from `first` on, if all steps have a value, and the size (bytes)."""
        chunks = self._chunks.reshape(-1, self._rows)[:, first : first + size]
        return (chunks > 0).all(0), self._row_bytes[chunks].sum(0)

    def read(self, step: int, rows: Any) -> Iterator[tuple[Any, Columns]]:
        """Yield values of a step for `rows`, each with the places of their rows in `rows`.

        Rows without a value are left out. A value can be read once.
        """
        positions = step * self._rows + rows
        chunks = self._chunks[positions]
        for part in _groups(chunks):
            chunk = int(chunks[part[0]])
            columns = self._cache.pop(chunk, None) or self._progress.chunk(chunk)
            self._left[chunk] -= len(part)
            if self._left[chunk]:
                self._cache[chunk] = columns
                while len(self._cache) > 1 and self._sizes[list(self._cache)].sum() > CACHE_BYTES:
                    del self._cache[next(iter(self._cache))]
            places = self._places[positions[part]]
            yield part, [pick(column, places) for column in columns]

    def final_kinds(self, step: int, columns: int) -> list[Kind]:
        """Return the kinds of the columns of a step.

        The kinds of its chunks suffice if one kind takes all values. Else all values are counted.
        """
        kinds = [Kinds() for _ in range(columns)]
        stored = self._progress.kinds(step)
        for each in filter(None, stored):
            for kind, one in zip(kinds, each, strict=True):
                kind.add({one: 1})
        if None in stored or not all(kind.agree for kind in kinds):
            kinds = [Kinds() for _ in range(columns)]
            of_step = slice(step * self._rows, (step + 1) * self._rows)
            chunks, places = self._chunks[of_step], self._places[of_step]
            for part in _groups(chunks):
                for kind, column in zip(
                    kinds, self._progress.chunk(int(chunks[part[0]])), strict=True
                ):
                    kind.add(read_column(pick(column, places[part]))[1])
        return [kind.final() for kind in kinds]


def pick(column: Any, places: Any) -> Any:
    """Return the values of a list or an array at these places."""
    is_list = isinstance(column, list)
    return [column[place] for place in places.tolist()] if is_list else column[places]


def _groups(keys: Any) -> list[Any]:
    """Return the places of each key above 0, in the order of the keys."""
    order = np.argsort(keys, kind="stable")
    order = order[np.searchsorted(keys[order], 0, "right") :]
    return np.split(order, np.flatnonzero(np.diff(keys[order])) + 1) if len(order) else []
