"""Results of a step as columns of canonical values, and the final type of each column.

1. `Columns.read` judges each row alone. A row that does not fit is left out, with one sentence.
2. The kind of a final column is decided once, from the kinds of all rows (`Kinds`): the narrowest
   kind that takes all values without loss, else the kind that most rows fit. Neither the order of
   the rows nor their grouping changes it.
3. A declared type takes values that are the same in it, but for the digits of floats. The value
   itself stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isinf
from operator import itemgetter
from typing import Any, Final

import numpy as np
import pyarrow as pa

from .arrow import to_python
from .packing import pack
from .values import (
    Kind,
    Unfit,
    arrow_type,
    as_dict,
    describe_kind,
    read_column,
    show,
    to_array,
    unify,
)

MAX_BYTES: Final = 2**26
"""Most bytes of values that are packed together, unless they are of one row."""
MOST_KINDS: Final = 256
"""Kinds of one column that are counted."""

Read = list[tuple[Any, Mapping[Kind, int]]]
"""Canonical values of each column, and their kinds."""


@dataclass(slots=True)
class Values:
    """Canonical results of one step."""

    columns: list[list[Any]]  # one list for each output column; only rows that fit
    kinds: list[Mapping[Kind, int]]  # of each output column
    places: list[int]  # places in the results of the rows that fit
    misfits: dict[int, str]  # place -> reason
    packed: list[tuple[int, bytes]]  # rows and values, in parts


class Columns:
    """Output columns of one step."""

    def __init__(
        self, names: Sequence[str], declared: Mapping[str, pa.DataType] | None = None
    ) -> None:
        self.names = list(names)
        self.declared = dict(declared or {})

    def read(self, results: Sequence[Any]) -> Values:
        """Return the canonical form of results; raise nothing.

        A result is the value itself where there is one column, else a mapping with every name.
        """
        places, misfits = list(range(len(results))), dict[int, str]()
        try:
            read = self._read(results)
        except Exception:
            for place, result in enumerate(results):
                try:
                    self._read([result])
                except Exception as error:
                    # a message may quote lone surrogates
                    misfits[place] = str(error).encode(errors="backslashreplace").decode()
            places = [place for place in places if place not in misfits]
            read = self._read([results[place] for place in places])
        packed = _pack([column for column, _ in read])
        columns = [list(column) for column, _ in read]
        return Values(columns, [kinds for _, kinds in read], places, misfits, packed)

    def _read(self, results: Sequence[Any]) -> Read:
        """Return the canonical values of each column, and their kinds; raise for a misfit."""
        if not results:
            return [([], {}) for _ in self.names]
        columns = [results] if len(self.names) == 1 else zip(*map(self._row, results), strict=True)
        return [self._column(*each) for each in zip(self.names, columns, strict=True)]

    def _row(self, result: Any) -> list[Any]:
        """Return the values of one result by column; raise `Unfit` if there are other columns."""
        row = as_dict(result)
        if row is None or row.keys() != set(self.names):
            names = ", ".join(map(repr, self.names))
            raise Unfit(
                f"each row's result must be a dict with {names}, and this is {show(result)}"
            )
        return [row[name] for name in self.names]

    def _column(self, name: str, values: Sequence[Any]) -> tuple[Any, Mapping[Kind, int]]:
        try:
            plain, kinds = read_column(values)
            if (declared := self.declared.get(name)) is not None:
                array = to_array(plain, declared)
                if not all(map(_equal, plain, to_python(array))):
                    raise Unfit(f"the column is declared as {declared}")
        except Exception as error:
            raise Unfit(f"column {name!r} cannot take {show(values[0])}: {error}") from None
        return plain, kinds


def _equal(value: Any, declared: Any) -> bool:
    """Return whether a value is the same in its declared type, but for the digits of floats."""
    if isinstance(declared, dict):
        return all(_equal(value.get(name), declared.get(name)) for name in value | declared)
    if isinstance(declared, np.ndarray):
        alike = np.isinf if declared.dtype.kind == "f" else np.asarray
        return np.array_equal(alike(value), alike(declared))
    if isinstance(declared, list):
        return all(map(_equal, value, declared))
    if isinstance(declared, float):
        return isinf(value) == isinf(declared)
    return bool(value == declared)


def _pack(columns: Sequence[Any]) -> list[tuple[int, bytes]]:
    """Return the numbers of rows, and their values as bytes, in parts of at most `MAX_BYTES`."""
    rows, data = len(columns[0]), pack(columns)
    if rows > 1 and len(data) > MAX_BYTES:
        half = rows // 2
        first, rest = [each[:half] for each in columns], [each[half:] for each in columns]
        return _pack(first) + _pack(rest)
    return [(rows, data)] if rows else []


class Kinds:
    """Kinds of the values of one column, and the kind of the column."""

    def __init__(self) -> None:
        self._common: Kind | None = "unseen"  # of all so far; None: there is none
        self._counts: Counter[Kind] = Counter()

    def add(self, kinds: Mapping[Kind, int]) -> None:
        """Count rows by kind."""
        for kind, rows in kinds.items():
            try:
                self._common = self._common and unify(self._common, kind)
            except Unfit:
                self._common = None
            if kind != "any":
                self._counts[kind] += rows
            if len(self._counts) > MOST_KINDS:  # which one is dropped depends on no order
                del self._counts[max(self._counts, key=repr)]

    @property
    def agree(self) -> bool:
        """Whether one kind takes all values; else `final` needs the kind of every single row."""
        return self._common not in (None, "any")

    def final(self) -> Kind:
        """Return the kind of the column."""
        if self.agree:
            return self._common  # type: ignore[return-value]  # no None
        groups: list[tuple[int, Kind]] = [(0, "unseen")]  # kinds with a common one
        for kind, rows in sorted(self._counts.items(), key=lambda one: (-one[1], repr(one[0]))):
            for place, (total, common) in enumerate(groups):
                with suppress(Unfit):
                    groups[place] = total + rows, unify(common, kind)
                    break
            else:
                groups.append((rows, kind))
        return max(groups, key=itemgetter(0))[1]


def fit(column: Any, kind: Kind | pa.DataType) -> tuple[Any, dict[int, str]]:
    """Return a column as an Arrow array of its final kind, or of a declared type.

    The column is a list of canonical values, or an array with a row for each. Values that do not
    fit are null; the dict has the reason for each by its place.
    """
    misfits: dict[int, str] = {}
    try:
        return _convert(column, kind), misfits
    except Exception:
        column = list(column)
    for place, value in enumerate(column):
        try:
            _convert([value], kind)
        except Exception:
            column[place] = None
            misfits[place] = (
                f"the column holds {describe_kind(kind)}, and this row's value is {show(value)}"
            )
    return to_array(column, arrow_type(kind)), misfits


def _convert(values: Sequence[Any], kind: Any) -> Any:
    # Arrow itself would take 1.5 as an integer, and drop unknown fields.
    is_open = not isinstance(kind, pa.DataType)
    if is_open and any(unify(kind, each) != kind for each in read_column(values)[1]):
        raise Unfit
    return to_array(values, arrow_type(kind))
