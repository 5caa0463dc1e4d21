"""Keys of rows: strings or signed 64-bit integers, exact and unnormalised.

Any other value is a fault of its row, because two rows could then have one key, or one row two:
`1.0` equals `1` and `True`, NaN does not equal itself, and None is common to many rows. The letter
é written as one character and as two is two keys.
"""

from __future__ import annotations

from operator import index
from reprlib import repr as shorten
from typing import Any, Final

import numpy as np

from .base import Window

Key = str | int
"""Identity of a row; integers are signed and of 64 bits, as SQLite has them."""

_LIMIT: Final = 1 << 63


def keys_of(window: Window, column: str | None) -> list[Key | None]:
    """Return the key of each row: its value in `column`, or the row's number without a column.

    A value that is no key is None, and a fault of its row.
    """
    if column is None:
        return list(range(window.first, window.first + window.size))
    keys: list[Key | None] = []
    for place, value in enumerate(window.values(column)):
        kind = type(value)
        if (kind is str and value.isascii()) or (kind is int and -_LIMIT <= value < _LIMIT):
            keys.append(value)
            continue
        key, fault = _read(value)
        keys.append(key)
        if fault:
            window.note_fault(
                place,
                f"the key {shorten(value)} in column {column!r} is {fault}; keys are strings or "
                "signed 64-bit integers",
            )
    return keys


def _read(value: Any) -> tuple[Key | None, str]:
    """Return the plain key that a value is equal to, or None and the reason against it."""
    try:
        if isinstance(value, str):
            text = str.__str__(value)
            text.encode()
            return text, ""
        if not isinstance(value, bool | np.bool_):  # numpy 1 takes its own for integers
            key = index(value)
            return (key, "") if -_LIMIT <= key < _LIMIT else (None, "an integer beyond 64 bits")
    except UnicodeEncodeError:
        return None, "not valid text: it has a lone surrogate"
    except TypeError:
        pass
    return None, f"a {type(value).__name__}"
