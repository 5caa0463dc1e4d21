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
| arrays or tensors of one shape | array | fixed_size_list, fixed_shape_tensor |
| vectors of several lengths, with None, in a dict or list | array | large_list |
| the same of more dimensions | array | lists of vectors, which come back as lists |
| scalar, array of no dimension; Series | as that of Python; array | the like |
| Enum; UUID, Path | its value; text | the like |

Subclasses of str, int, float and times come back as plain ones. An array keeps its dtype, shape and
order; bfloat16 becomes float32, and text and objects become lists. No type of Arrow takes integers
of more than 64 bits, decimals of more than 38 digits, lone surrogates, and lists of several kinds.
Times have microseconds; a nanosecond that is not zero is refused.
"""

from __future__ import annotations

import reprlib
from collections import Counter, deque
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
- `("array", dtype, shape)`; `("array", dtype, None)` for vectors of any length;
- `("decimal", digits before the point, digits after it)`.

"any" is the kind of a value that no type takes.
"""

_FLAT: Final[dict[str, Any]] = {
    "unseen": pa.null(),  # not even None
    "null": pa.null(),
    "bool": pa.bool_(),
    "int53": pa.int64(),  # a double holds all of them
    "int64": pa.int64(),
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

EXACT: Final = 2**53  # up to here a double holds every integer
MAX_BITS: Final = 8192  # Python turns no more than 4,300 digits into text
MAX_DIGITS: Final = 38  # of decimal128
MAX_DEPTH: Final = 32  # Arrow's streams refuse more than 64 levels
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
        case ("struct", items):
            return pa.struct([(name, arrow_type(item)) for name, item in items])
        case ("decimal", whole, places):
            return pa.decimal128(whole + places, places)
    number, shape = pa.from_numpy_dtype(kind[1]), kind[2]
    if shape is None:
        return pa.large_list(number)
    return pa.list_(number, *shape) if len(shape) == 1 else pa.fixed_shape_tensor(number, shape)


def describe_kind(kind: Kind | pa.DataType) -> str:
    """Return the kind, or the declared type, in words, for messages and for status."""
    # Arrow calls numbers of 32 bits floats.
    words: dict[Any, str] = {"any": "no type", "int53": "int", "int64": "int", "float": "float"}
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
    if "array" in (a[0], b[0]):
        if a[0] == b[0] and a[2] == b[2]:
            narrow, wide = sorted(map(np.dtype, (a[1], b[1])), key=lambda dtype: dtype.itemsize)
            if narrow.kind == wide.kind:
                return "array", wide.name, a[2]
        elif (anyhow := (_of_any_shape(a), _of_any_shape(b))) != (a, b):
            return unify(*anyhow)
    match a, b:
        case ("null", other) | (other, "null"):
            return other
        case ("int53" | "int64", "int53" | "int64"):
            return "int64"
        case ("int53", "float") | ("float", "int53"):
            return "float"
        case (("list", "unseen"), ("array", *_) as other) | (
            ("array", *_) as other,
            ("list", "unseen"),
        ):
            return other  # an empty list is an empty vector, too
        case (("list", one), ("list", other)):
            return "list", unify(one, other)
        case (("decimal", *one), ("decimal", *other)):
            whole, places = map(max, one, other)
            if whole + places <= MAX_DIGITS:
                return "decimal", whole, places
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
    if {a, b} == {"int64", "float"}:
        raise Unfit("float and an int beyond 2**53, which a float may round")
    raise Unfit(f"{describe_kind(a)} and {describe_kind(b)}")


def _of_any_shape(kind: Kind) -> Kind:
    """Return the kind for arrays of any length in each dimension, and for missing arrays."""
    if kind[0] != "array" or kind[2] is None:
        return kind
    common: Kind = "array", kind[1], None
    for _ in kind[2][1:]:
        common = "list", common
    return common


# --- reading


def read_column(values: Sequence[Any], depth: int = 0) -> tuple[Any, Mapping[Kind, int]]:
    """Return the canonical forms of values and the number of values of each kind.

    The values are a list, or an array with a row for each. Python does no work per value for values
    of one plain type, and for arrays of one shape.
    """
    if isinstance(values, np.ndarray):
        return values, {("array", values.dtype.name, values.shape[1:]): len(values)}
    found = set(map(type, values))
    only = found.pop() if len(found) == 1 else object
    kind = _PLAIN.get(only)
    if only is str:
        with suppress(UnicodeEncodeError):  # of lone surrogates
            if not all(map(str.isascii, values)):
                deque(map(str.encode, values), 0)
            kind = "str"
    elif only is int:
        kinds = {_int(min(values)), _int(max(values))}
        kind = None if "any" in kinds else common_kind(kinds)
    elif only is np.ndarray and len({(value.dtype, value.shape) for value in values}) == 1:
        _, alike = read(values[0], depth)
        if alike[0] == "array" and alike[2] is not None:
            block = np.concatenate(values, dtype=alike[1])
            return block.reshape(len(values), *alike[2]), {alike: len(values)}
    if kind is not None:
        return list(values), {kind: len(values)}
    pairs = [read(value, depth) for value in values]
    return [value for value, _ in pairs], Counter([kind for _, kind in pairs])


def read(value: Any, depth: int = 0) -> tuple[Any, Kind]:
    """Return the canonical form of a value and its kind.

    Raises `Unfit`, or an error of the value's own methods.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value, _PLAIN[kind]
    if depth > MAX_DEPTH:
        raise Unfit(f"it is nested more than {MAX_DEPTH} levels deep")
    return _READERS.get(kind, _read_other)(value, depth)


def _read_str(value: str, _: int) -> tuple[Any, Kind]:
    plain = str.__str__(value)
    with suppress(UnicodeEncodeError):  # of lone surrogates
        if not plain.isascii():
            plain.encode()
        return plain, "str"
    return plain, "any"


def _int(value: int) -> Kind:
    if -EXACT <= value <= EXACT:
        return "int53"
    if value.bit_length() > MAX_BITS:
        raise Unfit(f"an integer must have at most {MAX_BITS:,} bits")
    return "int64" if -(2**63) <= value < 2**63 else "any"


def _read_dict(value: Mapping[Any, Any], depth: int) -> tuple[Any, Kind]:
    plain, kinds = {}, {}
    for name, item in value.items():
        if not isinstance(name, str):
            raise Unfit(f"keys of a dict must be str, not {show(name)}")
        key, of_key = _read_str(name, depth)
        plain[key], kind = read(item, depth + 1)
        kinds[key] = kind if of_key == "str" else "any"
    is_any = len(kinds) > MAX_FIELDS or "any" in kinds.values()
    return plain, "any" if is_any else ("struct", tuple(kinds.items()))


def _read_list(value: Sequence[Any], depth: int) -> tuple[Any, Kind]:
    plain, kinds = read_column(value, depth + 1)
    with suppress(Unfit):
        if (common := common_kind(kinds)) != "any":
            return plain, ("list", common)
    return plain, "any"


def _read_array(value: Any, depth: int) -> tuple[Any, Kind]:
    dtype = value.dtype
    if dtype.kind in "OSTU" or hasattr(value, "mask"):
        return read(value.tolist(), depth)
    if dtype.name == "bfloat16":  # of ml_dtypes, as JAX has it
        dtype = np.dtype(np.float32)
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise Unfit(
            f"an array of dtype {dtype} cannot be stored; return booleans, integers or floats of "
            "at most 64 bits, or a list"
        )
    if not value.ndim:
        return read(value.item(), depth)
    # A copy: a function may write its next results to the same memory.
    value = np.array(value, dtype.newbyteorder("="), order="C")
    kind = "array", value.dtype.name, value.shape
    return value, _of_any_shape(kind) if depth or not value.size else kind


def _read_other(value: Any, depth: int) -> tuple[Any, Kind]:
    if is_tensor(value):
        return _read_array(of_tensor(value), depth)
    for each, reader in _READERS.items():
        if isinstance(value, each):
            return reader(value, depth)
    if (mapping := as_dict(value)) is not None:
        return _read_dict(mapping, depth)
    if hasattr(value, "__array__"):
        return _read_array(np.asarray(value), depth)
    raise Unfit(
        f"values of type {type(value).__name__} cannot be stored; return None, numbers, str, "
        "bytes, dates and times, or lists, dicts and arrays of them"
    )


def is_tensor(value: Any) -> bool:
    """Return whether the value is a tensor of torch."""
    return hasattr(value, "detach") and hasattr(value, "cpu")


def of_tensor(value: Any) -> Any:
    """Return the array of a tensor of torch."""
    tensor = value.detach().cpu()
    try:
        return tensor.numpy()
    except TypeError:  # numpy has no bfloat16
        return tensor.float().numpy()


def _read_time(value: Any, _: int) -> tuple[Any, Kind]:
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


def _read_decimal(value: Decimal, _: int) -> tuple[Any, Kind]:
    _, digits, exponent = value.as_tuple()
    value = Decimal(value)
    if not isinstance(exponent, int):  # NaN or infinity
        return value, "any"
    whole, places = max(len(digits) + exponent, 1), max(-exponent, 0)
    return value, ("decimal", whole, places) if whole + places <= MAX_DIGITS else "any"


def as_dict(value: Any) -> dict[Any, Any] | None:
    """Return names and values of a mapping, a dataclass or a model of pydantic, else None."""
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    dump = getattr(type(value), "model_dump", None)  # of pydantic
    return None if dump is None else dict(dump(value))


_READERS: Final[dict[type, Callable[[Any, int], tuple[Any, Kind]]]] = {
    Enum: lambda value, depth: read(value.value, depth),
    np.generic: _read_array,
    str: _read_str,
    int: lambda value, _: (int(value), _int(value)),
    float: lambda value, _: (float(value), "float"),
    dict: _read_dict,
    list: _read_list,
    tuple: _read_list,
    np.ndarray: _read_array,
    **dict.fromkeys((bytes, bytearray, memoryview), lambda value, _: (bytes(value), "bytes")),
    **dict.fromkeys((UUID, PurePath), lambda value, depth: _read_str(str(value), depth)),
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
    """Return canonical values as an Arrow array of `data_type`.

    Raises:
        Unfit: an array has not the shape of the tensor type.
        Exception: of pyarrow, which cannot convert a value.
    """
    is_tensor = isinstance(data_type, pa.FixedShapeTensorType)
    if is_tensor or types.is_fixed_size_list(data_type):
        shape = tuple(data_type.shape) if is_tensor else (data_type.list_size,)
        form = data_type.storage_type if is_tensor else data_type
        is_block = isinstance(values, np.ndarray)
        shapes = (
            {values.shape[1:]} if is_block else {getattr(value, "shape", None) for value in values}
        )
        if shapes == {shape}:
            block = values if is_block else np.concatenate(values)
            items = pa.array(block.reshape(-1), data_type.value_type)
            array = pa.FixedSizeListArray.from_arrays(items, type=form)
        elif is_tensor and shapes - {shape, None}:
            raise Unfit(f"an array must have the shape {shape}")
        else:
            rows = [value if value is None else np.ravel(value) for value in values]
            array = pa.array(rows if is_tensor else values, form)
        return pa.ExtensionArray.from_storage(data_type, array) if is_tensor else array
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
