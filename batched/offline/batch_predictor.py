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
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from .._function.batched import BatchedCallable
from .._services.failures import error_text
from .predictor import Predictor
from .sources.errors import missing_column
from .step import Step
from .types.arrow import to_python
from .types.columns import Columns, Kinds, fit
from .types.values import Kind, arrow_type

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


class BatchPredictor:
    """A batch function, plain or decorated, or a class of one, for `ray.data.Dataset.map_batches`.

    The class is passed to Ray Data, which builds it in each of its actors::

        dataset.map_batches(
            offline.BatchPredictor,
            fn_constructor_args=(embed,),
            fn_constructor_kwargs={"input": "text", "output": "vector"},
            compute=ray.data.ActorPoolStrategy(size=2),
            batch_size=256,
        )

    Rows come back with the columns in `output`, with `_status`, "ok" or "failed", and `_error`, as
    "ValueError: bad row", or "". A row that fails costs itself alone, and memory errors cost
    nothing. Settings are those of a `Step`, without `workers`, `processes`, `timeout_s`, `where`,
    `num_cpus` and `num_gpus`; `batch_size` is all rows of a batch by default.

    Raises:
        TypeError, ValueError: a setting is wrong.
        Exception: the class could not be built.
    """

    def __init__(self, fn: Callable[..., Any], **settings: Any) -> None:
        step = Step(fn, **settings)
        if step.batch_size is None and not isinstance(fn, BatchedCallable):
            step = replace(step, batch_size=sys.maxsize)
        self._step = step
        self._predictor = Predictor(step)
        self._columns = Columns(step.outputs, step.declared)
        self._kinds = {name: Kinds() for name in step.outputs}  # of all batches so far
        self._blanks: dict[str, Any] = {}  # value of failed rows, of columns of arrays

    def __call__(self, batch: Any) -> Any:
        """Return the rows of a batch with the columns of the step, `_status` and `_error`.

        Raises:
            SourceError: a column is missing.
            RunStopped: one batch after another failed as a whole: the function is broken.
        """
        names = _names(batch)
        for name in self._step.inputs:
            if name not in names:
                raise missing_column(name, "the batch", names)
        inputs = {name: _values(batch[name]) for name in self._step.inputs}
        size = len(batch[self._step.inputs[0]])
        errors = [""] * size
        places: Iterable[int] = range(size)
        if STATUS in names:
            before = _values(batch[STATUS])
            places = [place for place in places if before[place] != FAILED]
            errors = _values(batch[ERROR]) if ERROR in names else errors
        results = self._predictor.rows(
            [{name: values[place] for name, values in inputs.items()} for place in places]
        )
        good: dict[int, Any] = {}  # results by place
        for place, result in zip(places, results, strict=True):
            if isinstance(result, BaseException):
                errors[place] = error_text(result).error
            else:
                good[place] = result
        is_table = isinstance(batch, pa.Table)
        columns, reasons = self._read(good, size, is_table=is_table)
        for place, reason in reasons.items():
            del good[place]
            errors[place] = reason
        status = [OK if place in good else FAILED for place in range(size)]
        for name, texts in ((STATUS, status), (ERROR, errors)):
            columns[name] = pa.array(texts, pa.string()) if is_table else np.array(texts, "O")
        return _extended(batch, columns)

    def _read(
        self, results: Mapping[int, Any], size: int, *, is_table: bool
    ) -> tuple[dict[str, Any], Reasons]:
        """Return columns of the results by place, and the reasons why results do not fit."""
        read = self._columns.read(list(results.values()))
        places = list(results)
        reasons = {places[at]: why for at, why in read.misfits.items()}
        rows = [places[at] for at in read.places]
        columns: dict[str, Any] = {}
        for name, values, kinds in zip(self._columns.names, read.columns, read.kinds, strict=True):
            if not is_table:
                columns[name] = self._in_numpy(name, dict(zip(rows, values, strict=True)), size)
                continue
            self._kinds[name].add(kinds)
            final = self._columns.declared.get(name) or _open_lists(self._kinds[name].final())
            array, misfits = fit(values, final)
            at = {place: number for number, place in enumerate(rows)}
            columns[name] = array.take(pa.array([at.get(n) for n in range(size)], pa.int64()))
            reasons.update({rows[number]: why for number, why in misfits.items()})
        return columns, reasons

    def _in_numpy(self, name: str, values: Mapping[int, Any], size: int) -> Any:
        """Return an array of the values by place, with NaN, zero, `[]` or None elsewhere."""
        kinds = {type(value) for value in values.values()}
        if kinds == {np.ndarray}:
            shapes = {value.shape for value in values.values()}
            shape = shapes.pop() if len(shapes) == 1 else (0,) * max(map(len, shapes))
            self._blanks[name] = blank = np.zeros(shape, np.result_type(*values.values()))
            if blank.dtype.kind == "f":
                blank[:] = np.nan
        # a column has arrays also if all rows have failed, as in the batch before
        missing = self._blanks.get(name) if kinds <= {np.ndarray} else None
        rows: list[Any] = [values.get(place, missing) for place in range(size)]
        if missing is not None and len({row.shape for row in rows}) == 1:
            return np.stack(rows)
        if len(values) == size and len(kinds) == 1 and kinds <= {bool, int, float}:
            return np.array(rows)
        column = np.empty(size, "O")
        for place, row in enumerate(rows):
            column[place] = row
        return column


def _names(batch: Any) -> list[str]:
    """Return the names of the columns of a batch."""
    if isinstance(batch, pa.Table):
        return list(batch.column_names)
    if isinstance(batch, Mapping) or type(batch).__module__.split(".")[0] == "pandas":
        return list(batch)
    raise TypeError(
        "a batch must be a dict of numpy arrays, a pandas DataFrame or a pyarrow Table, as "
        f"map_batches has them by batch_format=, got a {type(batch).__name__}"
    )


def _values(column: Any) -> list[Any]:
    """Return the rows of a column: values of Python, or arrays if it has several dimensions."""
    if isinstance(column, pa.ChunkedArray):
        return to_python(column)
    array = np.asarray(column)
    is_plain = array.ndim == 1 and array.dtype.kind in "biufUSO"
    values: list[Any] = array.tolist() if is_plain else [*array]
    if isinstance(getattr(column, "dtype", array.dtype), np.dtype):
        return values
    # pandas' own types have a None of their own
    return [None if lost else value for value, lost in zip(values, column.isna(), strict=True)]


def _extended(batch: Any, columns: Mapping[str, Any]) -> Any:
    """Return the batch with these columns, which replace columns of the same names."""
    if isinstance(batch, pa.Table):
        before = dict(zip(batch.column_names, batch.columns, strict=True))
        return pa.table({**before, **columns}, metadata=batch.schema.metadata)
    if isinstance(batch, Mapping):
        return {**batch, **columns}
    return batch.assign(
        **{name: list(array) if array.ndim > 1 else array for name, array in columns.items()}
    )


def _open_lists(kind: Kind) -> Any:
    """Return the Arrow type of a column; arrays are open lists: shapes may change."""
    if kind[0] == "array" and len(kind[2] or "1") == 1:
        return pa.list_(pa.from_numpy_dtype(kind[1]))
    return arrow_type(kind)
