"""Checks of settings that are numbers."""

from __future__ import annotations

from math import inf


def check_amount(what: str, value: object) -> None:
    """Raise a ValueError unless `value` is a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < inf:
        raise ValueError(f"{what} must be a number of at least 0, got {value!r}")
