"""Keys of rows: strings or signed 64-bit integers, exact and unnormalised.

All else is refused with the row and the value, since two rows could then have one key, or one row
two: `1.0` equals `1` and `True`, NaN does not equal itself, and what stands for nothing is common
to many rows. The letter é written as one character and as two is two keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import SourceError
from ._window import Window, shorten

__all__ = ["Key", "keys_of"]

Key = str | int
"""Identity of a row; integers are signed and of 64 bits, as SQLite has them."""

_LIMIT = 1 << 63


def keys_of(window: Window, column: str | None) -> list[Key]:
    """The key of each row: the value in `column`, or without one the number of the row."""
    if column is None:
        return list(range(window.first, window.first + window.size))
    keys = []
    for place, value in enumerate(window.values(column)):
        kind = type(value)
        if kind is str:
            if not value.isascii() and (fault := _text_fault(value)):
                raise _bad_key(window, place, column, value, fault)
            keys.append(value)
        elif kind is int and -_LIMIT <= value < _LIMIT:
            keys.append(value)
        else:
            keys.append(_unusual_key(window, place, column, value))
    return keys


def _unusual_key(window: Window, place: int, column: str, value: Any) -> Key:
    """The key that a subclass of `str` or `int`, or an integer of numpy, is equal to."""
    if isinstance(value, str):
        text = str.__str__(value)
        if fault := _text_fault(text):
            raise _bad_key(window, place, column, value, fault)
        return text
    # numpy 1 takes its own truth values for integers
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise _bad_key(window, place, column, value, f"a {type(value).__name__}")
    try:
        number = int(value.__index__())
    except TypeError:  # arrays have the method, too
        raise _bad_key(window, place, column, value, f"a {type(value).__name__}") from None
    if not -_LIMIT <= number < _LIMIT:
        raise _bad_key(window, place, column, value, "an integer beyond 64 bits")
    return number


def _text_fault(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "not valid text: it has a lone surrogate"
    return None


def _bad_key(window: Window, place: int, column: str, value: object, fault: str) -> SourceError:
    return SourceError(
        f"{window.where(window.first + place)}: the key {shorten(value)} in column {column!r} is "
        f"{fault}; keys are strings or signed 64-bit integers"
    )
