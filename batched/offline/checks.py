"""Checks of settings that are numbers."""

from __future__ import annotations

from math import inf


def check_amount(what: str, value: object) -> None:
    """Raise a ValueError unless `value` is a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < inf:
        raise ValueError(f"{what} must be a number of at least 0, got {value!r}")


def check_whole(what: str, value: object) -> None:
    """Raise a TypeError or ValueError unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an integer of at least 1, got {value!r}")
    if value < 1:
        raise ValueError(f"{what} must be at least 1, got {value!r}")
