"""Report of a run, and what is known of one while it goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TypedDict

from ._html import html_table
from ._keys import Key
from ._progress import Progress


class DeadLetter(TypedDict):
    """A row that failed, and why."""

    key: Key
    """The row's key; its number in the source, counted from 0, where there is no key column."""
    step: str
    """Name of the step that it failed in."""
    phase: str
    """What failed: preprocess, inference, postprocess, or output."""
    error: str
    """Type and text of the error, as "ValueError: bad row"."""
    attempts: int
    """Calls of the function that the row was in."""
    traceback: str
    """Lines of the traceback; empty where there is none."""


@dataclass(frozen=True)
class StepCounts:
    """Rows of one step in this run."""

    name: str
    ok: int
    """Rows that got a result."""
    failed: int
    """Rows that became dead letters."""
    waiting: int
    """Rows in the step that have neither yet."""
    batches: int
    """Batches that have ended."""
    seconds: float
    """Time of the function in these, all workers together (s)."""


@dataclass(frozen=True)
class Snapshot:
    """What is known of a run at one moment."""

    total: int | None
    """Rows of the source, if their number is known."""
    read: int
    """Rows read so far."""
    skipped: int
    """Rows of which all was committed before."""
    recomputed: int
    """Rows that were committed before, from an input that has changed since."""
    seconds: float
    """Time since the run began (s)."""
    steps: tuple[StepCounts, ...]
    errors: Mapping[str, int]
    """Dead letters by type of error."""
    examples: Mapping[str, DeadLetter]
    """The first dead letter of each of these types."""
    stopped: str = ""
    """Why the run ended before all was done, once it has."""

    @property
    def ok(self) -> int:
        """Rows that got through all steps in this run."""
        return self.steps[-1].ok

    @property
    def failed(self) -> int:
        """Rows that became dead letters in this run."""
        return sum([step.failed for step in self.steps])


@dataclass(frozen=True)
class Report:
    """What a run came to."""

    ok: int
    """Rows that got through all steps in this run."""
    failed: int
    """Rows that became dead letters in this run."""
    skipped: int
    """Rows of which all was committed before, and was not computed again."""
    recomputed: int
    """Rows of `ok` and `failed` that were committed before, from an input that has changed."""
    seconds: float
    """Time of the run (s)."""
    output: str
    """Where the result is."""
    progress: str
    """Where the progress file is."""
    steps: tuple[StepCounts, ...]
    errors: Mapping[str, int]
    """Dead letters of this run by type of error."""
    stopped: str = ""
    """Why the run ended before all was done; empty if all was."""

    @property
    def rows_per_s(self) -> float:
        """Rows computed a second."""
        return (self.ok + self.failed) / self.seconds if self.seconds else 0.0

    def dead_letters(self) -> Iterator[DeadLetter]:
        """All rows of the progress file that have failed, of this run and of those before it.

        Raises:
            RunLocked: another run is writing it.
        """
        return dead_letters(Path(self.progress))

    def __str__(self) -> str:
        parts = [f"{self.ok:,} ok"]
        parts += [f"{self.failed:,} failed"] if self.failed else []
        parts += [f"{self.skipped:,} done before"] if self.skipped else []
        parts += [f"{self.recomputed:,} edited since the last run"] if self.recomputed else []
        text = f"{', '.join(parts)} in {self.seconds:,.1f} s"
        if self.ok + self.failed:
            text += f" ({self.rows_per_s:,.1f} rows/s)"
        errors = ", ".join(f"{count:,} x {name}" for name, count in sorted(self.errors.items()))
        lines = [text, f"failed: {errors}" if errors else "", self.stopped or self.output]
        return "\n".join(filter(None, lines))

    def _repr_html_(self) -> str:
        """The same for notebooks, with the steps."""
        summary, *others = str(self).splitlines()
        steps = html_table(
            ("step", "ok", "failed", "batches"),
            [
                (step.name, f"{step.ok:,}", f"{step.failed:,}", f"{step.batches:,}")
                for step in self.steps
            ],
        )
        return f"<p>{escape(summary)}</p>{steps}<p>{'<br>'.join(map(escape, others))}</p>"


def dead_letters(path: Path) -> Iterator[DeadLetter]:
    """Rows of the progress file at `path` that have failed.

    Raises:
        RunLocked: a run is writing it.
    """
    with closing(Progress.open(path)) as progress:
        yield from letters_of(progress)


def letters_of(progress: Progress) -> Iterator[DeadLetter]:
    """Rows of an open progress file that have failed."""
    names = [step["name"] for step in progress.get("steps") or ()]
    for letter in progress.dead_letters():
        yield DeadLetter(**{**letter, "step": names[letter["step"]]})


def error_type(phase: str, error: str) -> str:
    """Type of an error as its text has it; where that is a sentence of this library's own, the
    phase.
    """
    found = re.match(r"[^\W\d]\w*(?=:|$)", error)
    return found[0] if found else phase
