"""Results of a step as Arrow columns, and back.

1. Each column has one type, widened where a row needs it and nothing is lost (`_values.py`).
2. A row that does not fit is left out, and the reason is one sentence.
3. `decode` goes by the types of the batch alone, those of the moment when it was encoded. So a step
   that resumes reads what it read in the first run, whatever the columns have become since.
4. `state` goes into the progress file with the batch that changed it, or before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from ._values import (
    Conflict,
    Type,
    Unfit,
    arrow_type,
    as_dict,
    common_type,
    describe,
    read,
    show,
    to_python,
    unify,
)


class Columns:
    """Output columns of one step: their types so far, and the ways into Arrow and back."""

    def __init__(self, names: Sequence[str], state: str | None = None) -> None:
        """`state` is what `state()` returned in an earlier run."""
        self.names = list(names)
        stored = json.loads(state) if state else {}
        self._types = tuple(_as_type(stored.get(name, "unseen")) for name in self.names)

    def state(self) -> str:
        """JSON from which these columns can be made again."""
        return json.dumps(dict(zip(self.names, self._types, strict=True)))

    @property
    def schema(self) -> Any:
        """The types so far, as a `pyarrow.Schema`."""
        return pa.schema(list(zip(self.names, map(arrow_type, self._types), strict=True)))

    def encode(self, results: Sequence[Any]) -> tuple[Any, dict[int, str]]:
        """A `pyarrow.RecordBatch` of the results that fit, in order; place and reason of others.

        A result is the value itself where there is one column, else a mapping with every name.
        """
        rows: Mapping[int, Sequence[Any]] = {}
        reasons: dict[int, str] = {}
        if len(self.names) == 1:
            columns = [results]
        else:
            rows, reasons = self.split_rows(results)
            columns = self._transpose(rows)
        try:
            types = tuple(map(unify, self._types, map(common_type, columns)))
            arrays = list(map(_to_arrow, columns, types))
        except Exception:
            if len(self.names) == 1:
                rows = {place: (result,) for place, result in enumerate(results)}
            arrays, types = self._encode_each(rows, reasons)
        self._types = types
        return pa.RecordBatch.from_arrays(arrays, names=self.names), reasons

    def decode(self, batch: Any, places: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Rows of a batch by their places (None: all) as Python values, a dict of columns each."""
        if places is not None:
            batch = batch.take(pa.array(places, pa.int64()))
        columns = map(to_python, batch.columns)
        return [dict(zip(self.names, row, strict=True)) for row in zip(*columns, strict=True)]

    def cast(self, batch: Any) -> Any:
        """A batch that was encoded earlier, with the types of now."""
        pairs = zip(batch.columns, map(arrow_type, self._types), strict=True)
        return pa.RecordBatch.from_arrays([_cast(*pair) for pair in pairs], names=self.names)

    def split_rows(self, results: Sequence[Any]) -> tuple[dict[int, Sequence[Any]], dict[int, str]]:
        """Values by place of the results that have all columns and no other; reasons of others."""
        rows: dict[int, Sequence[Any]] = {}
        reasons: dict[int, str] = {}
        names = set(self.names)
        for place, result in enumerate(results):
            try:
                row = result if type(result) is dict else as_dict(result)
            except Exception:  # of a mapping that cannot be read
                row = None
            if row is not None and row.keys() == names:
                rows[place] = [row[name] for name in self.names]
                continue
            if row is None:
                fault = f"is {show(result)}"
            else:
                missing = [name for name in self.names if name not in row]
                extra = [name for name in row if name not in names]
                faults = [f"lacks {_listed(missing)}"] * bool(missing)
                faults += [f"has {_listed(extra)}, too"] * bool(extra)
                fault = " and ".join(faults)
            reasons[place] = _storable(
                f"each row's result must be a dict with {_listed(self.names)}, and this row's "
                + fault
            )
        return rows, reasons

    def _encode_each(
        self, rows: Mapping[int, Sequence[Any]], reasons: dict[int, str]
    ) -> tuple[list[Any], tuple[Type, ...]]:
        """Arrays of the rows that fit, and their types; the reasons of others are added."""
        types, plain = self._types, {}
        for place, row in rows.items():
            try:
                plain[place], types = self._read_row(row, types)
            except Unfit as error:
                reasons[place] = _storable(str(error))
        try:
            arrays = list(map(_to_arrow, self._transpose(plain), types))
        except Exception:
            for place, row in list(plain.items()):
                try:
                    for value, kind in zip(row, types, strict=True):
                        _to_arrow([value], kind)
                except Exception as error:
                    del plain[place]
                    reasons[place] = _storable(f"Arrow cannot hold this row's result: {error}")
            arrays = list(map(_to_arrow, self._transpose(plain), types))
        return arrays, types

    def _transpose(self, rows: Mapping[int, Sequence[Any]]) -> list[Sequence[Any]]:
        return list(zip(*rows.values(), strict=True)) or [()] * len(self.names)

    def _read_row(
        self, row: Sequence[Any], types: tuple[Type, ...]
    ) -> tuple[list[Any], tuple[Type, ...]]:
        plain, widened = [], []
        for name, so_far, value in zip(self.names, types, row, strict=True):
            try:
                item, kind = read(value)
                widened.append(unify(so_far, kind))
            except Conflict as error:
                where, held, new = error.args
                inside = f" in {where!r}, and {describe(new)} in" if where else ", and"
                raise Unfit(
                    f"column {name!r} holds {describe(held)} so far{inside} this row's result "
                    f"{'' if where else 'is '}{show(value)}"
                ) from None
            except Exception as error:
                reason = error if isinstance(error, Unfit) else f"{type(error).__name__}: {error}"
                raise Unfit(f"column {name!r} cannot take {show(value)}: {reason}") from None
            plain.append(item)
        return plain, tuple(widened)


def _to_arrow(values: Sequence[Any], kind: Type) -> Any:
    return pa.array(values, arrow_type(kind))


def _cast(array: Any, kind: Any) -> Any:
    if array.type == kind:
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), kind)
    # casts of structs and lists differ between versions of Arrow, and some drop fields
    nested = pa.types.is_nested(array.type)
    return pa.array(to_python(array), kind) if nested else array.cast(kind)


def _as_type(stored: Any) -> Type:
    return tuple(map(_as_type, stored)) if isinstance(stored, list) else stored


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names))


def _storable(reason: str) -> str:
    # a message may quote lone surrogates
    return reason.encode(errors="backslashreplace").decode()
