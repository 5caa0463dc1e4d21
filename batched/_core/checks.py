"""Checks of settings, and of the names that callers give."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral


def check_whole(name: str, value: object, least: int = 1) -> int:
    """Return `value` as an int.

    Raises:
        TypeError: the value is no integer.
        ValueError: the value is below `least`.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
    return int(value)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the question whether the most similar known name was meant, or an empty text."""
    from difflib import get_close_matches  # only errors need it

    alike = get_close_matches(name, known, 1)
    return f"; did you mean {alike[0]!r}?" if alike else ""
