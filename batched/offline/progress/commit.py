"""Commits: rows of one step that have ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import orjson

from ..types.columns import Values

Key = str | int
Ended = tuple[Key, int]
"""A row that has ended: its key, the hash of its input."""
Status = Literal["ok", "failed", "filtered"]


class Committed(NamedTuple):
    """The state of one row and step."""

    status: Status
    chunk: int | None  # None: it has no value
    place: int | None  # in the chunk
    input: int  # hash of the values that the step read


class Letter(NamedTuple):
    """A dead letter of phase `source` or `output`, known by the number of its row."""

    row: int  # of the source
    key: Key | None  # None: it has no key
    error: str  # JSON


@dataclass(slots=True)
class Commit:
    """Rows of one step that have ended, and are to be committed."""

    step: int
    rows: list[Ended] = field(default_factory=list)  # in the order of `values`
    values: Values | None = None  # of `rows`
    # rows without a value: each with its error as JSON; None: ended by the step's `where`
    ended: list[tuple[Key, int, str | None]] = field(default_factory=list)
    # values to be put under these names together with the rows
    notes: Mapping[str, Any] = field(default_factory=dict)


def letter_text(phase: str, error: str, lines: str = "", attempts: int = 0) -> str:
    """Return the JSON by which a progress file keeps an error; `lines` are its traceback."""
    letter = {"phase": phase, "error": error, "traceback": lines, "attempts": attempts}
    return orjson.dumps(letter).decode()
