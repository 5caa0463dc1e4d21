"""The join of a source with the committed results, in the order of the source.

1. A row is in the result if all steps have a result for it; with `keep_failed` also if it failed:
   then the columns that it lacks are null, and `_error` has the reason.
2. The result has the kept columns of the source, then the output columns of the steps. A step's
   column takes the place of an earlier one of the same name.
3. In a typed result each column has one type: the source's own, a declared one, or the narrowest
   that takes the values of all rows. If there is none, rows of the minority are left out, as dead
   letters of phase `output` of this result; their values stay committed. Text takes all values.
4. A row never gets the result of another one: the keys that are read now must be the keys that the
   run has read, and the files must be unchanged until the result appears.
5. Rows are joined window by window. Chunks that were read last stay in memory: a source in another
   order than that of the run reads chunks again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa

from ...errors import SourceError
from ..progress.commit import Letter, letter_text
from ..progress.store import Progress
from ..sources.base import Source, Window
from ..sources.errors import row_name
from ..sources.keys import keys_of
from ..types.columns import Columns, Kinds, fit
from ..types.packing import join
from ..types.values import Kind, arrow_type, read_column, unify
from .opening import Result

WINDOW_ROWS: Final = 8192
"""Rows of the source that are joined at once, at most."""
WINDOW_BYTES: Final = 32 << 20
"""Bytes of results that a window has on average, at most."""
ERROR: Final = "_error"
"""Column of the reasons why rows failed."""


@dataclass
class Merge:
    """The join of one source with one progress file."""

    source: Source
    progress: Progress
    result: Result
    columns: Sequence[Columns]
    """Output columns of each step."""
    keep: Sequence[str] | None = None
    """Columns of the source; None: all."""
    key: str | None = None
    """Key column of the source, if there is one."""
    keep_failed: bool = False
    # kinds of the kept columns, in the order in which they were read, unless Arrow has types
    _kept: dict[str, Kinds] = field(default_factory=dict)
    _kinds: dict[str, Any] = field(default_factory=dict)  # or Arrow types, by column; None: text

    def note_kinds(self, window: Window) -> None:
        """Note the kinds of kept values of Python. A value of no kind is a fault of its row."""
        for name in filter(self._is_kept, window.columns if self.keep is None else self.keep):
            kinds = self._kept.setdefault(name, Kinds())
            if self.result.is_typed:
                values = Columns([name]).read(window.values(name))
                for place, why in values.misfits.items():
                    window.note_fault(place, why)
                kinds.add(values.kinds[0])

    def write(self, note_letters: Callable[[Sequence[Letter]], object]) -> int:
        """Write all rows, which stay hidden. Return the number of rows with results.

        `note_letters` gets the rows left out by rule 3; an error of it ends the merge.
        """
        vars(self.progress).pop("chunk", None)  # steps may have changed values in memory
        is_typed = self.result.is_typed
        schema = self.source.schema
        names = [*filter(self._is_kept, self._kept if schema is None else schema.names)]
        self._kinds = dict.fromkeys([*names, *self._last_steps, *[ERROR] * self.keep_failed])
        columns: Any = list(self._kinds)
        if is_typed:
            known = {name: kind.final() for name, kind in self._kept.items()}
            known |= {field.name: field.type for field in schema or ()}
            known |= {ERROR: "str"} | self._kinds_of_steps()
            self._kinds = {name: known[name] for name in columns}
            columns = pa.schema([(name, arrow_type(kind)) for name, kind in self._kinds.items()])
        good = 0
        with closing(self.result.create(columns)) as rows:
            read = [*names, *filter(None, [self.key])]
            for window in self.source.windows(read, self._window_rows, required=[]):
                self._check_rows(window)
                piece, ok, letters = self._join(window)
                good += ok
                note_letters(letters)
                rows.write(pa.table(piece, columns) if is_typed else piece)
        self.source.check_unchanged()
        return good

    @cached_property
    def _window_rows(self) -> int:
        rows, size = self.progress.source_rows, self.progress.nbytes
        return max(1, min(WINDOW_ROWS, WINDOW_BYTES * rows // (size + 1)))

    @cached_property
    def _last_steps(self) -> dict[str, int]:
        """Output columns, each with the last step that writes it."""
        return {name: step for step, each in enumerate(self.columns) for name in each.names}

    def _is_kept(self, name: str) -> bool:
        if name in self._last_steps or (name == ERROR and self.keep_failed):
            return False
        return self.keep is None or name in self.keep

    def _kinds_of_steps(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, columns in enumerate(self.columns):
            for name, kind in zip(columns.names, self._final_kinds(number), strict=True):
                kind = unify(kind, "null" if self.keep_failed else "unseen")
                found[name] = columns.declared.get(name) or kind
        return found

    def _final_kinds(self, step: int) -> list[Kind]:
        """Return the kinds of a step's columns: of its chunks, or of all values in a conflict."""
        stored = self.progress.kinds(step)
        kinds = [Kinds() for _ in self.columns[step].names]
        for each in filter(None, stored):
            for kind, one in zip(kinds, each, strict=True):
                kind.add({one: 1})
        if None in stored or not all(kind.agree for kind in kinds):
            kinds = [Kinds() for _ in kinds]
            for first in range(0, self.progress.source_rows, self._window_rows):
                chunks, places = self._locate(first, self._window_rows)
                read = self._read(step, chunks[step], places[step])
                for kind, column in zip(kinds, read, strict=True):
                    kind.add(read_column(column)[1])
        return [kind.final() for kind in kinds]

    def _check_rows(self, window: Window) -> None:
        """Raise `SourceError` if the run has read other rows."""
        first, size = window.first, window.size
        changes = ["it has more rows now"] * (first + size > self.progress.source_rows)
        if self.key is not None:
            keys = keys_of(window, self.key)
            changes += [
                f"{row_name(row)} had the key {key!r}, and has {keys[row - first]!r} now"
                for row, key in self.progress.keys_of_rows(first, size).items()
                if keys[row - first] != key
            ]
        if changes:
            raise SourceError(
                f"{self.source.name} has changed since the run read it: {changes[0]}; run again: "
                "rows that are as they were are not computed again"
            )

    def _join(self, window: Window) -> tuple[dict[str, Any], int, list[Letter]]:
        """Return the columns of a window, its good rows, and letters for rows left out."""
        first, size = window.first, window.size
        chunks, places = self._locate(first, size)
        chunks[:, list(window.faults)] = 0  # of an earlier run, which could read the row
        shown = ok = (chunks > 0).all(0)
        reasons: dict[int, str] = {}
        if self.keep_failed:
            failures = self.progress.failures(first, size)
            reasons = {row - first: orjson.loads(error)["error"] for row, error in failures.items()}
            shown = ok | np.isin(np.arange(size), list(reasons))
        kept = {
            name: self._kept_column(window, name) for name in self._kinds if self._is_kept(name)
        }
        computed: dict[str, tuple[Any, Any]] = {}  # values, and the place of each row among them
        for step, columns in enumerate(self.columns):
            rows = np.flatnonzero(shown & (chunks[step] > 0))
            back = np.full(size, -1)
            back[rows] = np.arange(len(rows))
            read = self._read(step, chunks[step, rows], places[step, rows])
            for name, column in zip(columns.names, read, strict=True):
                if self._last_steps[name] == step:  # no later step replaces it
                    computed[name] = self._fit(window, name, column, rows), back
        odd = sorted([row for row in window.faults if ok[row]])  # found since
        ok[odd] = False
        keys = self.progress.keys_of_rows(first, size) if odd else {}
        letters = [
            Letter(first + row, keys[first + row], letter_text("output", window.faults[row]))
            for row in odd
        ]
        if self.keep_failed:
            reasons |= {row: window.faults[row] for row in odd}
            kept[ERROR] = [reasons.get(row) for row in range(size)]
        shown = np.flatnonzero(shown)
        piece = {}
        for name in self._kinds:
            column, back = computed.get(name) or (kept[name], np.arange(size))
            piece[name] = _take(column, back[shown])
        return piece, int(ok.sum()), letters

    def _locate(self, first: int, size: int) -> Any:
        """Return chunks and places of the values of rows, by step; chunk 0: there is none."""
        found = np.zeros((2, len(self.columns), size), int)
        flat = list(chain.from_iterable(self.progress.locate_values(first, size)))
        row, step, chunk, place = np.array(flat, int).reshape(-1, 4).T
        found[:, step, row - first] = chunk, place
        return found

    def _read(self, step: int, chunks: Any, places: Any) -> list[Any]:
        """Return the columns of a step, for the rows that have a value."""
        if not chunks.any():
            return [[] for _ in self.columns[step].names]
        order, parts = [], []
        for number in np.unique(chunks[chunks > 0]).tolist():
            rows = np.flatnonzero(chunks == number)
            order.append(rows)
            parts.append([_take(column, places[rows]) for column in self.progress.chunk(number)])
        back = np.argsort(np.concatenate(order))
        return [_take(join(column), back) for column in zip(*parts, strict=True)]

    def _fit(self, window: Window, name: str, column: Any, places: Any) -> Any:
        """Return a column of the final kind. A value that does not fit is a fault of its row."""
        if (kind := self._kinds[name]) is None:
            return list(column)
        array, reasons = fit(column, kind)
        for place, why in reasons.items():
            window.faults[int(places[place])] = f"column {name!r}: {why}"
        return array

    def _kept_column(self, window: Window, name: str) -> Any:
        """Return a column of the source for all rows of a window."""
        column = window.columns.get(name, [None] * window.size)
        is_text = self._kinds[name] is None
        if not isinstance(column, list):
            return window.values(name) if is_text else column
        if is_text and self.source.files is not None:
            return column  # as it was read
        values = Columns([name]).read(column)
        window.faults.update(values.misfits)
        found = dict(zip(values.places, values.columns[0], strict=True))
        places = range(window.size)
        return self._fit(window, name, list(map(found.get, places)), places)


def _take(column: Any, places: Any) -> Any:
    """Return the values of a column at these places; a place of -1 is null."""
    if isinstance(column, list):
        padded = [*column, None]
        return [padded[place] for place in places.tolist()]
    if isinstance(column, np.ndarray):
        return column[places]
    return column.take(pa.array(places, pa.int64(), mask=places < 0))
