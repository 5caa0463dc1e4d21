"""Hashes of the values that a step reads of a row, which tell an edited row from an unchanged row.

1. The hash is of values, not of their origin: equal values from Parquet, JSONL or a list have
   equal hashes, in every process and with every Python.
2. Types count: `1`, `1.0`, `True`, `"1"` and `None` differ, and `-0.0` differs from `0.0`. All NaN
   are equal. Moments count with their offset from UTC.
3. Lists, tuples and arrays of equal numbers are equal; the width of the numbers does not count.
   So are mappings with the same entries in any order, and scalars of numpy and of Python.
4. A value of another type counts by its canonical form (`types.values`): a path by its text, a
   model of pydantic as a dict. A value without this form is a fault of its row.
5. A value becomes a letter for its type and a payload. Parts of a payload are preceded by their
   lengths, so two different values have different bytes. A text alone has a seed for its letter.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from xxhash import xxh3_64_digest

from ..sources.base import Window
from ..types.values import Unfit, read

__all__ = ["hash_inputs"]

_TEXT = ord("s")
"""Seed of the hash of a text."""


def hash_inputs(window: Window, columns: Sequence[str]) -> list[int]:
    """Return for each row a signed 64-bit hash of its values in these columns, in this order.

    A value without a stable hash becomes a fault of its row. The hash of a row with a fault is 0.
    """
    parts = [
        [_hash_value(value, window, place, name) for place, value in enumerate(window.values(name))]
        for name in columns
    ]
    digests = parts[0]
    if len(parts) > 1:
        digests = [xxh3_64_digest(b"".join(row)) for row in zip(*parts, strict=True)]
    hashes = list(struct.unpack(f">{window.size}q", b"".join(digests)))
    for place in window.faults:
        hashes[place] = 0
    return hashes


def _hash_value(value: Any, window: Window, place: int, name: str) -> bytes:
    try:
        if isinstance(value, str):
            return xxh3_64_digest(value.encode("utf-8", "surrogatepass"), _TEXT)
        return xxh3_64_digest(_encode(value))
    except Exception as error:  # objects may have methods of any kind
        window.note_fault(
            place,
            f"column {name!r} has a value without a stable hash ({error}); rows hold text, bytes, "
            "numbers, dates, and lists, dicts and arrays of these (of large objects, their paths)",
        )
        return bytes(8)


def _encode(value: Any) -> bytes:
    for base in type(value).__mro__:
        if base in _ENCODERS:
            return _ENCODERS[base](value)
    try:
        plain, _ = read(value)
    except Unfit:
        raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}") from None
    return _encode(plain)


def _encode_integer(value: int) -> bytes:
    return b"i" + value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _encode_float(value: float) -> bytes:
    return b"f" + struct.pack("<d", value if value == value else math.nan)


def _encode_sequence(values: Sequence[Any]) -> bytes:
    kinds = set(map(type, values))
    if kinds in ({float}, {int}):
        with contextlib.suppress(OverflowError):  # an integer of more than 64 bits
            return _encode_array(np.array(values, "i8" if int in kinds else "f8"))
    return _join(b"l", map(_encode, values))


def _encode_array(values: Any) -> bytes:
    if values.ndim > 1:
        return _join(b"l", map(_encode, values))
    kind = values.dtype.kind if values.ndim and values.size else ""
    if kind == "f":
        floats = values.astype("<f8")
        floats[np.isnan(floats)] = math.nan  # NaN have many forms
        return b"F" + bytes(floats)
    if kind == "i" or (kind == "u" and values.max() < 2**63):
        return b"I" + bytes(values.astype("<i8"))
    return _encode(values.tolist())


def _encode_mapping(values: Mapping[Any, Any]) -> bytes:
    entries = sorted((_encode(key), _encode(value)) for key, value in values.items())
    return _join(b"d", (part for entry in entries for part in entry))


def _join(letter: bytes, parts: Any) -> bytes:
    return letter + b"".join(
        [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
    )


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    str: lambda value: b"s" + value.encode("utf-8", "surrogatepass"),
    int: _encode_integer,
    float: _encode_float,
    bool: lambda value: b"t" if value else b"n",
    type(None): lambda _: b"0",
    **dict.fromkeys((list, tuple), _encode_sequence),
    **dict.fromkeys((bytes, bytearray, memoryview), lambda value: b"b" + bytes(value)),
    **dict.fromkeys((dt.datetime, dt.date, dt.time), lambda at: b"T" + at.isoformat().encode()),
    np.ndarray: _encode_array,
    dict: _encode_mapping,
    dt.timedelta: lambda value: b"P" + _encode_integer(value // dt.timedelta(microseconds=1)),
    Decimal: lambda value: b"m" + str(value).encode(),
    **dict.fromkeys((np.datetime64, np.timedelta64), lambda value: b"N" + str(value).encode()),
}
