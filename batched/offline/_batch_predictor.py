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
from ._arrow import to_python
from ._columns import Columns
from ._errors import describe
from ._predictor import Predictor
from ._step import Step, check_names
from ._values import is_tensor, of_tensor
from ._window import missing_column

STATUS: Final = "_status"
"""Column that holds `OK` or `FAILED`."""
ERROR: Final = "_error"
"""Column that holds the error of a row, as `ValueError: bad row`. It is empty where there is none,
rather than None: a block of Nones has no type, and files of such blocks cannot be read together.
"""
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
        self._columns = Columns(step.outputs)
        # shape and dtype of the values, of columns of arrays of one shape
        self._kinds: dict[str, tuple[tuple[int, ...], Any]] = {}

    def __call__(self, batch: Any) -> Any:
        """The rows of a batch, and what became of them.

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
                errors[place] = describe(result).error
            else:
                good[place] = result
        columns, reasons = (self._in_arrow if form.is_arrow else self._in_numpy)(good, size)
        for place, reason in reasons.items():
            del good[place]
            errors[place] = reason
        columns[STATUS] = [OK if place in good else FAILED for place in range(size)]
        columns[ERROR] = errors
        return form.extended(batch, columns)

    def _in_arrow(
        self, results: Mapping[int, Any], size: int
    ) -> tuple[dict[str, Any], dict[int, str]]:
        """Arrays of the results by place; reasons of those that do not fit."""
        batch, reasons = self._columns.encode(list(results.values()))
        unfit = {place: reasons[row] for row, place in enumerate(results) if row in reasons}
        fit = [place for place in results if place not in unfit]
        rows = {place: row for row, place in enumerate(fit)}
        taken = pa.array([rows.get(place) for place in range(size)], pa.int64())
        return {
            name: _with_lists(batch.column(name)).take(taken) for name in batch.schema.names
        }, unfit

    def _in_numpy(
        self, results: Mapping[int, Any], size: int
    ) -> tuple[dict[str, Any], dict[int, str]]:
        """Arrays of the results by place; reasons of those that do not fit."""
        names = self._step.outputs
        if len(names) == 1:
            return {names[0]: self._joined(names[0], results, size)}, {}
        places = list(results)
        rows, reasons = self._columns.split_rows(list(results.values()))
        columns = {
            name: self._joined(name, {places[at]: row[number] for at, row in rows.items()}, size)
            for number, name in enumerate(names)
        }
        return columns, {places[at]: reason for at, reason in reasons.items()}

    def _joined(self, name: str, results: Mapping[int, Any], size: int) -> Any:
        """Array of the results by place, and of what stands for none in the other places."""
        values = {place: _plain(value) for place, value in results.items()}
        column: Any = np.empty(size, "O")
        kinds = {type(value) for value in values.values()}
        if kinds == {np.ndarray}:
            shapes = {value.shape for value in values.values()}
            dtype = np.result_type(*{value.dtype for value in values.values()})
            if len(shapes) == 1:
                self._kinds[name] = *shapes, dtype
            else:
                self._kinds.pop(name, None)
                for place in range(size):
                    column[place] = np.empty((0,) * max(map(len, shapes)), dtype)
        if kinds <= {np.ndarray} and name in self._kinds:
            # also if all rows have failed: the column is to be as it was in the batch before
            shape, dtype = self._kinds[name]
            column = np.zeros((size, *shape), dtype)
            if dtype.kind == "f":
                column[:] = np.nan
        elif len(values) == size and len(kinds) == 1 and issubclass(kinds.pop(), _NUMBERS):
            return np.array(list(values.values()))
        for place, value in values.items():
            column[place] = value
        return column


class _Form(Protocol):
    """A kind of batch."""

    is_arrow: bool

    def names(self, batch: Any) -> list[str]: ...

    def size(self, batch: Any) -> int: ...

    def values(self, batch: Any, name: str) -> list[Any]:
        """A column as what a batch function gets."""
        ...

    def extended(self, batch: Any, columns: Mapping[str, Any]) -> Any:
        """The batch with these columns besides, or in the place of its own."""
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
    """Its rows: values of Python, or arrays if it has more than one dimension."""
    values: list[Any] = (
        array.tolist() if array.ndim == 1 and array.dtype.kind in "biufUSO" else [*array]
    )
    return values


def _plain(value: Any) -> Any:
    """The value, without what is torch's, or an array of no dimension."""
    if is_tensor(value):
        value = of_tensor(value)
    return value[()] if isinstance(value, np.ndarray) else value


def _objects(column: Any) -> Any:
    """An array of a list."""
    return np.array(column, "O") if isinstance(column, list) else column


def _with_lists(array: Any) -> Any:
    """The array, whose lists may be of any length: another batch may have others."""
    kind = array.type
    if not pa.types.is_fixed_size_list(kind):
        return array
    return array.cast(pa.list_(kind.value_type))
