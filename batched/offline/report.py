"""Report of a run, and snapshots of a run while it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

from .progress.store import Progress
from .sources.keys import Key

State = Literal["running", "writing", "done", "stopped", "interrupted", "failed"]
"""`writing`: all rows have ended, and the result is being written. `stopped`: too many rows failed,
or no row succeeded any more.
"""
ENDS: Final = ("done", "stopped", "interrupted", "failed")


class DeadLetter(TypedDict):
    """A row that failed, and why."""

    key: Key | None
    """The row's key; its number in the source, counted from 0, if the row has none."""
    step: str
    """Name of the step that failed; empty if the row could not be read or written."""
    phase: str
    """Phase that failed: source, preprocess, inference, postprocess or output."""
    error: str
    """Type and text of the error, as "ValueError: bad row"."""
    attempts: int
    """Times that the row was tried. A search for the rows that fail in a batch is one time."""
    traceback: str
    """Lines of the traceback; empty if there is none."""


@dataclass(frozen=True)
class StepCounts:
    """Rows of one step in this run."""

    name: str
    """Name of the step."""
    ok: int
    """Rows that got a result."""
    failed: int
    """Rows that became dead letters."""
    waiting: int
    """Rows in the step that have not ended yet."""
    batches: int
    """Batches that have ended."""
    filtered: int = 0
    """Rows with a result that the predicate `where` has refused."""


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment."""

    total: int | None
    """Rows of the source, if their number is known."""
    read: int
    """Rows read so far."""
    skipped: int
    """Rows that were committed in all steps before."""
    recomputed: int
    """Rows that were committed before, from an input that has changed since."""
    seconds: float
    """Time since the run began (s)."""
    steps: tuple[StepCounts, ...]
    """Counts of each step, in order."""
    errors: Mapping[str, int]
    """Dead letters by type of error."""
    examples: Mapping[str, DeadLetter]
    """The first dead letter of each type."""
    stopped: str = ""
    """Reason for an early end of the run."""
    total_is_estimate: bool = False
    """Whether `total` is estimated from the beginning of the first file."""
    unreadable: int = 0
    """Rows that could not be read, or not be written to the result: dead letters of no step."""

    @property
    def ok(self) -> int:
        """Rows that got through all steps in this run."""
        return self.steps[-1].ok

    @property
    def failed(self) -> int:
        """Rows that became dead letters in this run."""
        return self.unreadable + sum([step.failed for step in self.steps])

    @property
    def filtered(self) -> int:
        """Rows that a predicate `where` has ended in this run."""
        return sum([step.filtered for step in self.steps])


@dataclass(frozen=True)
class Pace:
    """Progress of one step, and its speed."""

    step: StepCounts
    done: int
    """Rows of the source that have ended in this step or an earlier one."""
    rate: float | None
    """Rows a second, of the rows computed in this run; None before a second batch has ended."""
    left: float | None
    """Time until the step's last row ends (s), if the number of rows and the rate are known."""


@dataclass(frozen=True, kw_only=True)
class Report(Snapshot):
    """Outcome of a run: its last snapshot, and its files.

    A row with a value that the result cannot hold counts in `ok` and in `failed`, because the value
    is committed.
    """

    output: str
    """Path of the result."""
    progress: str
    """Path of the progress file."""

    @property
    def rows_per_s(self) -> float:
        """Rows computed a second."""
        return (self.ok + self.failed) / self.seconds if self.seconds else 0.0

    def dead_letters(self) -> Iterator[DeadLetter]:
        """Yield all dead letters of the progress file, of this run and of earlier runs.

        Raises:
            RunLocked: another run is writing the file.
        """
        return dead_letters(Path(self.progress))

    def __str__(self) -> str:
        counts = {
            "failed": self.failed,
            "filtered": self.filtered,
            "done before": self.skipped,
            "edited since the last run": self.recomputed,
        }
        parts = [f"{self.ok:,} ok", *[f"{n:,} {name}" for name, n in counts.items() if n]]
        text = f"{', '.join(parts)} in {self.seconds:,.1f} s"
        if self.ok + self.failed:
            text += f" ({self.rows_per_s:,.1f} rows/s)"
        errors = ", ".join(f"{count:,} x {name}" for name, count in sorted(self.errors.items()))
        lines = [text, f"failed: {errors}" if errors else "", self.stopped or self.output]
        return "\n".join(filter(None, lines))


def dead_letters(path: Path) -> Iterator[DeadLetter]:
    """Yield the dead letters of the progress file at `path`, which is open until the first one.

    Raises:
        RunLocked: a run is writing the file.
    """
    with closing(Progress(path)) as progress:
        letters: Any = progress.dead_letters()
    yield from letters


def error_type(phase: str, error: str) -> str:
    """Return the type of an error by its text, or the phase if the text names no type."""
    name = error.partition(":")[0]
    return name if name.isidentifier() else phase
