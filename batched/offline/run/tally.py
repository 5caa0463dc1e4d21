"""Tally: the dead letters of a run, and the budget for them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final

import orjson

from ...errors import RunStopped
from ..report import DeadLetter, error_type
from ..sources.keys import Key

FEW: Final = 10
"""Failed rows that a share of all must allow before it is judged, while rows are still read."""


class Tally:
    """Dead letters of one run by type of error, and the number that is allowed."""

    def __init__(self, max_failed: float | None) -> None:
        # rows, or a share of all of them if below 1
        self._most = math.inf if max_failed is None else max_failed
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, DeadLetter] = {}  # the first of each type
        self.failed = 0  # rows
        self.last_error: BaseException | None = None

    def note(self, key: Key | None, step: str, text: str, error: BaseException | str = "") -> None:
        """Count a dead letter. `text`: its JSON; `error`: its cause, if that is an exception."""
        letter: Any = {"key": key, "step": step, **orjson.loads(text)}
        self.failed += 1
        if isinstance(error, BaseException):
            self.last_error = error
        kind = error_type(letter["phase"], letter["error"])
        self.errors[kind] += 1
        self.examples.setdefault(kind, letter)

    def check(self, read: int, total: int | None) -> None:
        """Stop the run if more rows have failed than are allowed.

        `read`: rows that were read; `total`: rows of the source, if their number is known.
        """
        allowed = self._most
        if 0 < allowed < 1:
            allowed = allowed * total if total is not None else max(allowed * read, FEW)
        if self.failed > allowed:
            rows = "row has" if self.failed == 1 else "rows have"
            raise RunStopped(f"{self.failed:,} {rows} failed, and max_failed is {self._most:g}")

    def __str__(self) -> str:
        types = ", ".join(f"{count:,} x {name}" for name, count in self.errors.items())
        letter = next(iter(self.examples.values()))
        example = letter["error"].partition("\n")[0]
        return f"{types} (in {letter['phase']}: {example})"
