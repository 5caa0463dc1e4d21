"""Reader: a thread that reads the source, and finds for each row the first step that it lacks.

A step is done for a row if a result is committed for the row's key, from an input with the same
hash: the hash of the source columns on which the step depends, directly or through earlier steps.
So batch sizes, workers and the order of rows may change between runs. An edited row is computed
again, from the first step that reads the edit.

A row that cannot be read is a dead letter of phase `source`, before anything is computed for it. So
is a row with the key of an earlier row, and a row with a value that the result cannot hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engines.row_threads import RowThreads
from ..identity.inputs import hash_inputs
from ..progress.commit import Committed, Letter, letter_text
from ..progress.store import Progress
from ..sources.base import Source, Window
from ..sources.keys import keys_of
from .failures import Row
from .plan import Plan


@dataclass
class Reading:
    """The outcome of reading one window of the source."""

    size: int = 0  # rows in it
    # rows as in `Snapshot`: skipped and recomputed
    counts: Counter[str] = field(default_factory=Counter)
    rows: list[list[Row]] = field(default_factory=list)  # by the first step that they lack
    samples: list[tuple[Row, int]] = field(default_factory=list)  # each with a step it got through
    letters: list[Letter] = field(default_factory=list)  # rows that cannot be read
    last: bool = False  # there are no more


class Reader:
    """Thread that reads windows of the source, each when it is asked for.

    `note_kinds` gets the windows of a source without types, `tell` each `Reading`, and `fail` the
    error that ended the reading.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        progress: Progress,
        note_kinds: Callable[[Window], None],
        tell: Callable[[Reading], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._source = source
        self._plan = plan
        self._progress = progress
        self._note_kinds = note_kinds
        self._sampled = 0  # steps of which a sample was found
        self._first = progress.is_empty  # so that nothing need be looked up
        self._tell = tell
        self._fail = fail
        self._readings = self._read()
        self._thread = RowThreads(1, "reader")

    def ask(self) -> None:
        """Request one more window."""
        self._thread.submit(self._tell_next)

    def close(self, deadline: float) -> None:
        """End the thread, or leave it if its source has not answered by then (s)."""
        self._thread.close(deadline)

    def _tell_next(self) -> None:
        try:
            self._tell(next(self._readings))
        except BaseException as error:
            self._fail(error)

    def _read(self) -> Iterator[Reading]:
        rows = 0
        plan = self._plan
        # Arrow sources know the types of all columns, read or not
        columns: list[str] | None = plan.columns
        if self._source.schema is None:
            columns = None if plan.keep is None else [*plan.columns, *plan.keep]
        for window in self._source.windows(columns, required=plan.columns):
            yield self._find(window)
            rows = window.first + window.size
        self._progress.end_source(rows)
        yield Reading(last=True)

    def _find(self, window: Window) -> Reading:
        """Return the rows of a window by the steps that they lack."""
        plan, faults = self._plan, window.faults
        keys = keys_of(window, plan.key)
        columns = [window.values(name) for name in plan.source]
        hashes = {names: hash_inputs(window, names) for names in set(plan.depends)}
        window.check(self._source.name)
        if self._source.schema is None:
            self._note_kinds(window)
        usable = [None if place in faults else key for place, key in enumerate(keys)]
        for place in self._progress.note_source(window.first, usable):
            window.note_fault(
                place,
                f"the key {keys[place]!r} stands twice in the source, here and in an earlier row; "
                "each row needs a key of its own",
            )
        found = Reading(window.size, rows=[[] for _ in plan.steps])
        known = [] if self._first else [key for key in usable if key is not None]
        committed = self._progress.committed(known)
        inputs = zip(*[hashes[names] for names in plan.depends], strict=True)
        rows = zip(keys, inputs, zip(*columns, strict=True), strict=True)
        for place, (key, hashed, values) in enumerate(rows):
            number = window.first + place
            if place in faults:
                text = letter_text("source", faults[place])
                found.letters.append(Letter(number, key, text))
                continue
            row = Row(key, hashed, dict(zip(plan.source, values, strict=True)), number)  # type: ignore[arg-type]  # without a key it has a fault
            if committed:
                self._look_up(row, committed, found)
            else:
                found.rows[0].append(row)
        if found.letters:
            self._progress.add_letters("source", found.letters)
        return found

    def _look_up(
        self, row: Row, committed: Mapping[tuple[Any, int], Committed], found: Reading
    ) -> None:
        """Find the first step that `row` lacks."""
        plan, ended = self._plan, False
        have: list[Committed] = []
        for number, hashed in enumerate(row.inputs):
            commit = committed.get((row.key, number))
            edited = commit is not None and commit.input != hashed
            found.counts["recomputed"] += edited
            if commit is None or edited or commit.status == "failed":
                break
            if ended := commit.status == "filtered":
                break
            have.append(commit)
        ended = ended or len(have) == len(row.inputs)
        found.counts["skipped"] += ended
        if ended and len(have) <= self._sampled:
            return
        for number, commit in enumerate(have):
            if number == self._sampled:
                found.samples.append((row.next(), number))
                self._sampled += 1
            if plan.needed[number]:
                columns = self._progress.chunk(commit.chunk)
                for name in plan.needed[number]:
                    column = columns[plan.steps[number].outputs.index(name)]
                    row.values[name] = column[commit.place]
        if not ended:
            found.rows[len(have)].append(row)
