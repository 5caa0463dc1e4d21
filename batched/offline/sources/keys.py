"""Keys of rows: strings or signed 64-bit integers, exact and unnormalised.

Any other value is a fault of its row, because two rows could then have one key, or one row two:
`1.0` equals `1` and `True`, NaN does not equal itself, and None is common to many rows. The letter
é written as one character and as two is two keys.
"""

from __future__ import annotations

from typing import Final

from ..types.values import read, show
from .base import Window

Key = str | int
"""Identity of a row; integers are signed and of 64 bits, as SQLite has them."""

KINDS: Final = {"str", "int"}
"""Kinds of values that are keys."""


def keys_of(window: Window, column: str | None) -> list[Key | None]:
    """Return the key of each row: its value in `column`, or the row's number without a column.

    A value that is no key is None, and a fault of its row.
    """
    if column is None:
        return list(range(window.first, window.first + window.size))
    keys: list[Key | None] = []
    for place, value in enumerate(window.values(column)):
        try:
            key, kind = read(value)
        except Exception:  # a value without a canonical form
            key, kind = None, "any"
        if kind not in KINDS:
            key = None
            window.note_fault(
                place,
                f"the key in column {column!r}, {show(value)}, cannot be used; keys are valid text "
                "or signed 64-bit integers",
            )
        keys.append(key)
    return keys
