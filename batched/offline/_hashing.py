"""Hashes of what a step reads of a row, by which an edited row is known from one that is as it was.

The hash is of the values, not of where they came from: read from Parquet, JSONL or a list, equal
values have equal hashes, in every process and with every Python.

- Types count: `1`, `1.0`, `True`, `"1"` and `None` differ, and `-0.0` differs from `0.0`. All NaN
  are one. Moments count with their offset from UTC.
- Of equal meaning, so of equal hash: lists, tuples and arrays; mappings with the same entries in
  any order; scalars of numpy and their equals in Python.
- Objects of any other type are refused: nothing says that they hash alike in another process.

Each value becomes bytes that begin with a letter for its type; parts are preceded by their length,
so no two different values have the same bytes.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from xxhash import xxh3_64_intdigest

from ..errors import SourceError
from ._window import Window

__all__ = ["hash_inputs"]

_MICROSECOND = dt.timedelta(microseconds=1)
_NAN = b"fnan"


def hash_inputs(window: Window, columns: Sequence[str]) -> list[int]:
    """For each row a signed 64-bit hash of its values in these columns, in this order."""
    try:
        if len(columns) == 1:
            encoded = [_encode(value) for value in window.values(columns[0])]
        else:
            parts = [map(_encode, window.values(name)) for name in columns]
            encoded = [_join(b"r", row) for row in zip(*parts, strict=True)]
    except _UnhashableError:
        raise _refusal(window, columns) from None
    if not columns:
        encoded = [b""] * window.size
    hashes = map(xxh3_64_intdigest, encoded)
    # SQLite's integers are signed
    return [number - (1 << 64) if number >> 63 else number for number in hashes]


class _UnhashableError(Exception):
    """An object of a type that no rule covers; its type is the argument."""


def _refusal(window: Window, columns: Sequence[str]) -> SourceError:
    for place in range(window.size):
        for name in columns:
            try:
                _encode(window.values(name)[place])
            except _UnhashableError as error:
                kind: type = error.args[0]
                return SourceError(
                    f"{window.where(window.first + place)}: column {name!r} has a "
                    f"{kind.__module__}.{kind.__qualname__}, which has no stable hash; rows hold "
                    "text, bytes, numbers, dates, and lists, dicts and arrays of these (of large "
                    "objects, their paths)"
                )
    raise AssertionError("a value could not be hashed once, and then could")


def _encode(value: Any) -> bytes:
    encoder = _ENCODERS.get(type(value))
    return encoder(value) if encoder else _encode_other(value)


def _encode_text(value: str) -> bytes:
    return b"s" + value.encode("utf-8", "surrogatepass")


def _encode_integer(value: int) -> bytes:
    return b"i" + value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _encode_float(value: float) -> bytes:
    return b"f" + struct.pack("<d", value) if value == value else _NAN


def _encode_sequence(values: Sequence[Any]) -> bytes:
    if set(map(type, values)) != {float}:
        return _join(b"l", map(_encode, values))
    if (total := sum(values)) != total:  # NaN have many forms, this list perhaps some
        values = [value if value == value else math.nan for value in values]
    return b"F" + struct.pack(f"<{len(values)}d", *values)  # vectors at once


def _encode_mapping(values: Mapping[Any, Any]) -> bytes:
    entries = sorted((_encode(key), _encode(value)) for key, value in values.items())
    return _join(b"d", (part for entry in entries for part in entry))


def _join(letter: bytes, parts: Any) -> bytes:
    return letter + b"".join(
        [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
    )


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    str: _encode_text,
    int: _encode_integer,
    float: _encode_float,
    bool: lambda value: b"t" if value else b"n",
    type(None): lambda _: b"0",
    list: _encode_sequence,
    tuple: _encode_sequence,
    dict: _encode_mapping,
    bytes: lambda value: b"b" + value,
    bytearray: lambda value: b"b" + bytes(value),
    memoryview: lambda value: b"b" + bytes(value),
    dt.datetime: lambda value: b"T" + value.isoformat().encode(),
    dt.date: lambda value: b"D" + value.isoformat().encode(),
    dt.time: lambda value: b"C" + value.isoformat().encode(),
    dt.timedelta: lambda value: b"P" + _encode_integer(value // _MICROSECOND),
    Decimal: lambda value: b"m" + str(value).encode(),
    uuid.UUID: lambda value: b"u" + value.bytes,
    complex: lambda value: b"c" + _encode_float(value.real) + _encode_float(value.imag),
    set: lambda value: _join(b"S", sorted(map(_encode, value))),
    frozenset: lambda value: _join(b"S", sorted(map(_encode, value))),
}

_BASES = (str, int, float, dt.datetime, dt.date, dt.timedelta, list, tuple, Mapping)


def _encode_other(value: Any) -> bytes:
    """Subclasses as the class they come from, scalars and arrays of numpy and torch as Python's."""
    if hasattr(value, "dtype") and callable(getattr(value, "tolist", None)):
        plain = value.tolist()
        if type(plain) is int and getattr(value.dtype, "kind", "") in "mM":
            return b"N" + str(value).encode()  # nanoseconds, which come as a bare number
        if type(plain) in _ENCODERS:
            return _encode(plain)
    elif isinstance(value, os.PathLike):
        return b"p" + os.fsencode(value)
    else:
        for base in _BASES:
            if isinstance(value, base):
                encode: Callable[[Any], bytes] = _ENCODERS.get(base, _encode_mapping)
                return encode(value)
    raise _UnhashableError(type(value))
