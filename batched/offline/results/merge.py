"""The join of a source with the committed results, in the order of the source.

1. A row is in the result if all steps have a result for it; with `keep_failed` also if it failed:
   then the columns of the steps are null, and `_error` has the reason.
2. The result has the kept columns of the source, then the output columns of the steps. A step's
   column takes the place of an earlier one of the same name.
3. In a typed result each column has one type: the source's own, a declared one, or the narrowest
   that takes the values of all rows. If there is none, rows of the minority are left out, as dead
   letters of phase `output` of this result; their values stay committed. Text takes all values.
4. A row never gets the result of another one: the keys that are read now must be the keys that the
   run has read, and the files must be unchanged until the result appears.
5. At most `PIECE_BYTES` of results are joined at once, and chunks are read as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa

from ...errors import SourceError
from ..failures import letter_text
from ..progress.commit import Letter
from ..progress.store import Progress
from ..sources.base import Source, Window
from ..sources.keys import keys_of
from ..types.columns import Columns, Kinds, fit, without_empty
from ..types.packing import join
from ..types.values import arrow_type, unify
from .committed import Committed
from .formats import Parquet, find_surrogates
from .local import Result, Stamp

WINDOW_ROWS: Final = 8192
"""Rows of the source that are read at once."""
PIECE_BYTES: Final = 32 << 20
"""Bytes of results that are joined at once, unless one row has more."""
ERROR: Final = "_error"
"""Column of the reasons why rows failed."""


@dataclass
class Merge:
    """The join of one source with one progress file."""

    source: Source
    progress: Progress
    columns: Sequence[Columns]
    """Output columns of each step."""
    keep: Sequence[str] | None = None
    """Columns of the source; None: all."""
    key: str | None = None
    """Key column of the source, if there is one."""
    keep_failed: bool = False
    _kinds: dict[str, Any] = field(default_factory=dict)  # or Arrow types, by column; None: text
    _is_csv: bool = False
    _misfits: dict[int, str] = field(default_factory=dict)  # reasons by place in the window

    def check(self, result: Result) -> None:
        """Raise `SourceError` if Parquet has no type for a kept column."""
        if result.is_typed and self.source.schema is not None:
            fields = [field for field in self.source.schema if self._is_kept(field.name)]
            try:
                Parquet(iter([pa.BufferOutputStream()]), pa.schema(fields)).close()
            except pa.ArrowException as error:
                raise SourceError(
                    f"Parquet cannot hold a column of {self.source.name}: {error}; keep=[...] "
                    "leaves columns out of the result"
                ) from error

    def write(
        self,
        result: Result,
        kept: Mapping[str, Kinds],
        note_letters: Callable[[Sequence[Letter]], object],
        note: Callable[[Sequence[Stamp]], object],
    ) -> list[Stamp]:
        """Write all rows, and publish the result. Return the stamps of `publish`.

        `kept` has the columns of the source in order, with their kinds unless they are Arrow's.
        `note_letters` gets the rows left out by rule 3; an error of it ends the merge.
        """
        self.progress.clear_letters("output")
        self._is_csv = result.suffix == ".csv"
        schema = self.source.schema
        names = [*filter(self._is_kept, kept if schema is None else schema.names)]
        self._kinds = dict.fromkeys([*names, *self._last_steps, *[ERROR] * self.keep_failed])
        columns: Any = list(self._kinds)
        values = Committed(self.progress, len(self.columns))
        if result.is_typed:
            known = {name: without_empty(kind.final()) for name, kind in kept.items()}
            known |= {field.name: field.type for field in schema or ()}
            known |= {ERROR: "str"} | self._kinds_of_steps(values)
            self._kinds = {name: known[name] for name in columns}
            columns = pa.schema([(name, arrow_type(kind)) for name, kind in self._kinds.items()])
        rows = result.create(columns)
        try:
            read = [*names, *filter(None, [self.key])]
            for window in self.source.windows(read, WINDOW_ROWS, required=[]):
                self._check_rows(window)
                for piece, letters in self._join(window, values):
                    if letters:
                        self.progress.add_letters("output", letters)
                        note_letters(letters)
                    rows.write(pa.table(piece, columns) if result.is_typed else piece)
            rows.close()
            self.source.check_unchanged()
            return result.publish(note)
        finally:
            with suppress(Exception):  # most likely of a full disk
                rows.close()
            result.abort()

    @cached_property
    def _last_steps(self) -> dict[str, int]:
        """Output columns, each with the last step that writes it."""
        return {name: step for step, each in enumerate(self.columns) for name in each.names}

    def _is_kept(self, name: str) -> bool:
        if name in self._last_steps or (name == ERROR and self.keep_failed):
            return False
        return self.keep is None or name in self.keep

    def _kinds_of_steps(self, values: Committed) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, columns in enumerate(self.columns):
            kinds = values.final_kinds(number, len(columns.names))
            for name, kind in zip(columns.names, kinds, strict=True):
                kind = unify(without_empty(kind), "null" if self.keep_failed else "unseen")
                found[name] = columns.declared.get(name) or kind
        return found

    def _check_rows(self, window: Window) -> None:
        """Raise `SourceError` if the run has read other rows."""
        first, size = window.first, window.size
        changes = ["it has more rows now"] * (first + size > self.progress.source_rows)
        if self.key is not None:
            keys = keys_of(window, self.key)
            changes += [
                f"{window.where(row)} had the key {key!r}, and has {keys[row - first]!r} now"
                for row, key in self.progress.keys_of_rows(first, size).items()
                if keys[row - first] != key
            ]
        if changes:
            raise SourceError(
                f"{self.source.name} has changed since the run read it: {changes[0]}; run again: "
                "rows that are as they were are not computed again"
            )

    def _join(
        self, window: Window, values: Committed
    ) -> Iterator[tuple[dict[str, Any], list[Letter]]]:
        """Yield the columns of consecutive rows of the result, and rows that it cannot take."""
        first, size = window.first, window.size
        ok, sizes = values.find(first, size)
        ok[list(window.faults)] = False
        misfits = self._misfits = {}
        kept = {
            name: self._kept_column(window, name) for name in self._kinds if self._is_kept(name)
        }
        misfits |= window.faults  # some values have no form as text
        failures = self.progress.failures(first, size) if self.keep_failed else {}
        failed = {row - first: orjson.loads(error)["error"] for row, error in failures.items()}
        pieces = np.cumsum(sizes) // PIECE_BYTES
        for places in np.split(np.arange(size), np.flatnonzero(np.diff(pieces)) + 1):
            piece = slice(places[0], places[-1] + 1)
            columns = {name: column[piece] for name, column in kept.items()}
            for step in range(len(self.columns)):
                columns |= self._gather(step, values, first, places)
            for name, column in columns.items() if self._is_csv else ():
                for at in find_surrogates(column):
                    reason = "CSV cannot hold a text with a lone surrogate"
                    misfits[int(places[at])] = f"column {name!r}: {reason}"
                    columns[name] = column = [*column[:at], None, *column[at + 1 :]]
            odd = [place for place in misfits if place in places and ok[place]]
            ok[odd] = False
            keys = self.progress.keys_of_rows(first, size) if odd else {}
            letters = [
                Letter(row := first + place, keys[row], letter_text("output", misfits[place]))
                for place in odd
            ]
            shown = ok[piece]
            if self.keep_failed:
                reasons = failed | {place: misfits[place] for place in odd}
                columns[ERROR] = [reasons.get(place) for place in places.tolist()]
                shown = shown | np.isin(places, list(reasons))
            shown = np.flatnonzero(shown)
            yield {name: _take(columns[name], shown) for name in self._kinds}, letters

    def _gather(self, step: int, values: Committed, first: int, places: Any) -> dict[str, Any]:
        """Return the columns of a step for rows of a window; null where a row has no value."""
        parts = list(values.read(step, first + places))
        order = np.concatenate([[], *[part for part, _ in parts]]).astype(int)
        back = np.full(len(places), -1)
        back[order] = np.arange(len(order))
        gathered: dict[str, Any] = {}
        for number, name in enumerate(self.columns[step].names):
            if self._last_steps[name] == step:  # no later step replaces it
                column = join([columns[number] for _, columns in parts])
                gathered[name] = _take(self._fit(name, column, places[order]), back)
        return gathered

    def _fit(self, name: str, column: Any, places: Any) -> Any:
        """Return a column of the final kind; note values that do not fit by their places."""
        if (kind := self._kinds[name]) is None:
            return list(column)
        array, reasons = fit(column, kind)
        for place, why in reasons.items():
            self._misfits[int(places[place])] = f"column {name!r}: {why}"
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
        self._misfits |= values.misfits
        found = dict(zip(values.places, values.columns[0], strict=True))
        places = range(window.size)
        return self._fit(name, list(map(found.get, places)), places)


def _take(column: Any, places: Any) -> Any:
    """Return the values of a list or an Arrow array at these places; a place below 0 is null."""
    if isinstance(column, list):
        return [None if place < 0 else column[place] for place in places.tolist()]
    return column.take(pa.array(places, pa.int64(), mask=places < 0))
