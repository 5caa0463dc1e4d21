"""Values of Arrow arrays as Python objects, without loss.

| Arrow | Python |
|---|---|
| list of numbers without a null | array of one dimension |
| fixed_shape_tensor | array of that shape |
| other lists; struct | list; dict, with lists in it |
| timestamp in UTC; in another zone | datetime in UTC; in that zone |
| time, timestamp or duration in nanoseconds | in microseconds, if nothing is lost |
| dictionary | its values |
| other types | as `to_pylist` has them |

Python's times have microseconds. A nanosecond that is not zero is refused, with or without pandas.
"""

from __future__ import annotations

from datetime import UTC
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types


def to_python(array: Any) -> list[Any]:
    """Return the values of an Arrow array as the table above has them.

    A value without an equal in Python is an error of pyarrow, a `ValueError` or an `OverflowError`.
    """
    kind = array.type
    rows: list[Any]
    if array.null_count:
        present = iter(to_python(array.drop_null()))
        return [next(present) if valid else None for valid in array.is_valid().to_pylist()]
    if isinstance(kind, pa.FixedShapeTensorType):
        return [np.reshape(row, kind.shape) for row in to_python(array.storage)]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        ends = array.value_lengths().to_numpy().cumsum()
        return _cut(array.flatten(), [0, *ends.tolist()])
    if _is_number(kind) or types.is_string(kind) or types.is_large_string(kind):
        rows = array.to_numpy(zero_copy_only=False).tolist()
        return rows
    if getattr(kind, "unit", "") == "ns":
        duration = pa.duration("us") if types.is_duration(kind) else pa.time64("us")
        array = array.cast(pa.timestamp("us", kind.tz) if types.is_timestamp(kind) else duration)
    rows = array.to_pylist()
    if types.is_timestamp(kind) and kind.tz == "UTC":
        # Arrow takes the zone from pytz or from zoneinfo, whichever is installed.
        rows = [value.astimezone(UTC) for value in rows]
    return rows


def _cut(items: Any, ends: list[int]) -> list[Any]:
    """Return the lists of items, or arrays of numbers, between ends."""
    is_number = _is_number(items.type)
    if is_number and not items.null_count:
        # A copy, because Arrow's memory is read-only, and a step may change its input in place.
        values = items.to_numpy(zero_copy_only=False).copy()
    else:
        values = to_python(items)
    rows = [values[start:end] for start, end in pairwise(ends)]
    if is_number and items.null_count:
        dtype = items[:0].to_numpy(zero_copy_only=False).dtype
        return [row if None in row else np.array(row, dtype) for row in rows]
    return rows


def _is_number(kind: Any) -> bool:
    return bool(types.is_primitive(kind) and not types.is_temporal(kind))


def plain_schema(schema: Any) -> Any:
    """Return a schema without views of text, and with the types of values for dictionaries."""
    return pa.schema([each.with_type(_plain_type(each.type)) for each in schema])


def _plain_type(kind: Any) -> Any:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if types.is_binary_view(kind) else kind
