"""Values of Arrow columns as Python objects, without loss.

Python's times have microseconds, so nanoseconds that are not zero are refused, whatever packages
are installed. A column that no step reads stays Arrow's and keeps them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pyarrow as pa

__all__ = ["cast", "to_python", "without_views"]


def to_python(array: Any) -> list[Any]:
    """The values; where Python has no equal, an error of pyarrow, or `ValueError` or
    `OverflowError`.
    """
    values: list[Any] = cast(array, _microseconds(array.type)).to_pylist()
    return values


def cast(array: Any, kind: Any) -> Any:
    """The array as one of that type; what would lose anything is an error of pyarrow."""
    return array if array.type == kind else array.cast(kind)


@functools.lru_cache(maxsize=256)
def _microseconds(kind: Any) -> Any:
    """The type with microseconds for nanoseconds.

    pyarrow itself gives pandas objects where pandas is installed, errors where it is not, and cuts
    times of day short without a word.
    """
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    return _nested(kind, _microseconds)


@functools.lru_cache(maxsize=256)
def without_views(kind: Any) -> Any:
    """The type with plain text for views of text, which polars hands out.

    Not everything can be done with views yet (dictionaries of them cannot be written), and a slice
    of them counts as as large as the whole.
    """
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, without_views(kind.value_type), kind.ordered)
    return _nested(kind, without_views)


def _nested(kind: Any, convert: Callable[[Any], Any]) -> Any:
    """The type with the types of its parts converted."""
    if pa.types.is_struct(kind):
        return pa.struct([child.with_type(convert(child.type)) for child in kind])
    if pa.types.is_list(kind):
        make = pa.list_
    elif pa.types.is_large_list(kind):
        make = pa.large_list
    elif pa.types.is_fixed_size_list(kind):
        make = functools.partial(pa.list_, list_size=kind.list_size)
    else:
        return kind
    return make(kind.value_field.with_type(convert(kind.value_type)))
