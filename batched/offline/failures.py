"""Errors of a batch function in the results and in the progress file of a run."""

from __future__ import annotations

from collections.abc import Iterable

import orjson


def has_error(results: Iterable[object]) -> bool:
    """Return whether an exception is among `results`."""
    return any(issubclass(kind, BaseException) for kind in set(map(type, results)))


def letter_text(phase: str, error: str, lines: str = "", attempts: int = 0) -> str:
    """Return the JSON by which a progress file keeps an error; `lines` are its traceback."""
    letter = {"phase": phase, "error": error, "traceback": lines, "attempts": attempts}
    return orjson.dumps(letter).decode()
