"""Values as Arrow has them: reading a value, the types that columns can have, the way back.

1. What a value is, is read by Python code, never guessed by Arrow, which drops unknown fields and
   zones of times without a word. Nothing gets in that Parquet, JSON or CSV could not take later.
2. Types are widened only where nothing is lost: null to anything, integers to float while all of
   them lie within 2**53 (where a double is exact), decimals to more digits, structs to more fields,
   vectors of one length to those of any, arrays to lists where there are lists, too, and all of
   this inside lists and structs. A `fixed_size_list` has neither missing rows nor a parent: pyarrow
   up to 20 at least cannot read these from Parquet.
3. What comes back is decided by the Arrow type alone:

   | result | column | comes back as |
   |---|---|---|
   | None, bool, int, float, str, bytes, date, naive time, timedelta | the like | it went in |
   | int, where floats came before | double | float |
   | datetime with a zone; without | timestamp in UTC; without | datetime in UTC; without |
   | Decimal, at most 38 digits | decimal128 | Decimal, equal to what went in |
   | mapping, dataclass, pydantic model | struct | dict; fields that it lacked are None |
   | list, tuple | list | list; integers among floats are floats |
   | vector: array or tensor of one dimension | fixed_size_list | array |
   | vectors of many lengths, beside None, in a dict or list | large_list | array |
   | scalar, or array of no dimension | as that of Python | scalar of Python |

   Arrays keep their dtype, but float16 and bfloat16 become float32; they are lists where the
   column has had lists. Subclasses of str, int and float come back as plain ones.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from itertools import pairwise
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa

Type = str | tuple[Any, ...]
"""Type of a column, hashable, as JSON but for tuples: a key of `FLAT`; or `("list", item)`,
`("struct", ((name, type), ...))`, `("vector", dtype, length)`, `("array", dtype)` of any length,
`("decimal", digits before the point, digits after it)`.
"""

FLAT: dict[str, Any] = {
    "unseen": pa.null(),  # not even None
    "null": pa.null(),
    "bool": pa.bool_(),
    "int53": pa.int64(),  # every one so far is exact as a double
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
PLAIN: dict[type, Type] = {
    NoneType: "null",
    bool: "bool",
    float: "float",
    bytes: "bytes",
    date: "date",
    timedelta: "timedelta",
}
"""Python types whose values are taken as they are."""

EXACT = 2**53  # up to here a double holds every integer
MAX_DIGITS = 38  # of decimal128
MAX_DEPTH = 32  # Arrow's streams refuse more than 64 levels
MAX_FIELDS = 1_000  # a dict with more is keyed by data, and each new key would be a column


class Unfit(ValueError):
    """A value that a column cannot take; the message says why."""


class Conflict(Unfit):
    """A value of a type to which its column cannot be widened; the arguments are the place within
    the value, the type there so far and the type of the value.
    """


@lru_cache(1024)
def arrow_type(kind: Type) -> Any:
    match kind:
        case str():
            return FLAT[kind]
        case ("list", item):
            return pa.list_(arrow_type(item))
        case ("struct", fields):
            return pa.struct([(name, arrow_type(item)) for name, item in fields])
        case ("vector", dtype, length):
            return pa.list_(pa.from_numpy_dtype(dtype), length)
        case ("array", dtype):
            return pa.large_list(pa.from_numpy_dtype(dtype))
        case _:
            _, whole, places = kind
            return pa.decimal128(whole + places, places)


def describe(kind: Type) -> str:
    """The type as messages have it."""
    return f"arrays of {kind[1]}" if kind[0] in ("vector", "array") else str(arrow_type(kind))


@lru_cache(1024)
def unify(a: Type, b: Type, where: str = "") -> Type:
    """The narrowest type that takes values of both without loss."""
    if a == b or b == "unseen":
        return a
    if a == "unseen":
        return b
    if "null" in (a, b):
        other = b if a == "null" else a
        return ("array", other[1]) if other[0] == "vector" else other
    both = {a if isinstance(a, str) else a[0], b if isinstance(b, str) else b[0]}
    if both == {"int53", "int64"}:
        return "int64"
    if both == {"int53", "float"}:
        return "float"
    if isinstance(a, str) or isinstance(b, str):
        raise Conflict(where, a, b)
    if both == {"struct"}:
        fields = dict(a[1])
        for name, kind in b[1]:
            inner = f"{where}.{name}" if where else name
            fields[name] = unify(fields[name], kind, inner) if name in fields else kind
        if len(fields) > MAX_FIELDS:
            raise Unfit(f"there would be more than {MAX_FIELDS:,} fields; return a list of pairs")
        # rows of one form keep their order; else it must not tell which of them came first
        alike = [name for name, _ in a[1]] == [name for name, _ in b[1]]
        names = list(fields) if alike else sorted(fields)
        return "struct", tuple([(name, fields[name]) for name in names])
    if both == {"decimal"}:
        whole, places = max(a[1], b[1]), max(a[2], b[2])
        if whole + places > MAX_DIGITS:
            raise Unfit(f"with the rows before it would take over {MAX_DIGITS} digits")
        return "decimal", whole, places
    if both <= {"vector", "array"}:
        dtypes = np.dtype(a[1]), np.dtype(b[1])
        if dtypes[0].kind != dtypes[1].kind:
            raise Conflict(where, a, b)
        wider = max(dtypes, key=lambda dtype: dtype.itemsize).name
        return ("vector", wider, a[2]) if a[2:] == b[2:] != () else ("array", wider)
    if both <= {"list", "vector", "array"}:
        return "list", unify(_item(a), _item(b), f"{where}[]")
    raise Conflict(where, a, b)


def _item(kind: Type) -> Type:
    """The type of the items of lists, or of arrays once they are lists."""
    if kind[0] == "list":
        item: Type = kind[1]
        return item
    dtype = np.dtype(kind[1])
    if dtype == np.uint64:
        raise Unfit("lists hold int64, and these arrays uint64")
    numbers = {"b": "bool", "f": "float"}
    return numbers.get(dtype.kind, "int53" if dtype.itemsize < 8 else "int64")


def common_type(values: Sequence[Any]) -> Type:
    """The type of values that are alike, found quickly; `Unfit` where each must be read."""
    kinds = set(map(type, values))
    if NoneType in kinds:
        return unify("null", common_type([value for value in values if value is not None]))
    if not kinds:
        return "unseen"
    kind = kinds.pop()
    if not kinds:
        if kind is str:
            return "str"
        if kind is int:
            return unify(_int(min(values)), _int(max(values)))
        if kind in PLAIN:
            return PLAIN[kind]
        if kind is np.ndarray and len({(value.dtype, value.shape) for value in values}) == 1:
            plain, common = read(values[0])
            if plain is values[0]:
                return common
    raise Unfit


def read(value: Any, depth: int = 0) -> tuple[Any, Type]:
    """The value as Arrow takes it, and its type."""
    kind = type(value)
    if kind is str:
        if not value.isascii():
            value.encode()  # refuses lone surrogates
        return value, "str"
    if kind in PLAIN:
        return value, PLAIN[kind]
    if kind is int:
        return value, _int(value)
    if depth > MAX_DEPTH:
        raise Unfit(f"it is nested more than {MAX_DEPTH} levels deep")
    if kind is dict:
        return _read_dict(value, depth)
    if kind is list or kind is tuple:
        return _read_list(value, depth)
    if kind is np.ndarray:
        return _read_array(value, depth)
    return _read_other(value, depth)


def _int(value: int) -> Type:
    if -EXACT <= value <= EXACT:
        return "int53"
    if -(2**63) <= value < 2**63:
        return "int64"
    raise Unfit("an integer must fit 64 bits; return a str or a float")


def _read_dict(value: dict[Any, Any], depth: int) -> tuple[Any, Type]:
    if not value:
        raise Unfit("Parquet has no empty dicts; return None in its place")
    if len(value) > MAX_FIELDS:
        raise Unfit(f"there are more than {MAX_FIELDS:,} fields; return a list of pairs")
    plain, kinds = {}, []
    for name, item in value.items():
        if not isinstance(name, str):
            raise Unfit(f"keys of a dict must be str, not {show(name)}")
        key = str.__str__(name)
        key.encode()
        plain[key], kind = read(item, depth + 1)
        kinds.append((key, kind))
    return plain, ("struct", tuple(kinds))


def _read_list(value: Sequence[Any], depth: int) -> tuple[Any, Type]:
    kinds = set(map(type, value))
    if kinds == {float}:
        return value, ("list", "float")
    if kinds == {int}:
        return value, ("list", unify(_int(min(value)), _int(max(value))))
    common: Type = "unseen"
    plain = []
    for item in value:
        element, kind = read(item, depth + 1)
        try:
            common = unify(common, kind)
        except Conflict as error:
            _, held, new = error.args
            types = f"{describe(held)} and {describe(new)}"
            raise Unfit(f"a list must hold values of one type, and this has {types}") from None
        plain.append(element)
    return plain, ("list", common)


def _read_array(value: Any, depth: int) -> tuple[Any, Type]:
    dtype = value.dtype
    if not value.ndim:
        return read(value[()], depth)
    if dtype.kind in "OU":
        return _read_list(value.tolist(), depth)
    if value.ndim > 1:
        raise Unfit(f"an array of shape {value.shape} is no vector; return .ravel() or .tolist()")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise Unfit(f"arrays of dtype {dtype} cannot be stored; return numbers of up to 64 bits")
    if dtype == np.float16 or not dtype.isnative:
        value = value.astype(np.float32 if dtype == np.float16 else dtype.newbyteorder("="))
    if depth or not len(value):
        return value, ("array", value.dtype.name)
    return value, ("vector", value.dtype.name, len(value))


def _read_other(value: Any, depth: int) -> tuple[Any, Type]:
    if is_tensor(value):
        return _read_array(of_tensor(value), depth)
    if isinstance(value, np.generic):
        return _read_scalar(value, depth)
    if isinstance(value, str):
        return read(str.__str__(value), depth)
    if isinstance(value, int):
        return read(int(value), depth)
    if isinstance(value, float):
        return read(float(value), depth)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value), "bytes"
    if isinstance(value, (datetime, date, time, timedelta)):
        return _read_time(value)
    if isinstance(value, Decimal):
        return _read_decimal(value)
    if isinstance(value, (list, tuple)):
        return _read_list(value, depth)
    if (mapping := as_dict(value)) is not None:
        return _read_dict(mapping, depth)
    if hasattr(value, "mask") and isinstance(value, np.ndarray):
        return _read_list(value.tolist(), depth)
    if hasattr(value, "__array__"):
        return _read_array(np.asarray(value), depth)
    raise Unfit(
        f"values of type {type(value).__name__} cannot be stored; return None, numbers, str, "
        "bytes, dates and times, or lists, dicts and arrays of them"
    )


def is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "cpu")


def of_tensor(value: Any) -> Any:
    """The array of a tensor of torch."""
    tensor = value.detach().cpu()
    if tensor.is_floating_point() and tensor.element_size() < 4:
        tensor = tensor.float()  # numpy has no bfloat16
    return tensor.numpy()


def _read_scalar(value: Any, depth: int) -> tuple[Any, Type]:
    dtype = value.dtype
    if dtype.kind in "mM":
        # `item` of nanoseconds is an int
        exact = value.astype(f"{dtype.kind}8[us]")
        if exact != value and not np.isnat(value):
            raise Unfit("times are kept to the microsecond")
        return read(exact.item(), depth)
    if dtype.kind not in "biufU" or (dtype.itemsize > 8 and dtype.kind != "U"):
        raise Unfit(f"scalars of dtype {dtype} cannot be stored; return a scalar of Python")
    return read(value.item(), depth)


def _read_time(value: Any) -> tuple[Any, Type]:
    if value != value:  # pandas.NaT
        return None, "null"
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
        raise Unfit("times are kept to the microsecond")
    if isinstance(value, datetime):
        aware = value.utcoffset() is not None
        return (value.astimezone(UTC), "utc") if aware else (value, "datetime")
    if isinstance(value, time):
        if value.tzinfo is not None:
            raise Unfit("a time of day cannot have a zone; return a datetime")
        return value, "time"
    return value, "date" if isinstance(value, date) else "timedelta"


def _read_decimal(value: Decimal) -> tuple[Any, Type]:
    _, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise Unfit("a Decimal must be finite")
    whole, places = max(len(digits) + exponent, 1), max(-exponent, 0)
    if whole + places > MAX_DIGITS:
        raise Unfit(f"a Decimal has at most {MAX_DIGITS} digits before and after its point")
    return value, ("decimal", whole, places)


def as_dict(value: Any) -> dict[Any, Any] | None:
    """Names and values of a mapping, a dataclass or a model of pydantic; None of others."""
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    dump = getattr(type(value), "model_dump", None)  # of pydantic
    return None if dump is None else dict(dump(value))


def to_python(array: Any) -> list[Any]:
    """Values of an Arrow array as the table above has them."""
    if array.null_count:
        valid = array.is_valid().to_pylist()
        present = iter(to_python(array.drop_null()))
        return [next(present) if there else None for there in valid]
    kind = array.type
    rows: list[Any]
    if pa.types.is_struct(kind) and kind.num_fields:
        names = [kind.field(place).name for place in range(kind.num_fields)]
        children = [to_python(array.field(place)) for place in range(kind.num_fields)]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*children, strict=True)]
    elif pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        items = array.values[array.offset * size : (array.offset + len(array)) * size]
        if _holds_numbers(items):
            rows = list(_numbers(items).reshape(len(array), size))
        else:
            values = to_python(items)
            rows = [values[n * size : (n + 1) * size] for n in range(len(array))]
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        ends = array.offsets.to_numpy()
        items = array.values[ends[0] : ends[-1]]
        vectors = pa.types.is_large_list(kind) and _holds_numbers(items)
        values = _numbers(items) if vectors else to_python(items)
        rows = [values[start:end] for start, end in pairwise((ends - ends[0]).tolist())]
    elif pa.types.is_timestamp(kind) and kind.tz is not None:
        # Arrow takes the zone from pytz or from zoneinfo, whichever is installed
        rows = [value.astimezone(UTC) for value in array.to_pylist()]
    elif _holds_numbers(array):
        rows = array.to_numpy(zero_copy_only=False).tolist()
    else:
        rows = array.to_pylist()
    return rows


def _holds_numbers(array: Any) -> bool:
    kind, types = array.type, pa.types
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return bool(number and not array.null_count)


def _numbers(items: Any) -> Any:
    # a copy, because Arrow's memory is read-only, and steps may work in place
    return items.to_numpy(zero_copy_only=False).copy()


def show(value: Any) -> str:
    """Type and shortened text of a value, for messages."""
    try:
        text = reprlib.repr(value)
    except Exception:  # an int of 5,000 digits
        text = "that cannot be shown"
    return f"{type(value).__name__} {text}"
