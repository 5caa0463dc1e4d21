"""Values of Arrow arrays as Python objects, without loss.

| Arrow | Python |
|---|---|
| fixed_size_list or large_list of numbers | array of one dimension |
| fixed_shape_tensor | array of that shape |
| other lists; struct | list; dict |
| timestamp in UTC; in another zone | datetime in UTC; in that zone |
| time, timestamp or duration in nanoseconds | in microseconds, if nothing is lost |
| dictionary | its values |
| other types | as `to_pylist` has them |

Python's times have microseconds. A nanosecond that is not zero is refused, with or without pandas.
"""

from __future__ import annotations

import functools
from datetime import UTC
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types


def to_python(array: Any, *, vectors: bool = False) -> list[Any]:
    """Return the values of an Arrow array as the table above has them.

    With `vectors`, every list of numbers without a missing one is an array. A value without an
    equal in Python is an error of pyarrow, a `ValueError` or an `OverflowError`.
    """
    convert = functools.partial(to_python, vectors=vectors)
    kind = array.type
    rows: list[Any]
    if array.null_count:
        present = iter(convert(array.drop_null()))
        return [next(present) if valid else None for valid in array.is_valid().to_pylist()]
    if types.is_dictionary(kind):
        return convert(array.dictionary_decode())
    if isinstance(kind, pa.FixedShapeTensorType):
        axes = kind.permutation or range(len(kind.shape))
        return [np.reshape(row, kind.shape).transpose(axes) for row in convert(array.storage)]
    if types.is_struct(kind) and kind.num_fields:
        names = [field.name for field in kind]
        children = [convert(array.field(place)) for place in range(kind.num_fields)]
        return [dict(zip(names, row, strict=True)) for row in zip(*children, strict=True)]
    if types.is_fixed_size_list(kind):
        return _cut(array.flatten(), np.arange(len(array) + 1) * kind.list_size, True, vectors)
    if types.is_list(kind) or types.is_large_list(kind):
        ends = array.offsets.to_numpy()
        items = array.values[ends[0] : ends[-1]]
        return _cut(items, ends - ends[0], vectors or types.is_large_list(kind), vectors)
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


def _cut(items: Any, ends: Any, arrays: bool, vectors: bool) -> list[Any]:
    """Return lists of items, the first until the second end, or arrays of numbers."""
    arrays = arrays and _is_number(items.type)
    values: Any
    if arrays and not items.null_count:
        # A copy, because Arrow's memory is read-only, and a step may change its input in place.
        values = items.to_numpy(zero_copy_only=False).copy()
    else:
        values = to_python(items, vectors=vectors)
    rows = [values[start:end] for start, end in pairwise(ends.tolist())]
    if arrays and items.null_count:
        dtype = items[:0].to_numpy(zero_copy_only=False).dtype
        return [row if None in row else np.array(row, dtype) for row in rows]
    return rows


def _is_number(kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def without_views(kind: Any) -> Any:
    """Return the type with plain text for views of text, which polars hands out.

    Not everything can be done with views yet (dictionaries of them cannot be written), and a slice
    of them counts as as large as the whole.
    """
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, without_views(kind.value_type), kind.ordered)
    if types.is_struct(kind):
        return pa.struct([child.with_type(without_views(child.type)) for child in kind])
    make: Any = None
    if types.is_list(kind):
        make = pa.list_
    elif types.is_large_list(kind):
        make = pa.large_list
    elif types.is_fixed_size_list(kind):
        make = functools.partial(pa.list_, list_size=kind.list_size)
    return make(kind.value_field.with_type(without_views(kind.value_type))) if make else kind


def plain_type(kind: Any) -> Any:
    """Return the type without views of text, and that of its values for a dictionary."""
    return without_views(kind.value_type if types.is_dictionary(kind) else kind)
