"""Reading: a thread that reads the source, and finds for each row the first step that it lacks.

A row has got through a step if that is committed for its key, with a result, from an input with the
same hash: the hash of those columns of the source on which the step depends, directly or through
what earlier steps made of them. So batch sizes, workers and the order of rows may change between
runs, and an edited row is computed again, from the first step on that it concerns.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final

from ._columns import Columns
from ._commit import Committed
from ._hashing import hash_inputs
from ._keys import Key, keys_of
from ._progress import Progress
from ._stage import Row
from ._step import Step
from ._window import Source, Window

WINDOW: Final = 2048
"""Rows that are read, and looked up, at once."""
PATIENCE: Final = 10.0
"""Time for a source to answer when a run ends (s): it may wait for a network."""
CACHED: Final = 32
"""Chunks of committed results that are kept decoded."""


@dataclass
class Reading:
    """What a window of the source came to."""

    size: int = 0  # rows in it
    skipped: int = 0  # rows of which all is committed
    recomputed: int = 0  # rows that were committed from another input
    rows: list[list[Row]] = field(default_factory=list)  # by the first step that they lack
    samples: list[tuple[Row, int]] = field(default_factory=list)  # each with a step it got through
    last: bool = False  # there are no more
    error: BaseException | None = None  # of the source


class Plan:
    """Columns that steps read, and those of the source on which they depend."""

    def __init__(self, steps: Sequence[Step], key: str | None) -> None:
        self.steps = steps
        self.key = key
        made: dict[str, tuple[str, ...]] = {}  # columns of steps, and those of the source behind
        self.depends: list[tuple[str, ...]] = []  # of each step
        self.source: list[str] = []  # columns that are read from the source
        for step in steps:
            behind: dict[str, None] = {}
            for name in step.inputs:
                behind.update(dict.fromkeys(made.get(name, (name,))))
                if name not in made and name not in self.source:
                    self.source.append(name)
            self.depends.append(tuple(behind))
            made.update(dict.fromkeys(step.outputs, self.depends[-1]))
        # by step, the columns that later ones read: these go on with the row
        self.needed = [
            tuple(
                name
                for name in step.outputs
                if any(name in later.inputs for later in steps[number + 1 :])
            )
            for number, step in enumerate(steps)
        ]

    @property
    def columns(self) -> list[str]:
        """Columns to read from the source."""
        key = [self.key] if self.key is not None and self.key not in self.source else []
        return [*key, *self.source]


class Reader:
    """Thread that reads windows of the source, each when it is asked for."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        progress: Progress,
        columns: Sequence[Columns],
        tell: Callable[[Reading], None],
    ) -> None:
        self._source = source
        self._plan = plan
        self._progress = progress
        self._results = Results(progress, columns)
        self._sampled = 0  # steps of which it has told a sample
        self._first = progress.is_empty  # so that nothing need be looked up
        self._tell = tell
        self._asked = threading.Semaphore(0)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batched-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self) -> None:
        """Has one more window read."""
        self._asked.release()

    def close(self) -> None:
        self._closed = True
        self._asked.release()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        try:
            for reading in self._readings():
                self._tell(reading)
                if self._closed:
                    return
        except BaseException as error:
            self._tell(Reading(last=True, error=error))

    def _readings(self) -> Iterator[Reading]:
        rows = 0
        windows = self._source.windows(self._plan.columns, WINDOW)
        while True:
            self._asked.acquire()
            window = None if self._closed else next(windows, None)
            if window is None:
                break
            keys = keys_of(window, self._plan.key)
            self._progress.note_source(rows, keys)
            rows += window.size
            yield self._find(window, keys)
        if not self._closed:
            self._progress.end_source(rows)
        yield Reading(last=True)

    def _find(self, window: Window, keys: list[Key]) -> Reading:
        """Rows of a window, and what they lack."""
        plan, steps = self._plan, len(self._plan.steps)
        found = Reading(window.size, rows=[[] for _ in range(steps)])
        hashes = {columns: hash_inputs(window, columns) for columns in set(plan.depends)}
        inputs = list(zip(*[hashes[columns] for columns in plan.depends], strict=True))
        committed = {} if self._first else self._progress.committed(keys)
        columns = [window.values(name) for name in plan.source]
        values: Iterable[dict[str, Any]]
        if len(columns) == 1:
            (name,) = plan.source
            values = [{name: value} for value in columns[0]]
        else:
            values = map(dict, map(zip, repeat(plan.source), zip(*columns, strict=True)))
        if not committed:
            found.rows[0] = list(map(Row, keys, inputs, values, repeat(False)))
            return found
        for key, hashes_of_row, read in zip(keys, inputs, values, strict=True):
            reached, known = 0, False
            have: list[Committed] = []
            failed = False
            for number, hashed in enumerate(hashes_of_row):
                commit = committed.get((key, number))
                if commit is None:
                    break
                if commit.input != hashed or commit.status != "ok":
                    known = commit.input != hashed
                    failed = not known
                    break
                have.append(commit)
                reached += 1
            found.skipped += reached == steps
            if reached == steps == self._sampled:
                continue
            found.recomputed += known
            row = Row(key, hashes_of_row, read, failed)
            for number, commit in enumerate(have):
                if number == self._sampled:
                    found.samples.append((row.copy(), number))
                    self._sampled += 1
                if plan.needed[number]:
                    made = self._results.row(number, commit)
                    read.update({name: made[name] for name in plan.needed[number]})
            if reached < steps:
                found.rows[reached].append(row)
        return found


class Results:
    """Committed results of steps, as later steps read them."""

    def __init__(self, progress: Progress, columns: Sequence[Columns]) -> None:
        self._progress = progress
        self._columns = columns
        self._chunks: OrderedDict[int, list[dict[str, Any]]] = OrderedDict()

    def row(self, step: int, commit: Committed) -> dict[str, Any]:
        """Results of one row, by column."""
        number, place = commit.chunk, commit.place
        assert number is not None
        assert place is not None
        rows = self._chunks.get(number)
        if rows is None:
            rows = self._columns[step].decode(self._progress.chunk(number))
            self._chunks[number] = rows
            if len(self._chunks) > CACHED:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(number)
        return rows[place]
