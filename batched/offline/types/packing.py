"""Columns of canonical values as bytes, and back, each value exactly as it was.

The bytes are pickled, but only the constructors in `_LOADABLE` are loaded from them. So a file of
an unknown author can do no harm.
"""

from __future__ import annotations

import datetime
import decimal
import io
import pickle
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import numpy as np


def pack(columns: Sequence[Any]) -> bytes:
    """Return columns as bytes: lists of values, or arrays with a row for each value."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 5)
    pickler.dispatch_table = {np.ndarray: _reduce}
    pickler.dump(columns)
    return buffer.getvalue()


def unpack(data: bytes) -> list[Any]:
    """Return the columns."""
    columns: list[Any] = _Unpickler(io.BytesIO(data)).load()
    return columns


def join(parts: Sequence[Any]) -> Any:
    """Return parts of one column as one part: an array if all are arrays of one form."""
    forms = {getattr(part, "dtype", None) and (part.dtype, part.shape[1:]) for part in parts}
    if len(forms) != 1 or None in forms:
        return list(chain.from_iterable(parts))
    return np.concatenate(parts)


def _reduce(array: Any) -> Any:
    """Return how to pickle an array: by no function of numpy, for these move between versions."""
    return np.ndarray, (array.shape, array.dtype.str, pickle.PickleBuffer(array.data))


def _array(shape: tuple[int, ...], dtype: str, data: bytearray) -> Any:
    return np.frombuffer(data, dtype).reshape(shape)


_TIMES = datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone
_LOADABLE: Final[dict[tuple[str, str], Any]] = {
    ("numpy", "ndarray"): _array,
    ("decimal", "Decimal"): decimal.Decimal,
    **{("datetime", each.__name__): each for each in _TIMES},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a constructor of values."""
        if found := _LOADABLE.get((module, name)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no constructor of values")
