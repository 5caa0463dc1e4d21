"""BatchPredictor: a predictor of batches as Ray Data hands them over. It does without Ray.

A batch is a dict of numpy arrays, a pandas DataFrame or a pyarrow Table, and comes back as the same
kind, row by row in order. Rules for the columns that are added:

1. In a Table they have Arrow's types, lists for arrays. Rows that failed are null.
2. Elsewhere arrays of one shape become one array, of which Ray makes a tensor. It has no room for
   None: rows that failed are NaN, or zero. In all other columns they are None.
3. A row that comes with `_status` "failed" is not computed, and keeps its `_error`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from .._batched import _BatchedBase
from .failures import error_text
from .predictor import Predictor
from .sources.base import missing_column
from .step import Step, check_names
from .types.arrow import to_python
from .types.columns import Columns, Kinds, fit
from .types.values import Kind, arrow_type, is_tensor, of_tensor

STATUS: Final = "_status"
"""Column that holds `OK` or `FAILED`."""
ERROR: Final = "_error"
"""Column of errors, as `ValueError: bad row`. A row without an error has empty text, not None: a
block with nothing but None has no type, and files of several blocks could not be read together.
"""
Reasons = dict[int, str]
"""Reasons why results do not fit, by place."""

OK: Final = "ok"
FAILED: Final = "failed"

_NUMBERS: Final = (bool, int, float, np.bool_, np.number)


class BatchPredictor:
    """A batch function, plain or decorated, or a class of one, for `ray.data.Dataset.map_batches`:

        dataset.map_batches(
            offline.BatchPredictor,
            fn_constructor_args=(embed,),
            fn_constructor_kwargs={"input": "text", "output": "vector"},
            compute=ray.data.ActorPoolStrategy(size=2),
            batch_size=256,
        )

    Rows come back with the columns in `output`, with `_status`, "ok" or "failed", and `_error`, as
    "ValueError: bad row", or "". A row that fails costs itself alone, and memory errors cost
    nothing. Settings are those of a `Step`, without `workers`, `processes`, `timeout_s`,
    `num_cpus` and `num_gpus`; `batch_size` is all rows of a batch by default.

    Raises:
        TypeError, ValueError: a setting is wrong.
        Exception: the class could not be built.
    """

    def __init__(self, fn: Callable[..., Any], **settings: Any) -> None:
        check_names("BatchPredictor", settings, [each.name for each in fields(Step)])
        for name in ("input", "output"):
            if name not in settings:
                raise TypeError(f"BatchPredictor needs {name}=, the name of a column, or several")
        step = Step(fn, **settings)
        if step.batch_size is None and not isinstance(fn, _BatchedBase):
            step = replace(step, batch_size=sys.maxsize)
        self._step = step
        self._predictor = Predictor(step)
        self._columns = Columns(step.outputs, step.declared)
        self._kinds = {name: Kinds() for name in step.outputs}  # of all batches so far
        # shape and dtype of the values, of columns of arrays of one shape
        self._shapes: dict[str, tuple[tuple[int, ...], Any]] = {}

    def __call__(self, batch: Any) -> Any:
        """Return the rows of a batch with the columns of the step, `_status` and `_error`.

        Raises:
            SourceError: a column is missing.
            RunStopped: one batch after another failed as a whole: the function is broken.
        """
        form = _form(batch)
        names = form.names(batch)
        for name in self._step.inputs:
            if name not in names:
                raise missing_column(name, "the batch", names)
        size = form.size(batch)
        errors = [""] * size
        places: Iterable[int] = range(size)
        if STATUS in names:
            before = form.values(batch, STATUS)
            places = [place for place in places if before[place] != FAILED]
            errors = form.values(batch, ERROR) if ERROR in names else errors
        inputs = {name: form.values(batch, name) for name in self._step.inputs}
        results = self._predictor.rows(
            [{name: values[place] for name, values in inputs.items()} for place in places]
        )
        good: dict[int, Any] = {}  # results by place
        for place, result in zip(places, results, strict=True):
            if isinstance(result, BaseException):
                errors[place] = error_text(result).error
            else:
                good[place] = result
        columns, reasons = (self._in_arrow if form.is_arrow else self._in_numpy)(good, size)
        for place, reason in reasons.items():
            del good[place]
            errors[place] = reason
        columns[STATUS] = [OK if place in good else FAILED for place in range(size)]
        columns[ERROR] = errors
        return form.extended(batch, columns)

    def _in_arrow(self, results: Mapping[int, Any], size: int) -> tuple[dict[str, Any], Reasons]:
        """Return arrays of the results by place, and reasons of those that do not fit."""
        values = self._columns.read(list(results.values()))
        places = list(results)
        reasons = {places[at]: why for at, why in values.misfits.items()}
        for name, kinds in zip(self._columns.names, values.kinds, strict=True):
            self._kinds[name].add(kinds)
        at = {places[row]: number for number, row in enumerate(values.places)}
        taken = pa.array([at.get(place) for place in range(size)], pa.int64())
        columns: dict[str, Any] = {}
        for name, column in zip(self._columns.names, values.columns, strict=True):
            final = self._columns.declared.get(name) or _open_lists(self._kinds[name].final())
            array, misfits = fit(column, final)
            columns[name] = array.take(taken)
            reasons.update({places[values.places[row]]: why for row, why in misfits.items()})
        return columns, reasons

    def _in_numpy(self, results: Mapping[int, Any], size: int) -> tuple[dict[str, Any], Reasons]:
        """Return arrays of the results by place, and reasons of those that do not fit."""
        names = self._step.outputs
        if len(names) == 1:
            return {names[0]: self._joined(names[0], results, size)}, {}
        rows: dict[int, list[Any]] = {}
        reasons: Reasons = {}
        for place, result in results.items():
            try:
                rows[place] = self._columns.row(result)
            except Exception as error:
                reasons[place] = str(error)
        columns = {
            name: self._joined(name, {place: row[number] for place, row in rows.items()}, size)
            for number, name in enumerate(names)
        }
        return columns, reasons

    def _joined(self, name: str, results: Mapping[int, Any], size: int) -> Any:
        """Return an array of the results by place, with NaN, zero, `[]` or None elsewhere."""
        values = {place: _plain(value) for place, value in results.items()}
        column: Any = np.empty(size, "O")
        kinds = {type(value) for value in values.values()}
        if kinds == {np.ndarray}:
            shapes = {value.shape for value in values.values()}
            dtype = np.result_type(*{value.dtype for value in values.values()})
            if len(shapes) == 1:
                self._shapes[name] = *shapes, dtype
            else:
                self._shapes.pop(name, None)
                for place in range(size):
                    column[place] = np.empty((0,) * max(map(len, shapes)), dtype)
        if kinds <= {np.ndarray} and name in self._shapes:
            # also if all rows have failed: the column is to be as it was in the batch before
            shape, dtype = self._shapes[name]
            column = np.zeros((size, *shape), dtype)
            if dtype.kind == "f":
                column[:] = np.nan
        elif len(values) == size and len(kinds) == 1 and issubclass(kinds.pop(), _NUMBERS):
            return np.array(list(values.values()))
        for place, value in values.items():
            column[place] = value
        return column


class _Form(Protocol):
    """A format of batches."""

    is_arrow: bool

    def names(self, batch: Any) -> list[str]: ...

    def size(self, batch: Any) -> int: ...

    def values(self, batch: Any, name: str) -> list[Any]:
        """Return a column as items of a batch function."""
        ...

    def extended(self, batch: Any, columns: Mapping[str, Any]) -> Any:
        """Return the batch with these columns, which replace columns of the same names."""
        ...


class _Arrays:
    is_arrow = False

    def names(self, batch: Mapping[str, Any]) -> list[str]:
        return list(batch)

    def size(self, batch: Mapping[str, Any]) -> int:
        return max(map(len, batch.values()), default=0)

    def values(self, batch: Mapping[str, Any], name: str) -> list[Any]:
        return _from_array(np.asarray(batch[name]))

    def extended(self, batch: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        return {**batch, **{name: _objects(column) for name, column in columns.items()}}


class _Frame:
    is_arrow = False

    def names(self, batch: Any) -> list[str]:
        return list(batch.columns)

    def size(self, batch: Any) -> int:
        return len(batch)

    def values(self, batch: Any, name: str) -> list[Any]:
        column = batch[name]
        values = _from_array(column.to_numpy())
        if isinstance(column.dtype, np.dtype):
            return values
        # pandas' own types have a None of their own
        missing = column.isna()
        return [None if lost else value for value, lost in zip(values, missing, strict=True)]

    def extended(self, batch: Any, columns: Mapping[str, Any]) -> Any:
        arrays = {name: _objects(column) for name, column in columns.items()}
        return batch.assign(
            **{name: list(array) if array.ndim > 1 else array for name, array in arrays.items()}
        )


class _Table:
    is_arrow = True

    def names(self, batch: Any) -> list[str]:
        names: list[str] = batch.column_names
        return names

    def size(self, batch: Any) -> int:
        size: int = batch.num_rows
        return size

    def values(self, batch: Any, name: str) -> list[Any]:
        return to_python(batch.column(name))

    def extended(self, batch: Any, columns: Mapping[str, Any]) -> Any:
        for name, column in columns.items():
            array = pa.array(column, pa.string()) if isinstance(column, list) else column
            if name in batch.column_names:
                batch = batch.set_column(batch.column_names.index(name), name, array)
            else:
                batch = batch.append_column(name, array)
        return batch


def _form(batch: Any) -> _Form:
    if isinstance(batch, pa.Table):
        return _Table()
    if isinstance(batch, Mapping):
        return _Arrays()
    if type(batch).__module__.split(".")[0] == "pandas":
        return _Frame()
    raise TypeError(
        "a batch must be a dict of numpy arrays, a pandas DataFrame or a pyarrow Table, as "
        f"map_batches has them by batch_format=, got a {type(batch).__name__}"
    )


def _from_array(array: Any) -> list[Any]:
    """Return the rows: values of Python, or arrays if the array has several dimensions."""
    values: list[Any] = (
        array.tolist() if array.ndim == 1 and array.dtype.kind in "biufUSO" else [*array]
    )
    return values


def _plain(value: Any) -> Any:
    """Return the value as an array or a scalar of numpy, if it is a tensor."""
    if is_tensor(value):
        value = of_tensor(value)
    return value[()] if isinstance(value, np.ndarray) else value


def _objects(column: Any) -> Any:
    """Return a list as an array of objects."""
    return np.array(column, "O") if isinstance(column, list) else column


def _open_lists(kind: Kind) -> Any:
    """Return the Arrow type of a column; arrays are open lists: shapes may change."""
    if kind[0] == "array" and len(kind[2] or "1") == 1:
        return pa.list_(pa.from_numpy_dtype(kind[1]))
    return arrow_type(kind)
