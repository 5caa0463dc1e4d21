"""Canonical values: the plain form of a value, its kind, and its way into Arrow and back.

1. The canonical form is a function of the value alone, never of its neighbours: what the function
   returned, in plain types. The next step gets it, a run that resumes, and a result as text.
2. Python code reads a value. Arrow would drop unknown fields and zones of times silently.
3. Types exist only in Parquet. `unify` finds the narrowest kind for the values of a column, in any
   order of the values. A value that no type of Arrow takes has the kind "any".

| value | canonical form | Arrow |
|---|---|---|
| None, bool, int, float, str, bytes, date, naive time | the same | the like |
| datetime with a zone; without | in UTC; the same | timestamp in UTC; without a zone |
| timedelta | the same | duration |
| Decimal | the same | decimal128 |
| mapping, dataclass, pydantic model | dict | struct |
| list, tuple | list | list |
| vectors (arrays or tensors) of one length | array | fixed_size_list |
| vectors of several lengths, with None, in a dict or list | array | large_list |
| arrays of more dimensions | array | lists of vectors |
| scalar, array of no dimension; Series | as that of Python; array | the like |
| Enum; UUID, Path | its value; text | the like |

Subclasses of str, int, float and times come back as plain ones. An array keeps its dtype, shape and
order; bfloat16 becomes float32, and text and objects become lists. No type of Arrow takes integers
of more than 64 bits, decimals of more than 38 digits, lone surrogates, and lists of several kinds.
Times have microseconds; a nanosecond that is not zero is refused.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache, reduce
from pathlib import PurePath
from types import NoneType
from typing import Any, Final
from uuid import UUID

import numpy as np
import pyarrow as pa
from pyarrow import types

from .arrow import to_python

Kind = str | tuple[Any, ...]
"""Type of a canonical value. A flat kind is a key of `_FLAT`. The other kinds are tuples:

- `("list", kind of the items)`;
- `("struct", ((name, kind), ...))`;
- `("array", dtype, length)` for vectors; `("array", dtype, None)` for those of any length;
- `("decimal", digits after the point)`, with 38 digits in all.

"any" is the kind of a value that no type takes.
"""

_FLAT: Final[dict[str, Any]] = {
    "unseen": pa.null(),  # not even None
    "null": pa.null(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
    "bytes": pa.binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "datetime": pa.timestamp("us"),
    "utc": pa.timestamp("us", "UTC"),
    "timedelta": pa.duration("us"),
}
_PLAIN: Final[dict[type, Kind]] = {
    NoneType: "null",
    bool: "bool",
    float: "float",
    bytes: "bytes",
    date: "date",
}
"""Python types with values that are taken as they are."""
_TIMES: Final = {datetime: "datetime", date: "date", time: "time", timedelta: "timedelta"}

MAX_FIELDS: Final = 1_000  # a dict with more is keyed by data, and each new key would be a column


class Unfit(ValueError):
    """A value without a canonical form, or kinds without a common one; the message says why."""


@lru_cache(4096)
def arrow_type(kind: Kind | pa.DataType) -> Any:
    """Return the Arrow type of a column of that kind; a declared type is the type itself."""
    match kind:
        case pa.DataType():
            return kind
        case str():
            return _FLAT[kind]
        case ("list", item):
            return pa.list_(arrow_type(item))
        case ("struct", ()):  # which Parquet cannot store
            return pa.null()
        case ("struct", items):
            return pa.struct([(name, arrow_type(item)) for name, item in items])
        case ("decimal", places):
            return pa.decimal128(38, places)
    number = pa.from_numpy_dtype(kind[1])
    return pa.large_list(number) if kind[2] is None else pa.list_(number, kind[2])


def describe_kind(kind: Kind | pa.DataType) -> str:
    """Return the kind, or the declared type, in words, for messages and for status."""
    # Arrow calls numbers of 32 bits floats.
    words: dict[Any, str] = {"any": "no type", "int": "int", "float": "float"}
    return words.get(kind) or str(arrow_type(kind))


def common_kind(kinds: Iterable[Kind]) -> Kind:
    """Return the narrowest kind that takes all values without loss; raise `Unfit` for none."""
    unseen: Kind = "unseen"
    return reduce(unify, kinds, unseen)


@lru_cache(4096)
def unify(a: Kind, b: Kind) -> Kind:
    """Return the common kind of two; the result for several does not depend on their order."""
    if a == b or b == "unseen":
        return a
    if a == "unseen":
        return b
    match a, b:
        case ("null", other) | (other, "null"):
            return _of_any_shape(other)
        case ("int", "float") | ("float", "int"):
            return "float"
        case (("array", one, length), ("array", other, width)):
            if np.dtype(one).kind == np.dtype(other).kind:
                dtype = np.promote_types(one, other).name
                return "array", dtype, length if length == width else None
        case (("list", one), ("list", other)):
            return "list", unify(one, other)
        case (("decimal", one), ("decimal", other)):
            return "decimal", max(one, other)
        case (("struct", one), ("struct", other)):
            items = dict(one)
            for name, kind in other:
                items[name] = unify(items.get(name, "unseen"), kind)
            # dicts of one form keep its order; else the order must not depend on which came first
            alike = [name for name, _ in one] == [name for name, _ in other]
            if len(items) <= MAX_FIELDS:
                return "struct", tuple(items.items() if alike else sorted(items.items()))
    if "any" in (a, b):
        raise Unfit("a value of no type")
    raise Unfit(f"{describe_kind(a)} and {describe_kind(b)}")


def _of_any_shape(kind: Kind) -> Kind:
    """Return the kind for vectors of any length, and for missing ones."""
    return ("array", kind[1], None) if kind[0] == "array" else kind


def _kind_of_array(dtype: Any, shape: tuple[int, ...]) -> Kind:
    kind: Kind = "array", dtype.name, shape[0] or None if len(shape) == 1 else None
    for _ in shape[1:]:
        kind = "list", kind
    return kind


# --- reading


def read_column(values: Sequence[Any]) -> tuple[Any, Mapping[Kind, int]]:
    """Return the canonical forms of values and the number of values of each kind.

    The values are a list, or an array with a row for each. Python does no work per value for values
    of one plain type, and for arrays of one shape.
    """
    if isinstance(values, np.ndarray):
        return values, {_kind_of_array(values.dtype, values.shape[1:]): len(values)}
    found = set(map(type, values))
    only = found.pop() if len(found) == 1 else object
    kind = _PLAIN.get(only)
    if only is str and all(map(str.isascii, values)):
        kind = "str"
    elif only is int and {_int(min(values)), _int(max(values))} == {"int"}:
        kind = "int"
    elif only is np.ndarray and len({(value.dtype, value.shape) for value in values}) == 1:
        first, alike = read(values[0])
        if isinstance(first, np.ndarray):
            block = np.concatenate(values, dtype=first.dtype)
            return block.reshape(len(values), *first.shape), {alike: len(values)}
    if kind is not None:
        return list(values), {kind: len(values)}
    pairs = list(map(read, values))
    return [value for value, _ in pairs], Counter([kind for _, kind in pairs])


def read(value: Any) -> tuple[Any, Kind]:
    """Return the canonical form of a value and its kind.

    Raises `Unfit`, or an error of the value's own methods.
    """
    kind = type(value)
    return (value, _PLAIN[kind]) if kind in _PLAIN else _READERS.get(kind, _read_other)(value)


def _read_str(value: str) -> tuple[Any, Kind]:
    plain = str.__str__(value)
    try:
        plain.encode()
    except UnicodeEncodeError:  # of lone surrogates
        return plain, "any"
    return plain, "str"


def _int(value: int) -> Kind:
    return "int" if -(2**63) <= value < 2**63 else "any"


def _read_dict(value: Mapping[Any, Any]) -> tuple[Any, Kind]:
    plain, kinds = {}, {}
    for name, item in value.items():
        if not isinstance(name, str):
            raise Unfit(f"keys of a dict must be str, not {show(name)}")
        key = str.__str__(name)
        plain[key], kind = read(item)
        kinds[key] = _of_any_shape(kind)
    is_any = len(kinds) > MAX_FIELDS or "any" in kinds.values()
    return plain, "any" if is_any else ("struct", tuple(kinds.items()))


def _read_list(value: Sequence[Any]) -> tuple[Any, Kind]:
    plain, kinds = read_column(value)
    with suppress(Unfit):
        if (common := common_kind(kinds)) != "any":
            return list(plain), ("list", _of_any_shape(common))
    return plain, "any"


def _read_array(value: Any) -> tuple[Any, Kind]:
    dtype = value.dtype
    if dtype.kind in "OSTU" or hasattr(value, "mask"):
        return read(value.tolist())
    if dtype.name == "bfloat16":  # of ml_dtypes, as JAX has it
        dtype = np.dtype(np.float32)
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise Unfit(
            f"an array of dtype {dtype} cannot be stored; return booleans, integers or floats of "
            "at most 64 bits, or a list"
        )
    if not value.ndim:
        return read(value.item())
    # A copy: a function may write its next results to the same memory.
    value = np.array(value, dtype.newbyteorder("="), order="C")
    return value, _kind_of_array(value.dtype, value.shape)


def _read_other(value: Any) -> tuple[Any, Kind]:
    if hasattr(value, "detach"):  # of torch
        return _read_array(_of_tensor(value))
    for each, reader in _READERS.items():
        if isinstance(value, each):
            return reader(value)
    if (mapping := as_dict(value)) is not None:
        return _read_dict(mapping)
    if hasattr(value, "__array__"):
        return _read_array(np.asarray(value))
    raise Unfit(
        f"values of type {type(value).__name__} cannot be stored; return None, numbers, str, "
        "bytes, dates and times, or lists, dicts and arrays of them"
    )


def _of_tensor(value: Any) -> Any:
    try:
        return value.numpy(force=True)
    except TypeError:  # numpy has no bfloat16
        return value.float().numpy(force=True)


def _read_time(value: Any) -> tuple[Any, Kind]:
    if value != value:  # pandas.NaT
        return None, "null"
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
        raise Unfit("a time must have no nanoseconds; round it to microseconds")
    kind = next(kind for each, kind in _TIMES.items() if isinstance(value, each))
    if getattr(value, "tzinfo", None) is not None:
        if kind == "time":
            raise Unfit("a time of day cannot have a zone; return a datetime")
        value, kind = value.astimezone(UTC), "utc"
    if type(value) is datetime:
        return value.replace(fold=0), kind
    (plain,) = to_python(to_array([value], arrow_type(kind)))
    return plain, kind


def _read_decimal(value: Decimal) -> tuple[Any, Kind]:
    exponent = value.as_tuple().exponent
    # NaN and infinity have none
    is_number = isinstance(exponent, int) and exponent >= -38
    return Decimal(value), ("decimal", max(-int(exponent), 0)) if is_number else "any"


def as_dict(value: Any) -> dict[Any, Any] | None:
    """Return names and values of a mapping, a dataclass or a model of pydantic, else None."""
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    dump = getattr(type(value), "model_dump", None)  # of pydantic
    return None if dump is None else dict(dump(value))


_READERS: Final[dict[type, Callable[[Any], tuple[Any, Kind]]]] = {
    Enum: lambda value: read(value.value),
    np.generic: _read_array,
    str: _read_str,
    int: lambda value: (int(value), _int(value)),
    float: lambda value: (float(value), "float"),
    dict: _read_dict,
    list: _read_list,
    tuple: _read_list,
    np.ndarray: _read_array,
    **dict.fromkeys((bytes, bytearray, memoryview), lambda value: (bytes(value), "bytes")),
    **dict.fromkeys((UUID, PurePath), lambda value: _read_str(str(value))),
    **dict.fromkeys(_TIMES, _read_time),
    Decimal: _read_decimal,
}
"""Ways to read values by their class, subclasses included; the first one counts."""


def show(value: Any) -> str:
    """Return the type and shortened text of a value, for messages."""
    try:
        text = reprlib.repr(value)
    except Exception:  # an int of 5,000 digits
        text = "that cannot be shown"
    return f"{type(value).__name__} {text}"


# --- canonical values


def to_array(values: Any, data_type: Any) -> Any:
    """Return canonical values as an Arrow array of `data_type`, or raise an error of pyarrow."""
    if isinstance(data_type, pa.FixedShapeTensorType):
        flat = [None if value is None else np.ravel(value) for value in values]
        return pa.ExtensionArray.from_storage(data_type, to_array(flat, data_type.storage_type))
    if types.is_fixed_size_list(data_type):
        shapes = {getattr(value, "shape", None) for value in values}
        if shapes == {(data_type.list_size,)}:
            items = pa.array(np.ravel(values), data_type.value_type)
            return pa.FixedSizeListArray.from_arrays(items, type=data_type)
    try:
        return pa.array(values, data_type)
    except pa.ArrowInvalid:  # of arrays of several dimensions
        return pa.array(list(map(_as_lists, values)), data_type)


def _as_lists(value: Any) -> Any:
    """Return a value with lists of vectors for arrays of several dimensions."""
    if isinstance(value, dict):
        return {name: _as_lists(item) for name, item in value.items()}
    if isinstance(value, list) or np.ndim(value) > 1:
        return list(map(_as_lists, value))
    return value
