"""Merging: the source and what is committed, joined to the one result, in the order of the source.

A row is in the result if all steps have a result for it. It has the columns of the source that are
kept, and those that steps have made; a step's takes the place of one of the same name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from ..errors import SourceError
from ._columns import Columns
from ._progress import Progress
from ._reading import WINDOW
from ._result import Result, Stamp
from ._window import ArrowSource, Source, Window

CACHED_BYTES: Final = 4 * 2**20
"""Bytes of chunks that are kept as they were read: rows that were committed together lie near each
other.
"""


class Merge:
    """The join of one source with one progress file."""

    def __init__(
        self,
        source: Source,
        progress: Progress,
        columns: Sequence[Columns],
        keep: Sequence[str] | None,
    ) -> None:
        self._source = source
        self._progress = progress
        self._columns = columns
        self._keep = keep  # columns of the source; None: all
        self._chunks: OrderedDict[int, pa.RecordBatch] = OrderedDict()
        self._held = 0  # bytes of these
        self._made: dict[str, int] = {}  # columns of steps, each with the last that writes it
        for number, each in enumerate(columns):
            self._made.update(dict.fromkeys(each.names, number))

    def write(self, result: Result, note: Callable[[Stamp], None]) -> Stamp:
        """Stamp of the result, which it writes; `note` is told it before that appears."""
        schema = self._schema()
        writer = result.writer(schema, note)
        try:
            for window in self._source.windows(self._keep, WINDOW, required=[]):
                writer.write(self._join(window, schema.names))
            return writer.close()
        except BaseException:
            writer.abort()
            raise

    def _schema(self) -> pa.Schema:
        """Types of all columns, those of the source first."""
        fields: dict[str, pa.Field] = {field.name: field for field in self._kept_schema()}
        for name, number in self._made.items():
            fields[name] = self._columns[number].schema.field(name)
        return pa.schema(list(fields.values()))

    def _kept_schema(self) -> pa.Schema:
        """Types of the columns of the source that are kept, by a look at all rows where its values
        are no Arrow's.
        """
        if isinstance(self._source, ArrowSource):
            known = self._source.schema
            names = [name for name in known.names if self._is_kept(name)]
            return pa.schema([known.field(name) for name in names])
        kinds: dict[str, Columns] = {}
        for window in self._source.windows(self._keep, WINDOW, required=[]):
            for name in filter(self._is_kept, window.columns):
                column = kinds.setdefault(name, Columns([name]))
                _, misfits = column.encode(window.values(name))
                for place, why in misfits.items():
                    raise SourceError(
                        f"{window.where(window.first + place)}: {why}; keep=[...] leaves columns "
                        "out of the result"
                    )
        return pa.schema([column.schema.field(name) for name, column in kinds.items()])

    def _is_kept(self, name: str) -> bool:
        return name not in self._made and (self._keep is None or name in self._keep)

    def _join(self, window: Window, names: Sequence[str]) -> Mapping[str, Any]:
        """Columns of the rows of a window that have all results, Arrow arrays or lists."""
        found = self._progress.places(window.first, window.size)
        steps = len(self._columns)
        if steps > 1:
            ends = [
                each
                for each in range(steps - 1, len(found))
                if found[each][0] == found[each - steps + 1][0]
            ]
            found = [found[each - back] for each in ends for back in range(steps - 1, -1, -1)]
        rows = [row - window.first for row, *_ in found[::steps]]
        made = [self._gather(number, found[number::steps]) for number in range(steps)]
        whole = len(rows) == window.size
        joined: dict[str, Any] = {}
        for name in names:
            number = self._made.get(name)
            if number is not None:
                joined[name] = made[number].column(name)
                continue
            column = window.columns.get(name, [None] * window.size)
            if not whole and isinstance(column, list):
                column = [column[row] for row in rows]
            elif not whole:
                column = column.take(pa.array(rows, pa.int64()))
            joined[name] = column
        return joined

    def _gather(self, number: int, found: Sequence[tuple[int, int, int, int]]) -> pa.RecordBatch:
        """Results of one step, row by row."""
        first: dict[int, int] = {}  # by chunk, the place of its first row among all
        batches: list[pa.RecordBatch] = []
        length = 0
        for chunk in dict.fromkeys([chunk for _, _, chunk, _ in found]):
            batch = self._chunk(number, chunk)
            batches.append(batch)
            first[chunk] = length
            length += batch.num_rows
        table = pa.Table.from_batches(batches, self._columns[number].schema)
        places = [first[chunk] + place for _, _, chunk, place in found]
        return table.take(pa.array(places, pa.int64())).combine_chunks()

    def _chunk(self, step: int, number: int) -> pa.RecordBatch:
        """A chunk, with the columns' final types."""
        batch = self._chunks.get(number)
        if batch is None:
            batch = self._columns[step].cast(self._progress.chunk(number))
            self._chunks[number] = batch
            self._held += batch.nbytes
            while self._held > CACHED_BYTES and len(self._chunks) > 1:
                self._held -= self._chunks.popitem(last=False)[1].nbytes
        self._chunks.move_to_end(number)
        return batch
