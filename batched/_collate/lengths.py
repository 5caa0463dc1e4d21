"""Checks of the lengths that the user's function `length` returns."""

from __future__ import annotations

import math
import sys
from typing import Any


def validate_lengths(name: str, lengths: list[Any]) -> list[int]:
    """Return the lengths that the user's function `length` returned, rounded up to integers.

    `name` is the name of the batch function, for messages.

    Raises:
        TypeError: a length is not a number.
        ValueError: a length is negative or too large.
    """
    # the most frequent case: integers in range
    if set(map(type, lengths)) == {int} and min(lengths) >= 0 and max(lengths) <= sys.maxsize:
        return lengths
    found: list[int] = []
    for length in lengths:
        try:
            found.append(math.ceil(length))
        except (TypeError, ValueError, OverflowError):
            raise TypeError(
                f"{name}: length must return a number of at least 0, got {length!r}"
            ) from None
        if not 0 <= found[-1] <= sys.maxsize:
            raise ValueError(
                f"{name}: length must return a number from 0 to {sys.maxsize}, got {length!r:.40}"
            )
    return found
