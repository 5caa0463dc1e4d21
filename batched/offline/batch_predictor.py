"""BatchPredictor: a predictor of batches as Ray Data hands them over. It does without Ray.

A batch is a dict of numpy arrays or a pandas DataFrame, and comes back as the same kind, row by row
in order. Rules for the columns that are added:

1. Arrays of one shape become one array, of which Ray makes a tensor. It has no room for None: rows
   that failed are NaN, or zero. In all other columns they are None.
2. A row that comes with an `_error` is not computed, and keeps it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from .._function.batched import BatchedCallable
from .._services.failures import error_text
from .predictor import Predictor
from .sources.errors import missing_column
from .step import Step
from .types.columns import Columns

STATUS: Final = "_status"
"""Column that holds `OK` or `FAILED`."""
ERROR: Final = "_error"
"""Column of errors, as `ValueError: bad row`. A row without an error has empty text, not None: a
block with nothing but None has no type, and files of several blocks could not be read together.
"""
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
        errors = _values(batch[ERROR]) if ERROR in names else [""] * size
        places = [place for place, error in enumerate(errors) if not error]
        results = self._predictor.rows(
            [{name: values[place] for name, values in inputs.items()} for place in places]
        )
        good: dict[int, Any] = {}  # results by place
        for place, result in zip(places, results, strict=True):
            if isinstance(result, BaseException):
                errors[place] = error_text(result).error
            else:
                good[place] = result
        read = self._columns.read(list(good.values()))
        computed = list(good)
        for at, why in read.misfits.items():
            errors[computed[at]] = why
        fit = [computed[at] for at in read.places]
        columns = {
            name: self._array(name, dict(zip(fit, values, strict=True)), size)
            for name, values in zip(self._columns.names, read.columns, strict=True)
        }
        columns[STATUS] = _objects([FAILED if error else OK for error in errors])
        columns[ERROR] = _objects(errors)
        if isinstance(batch, Mapping):
            return {**batch, **columns}
        return batch.assign(
            **{name: list(array) if array.ndim > 1 else array for name, array in columns.items()}
        )

    def _array(self, name: str, values: Mapping[int, Any], size: int) -> Any:
        """Return an array of the values by place, with NaN, zero or None elsewhere."""
        found = list(values.values())
        if {*map(type, found)} == {np.ndarray} and len({each.shape for each in found}) == 1:
            blank = np.zeros(found[0].shape, np.result_type(*found))
            self._blanks[name] = blank + np.nan if blank.dtype.kind == "f" else blank
        elif found:
            self._blanks.pop(name, None)
        # a column has arrays also if all rows have failed, as in the batch before
        if (missing := self._blanks.get(name)) is not None:
            return np.stack([values.get(place, missing) for place in range(size)])
        rows = [values.get(place) for place in range(size)]
        if {*map(type, rows)} in ({bool}, {int}, {float}):
            return np.array(rows)
        return _objects(rows)


def _objects(rows: list[Any]) -> Any:
    column = np.empty(len(rows), "O")
    for place, row in enumerate(rows):
        column[place] = row
    return column


def _names(batch: Any) -> list[str]:
    """Return the names of the columns of a batch."""
    if isinstance(batch, Mapping) or type(batch).__module__.split(".")[0] == "pandas":
        return list(batch)
    raise TypeError(
        "a batch must be a dict of numpy arrays or a pandas DataFrame, as map_batches has them by "
        f"batch_format=, got a {type(batch).__name__}"
    )


def _values(column: Any) -> list[Any]:
    """Return the rows of a column: values of Python, or arrays if it has several dimensions."""
    array = np.asarray(column)
    is_plain = array.ndim == 1 and array.dtype.kind in "biufUSO"
    values: list[Any] = array.tolist() if is_plain else [*array]
    if isinstance(getattr(column, "dtype", array.dtype), np.dtype):
        return values
    # pandas' own types have a None of their own
    return [None if lost else value for value, lost in zip(values, column.isna(), strict=True)]
