"""Room: one step of a run, with the rows that have entered it and have not ended.

A room belongs to the thread of the run. Rows wait here until the step has room for them (`feed`),
are prepared (`_prepare`), go to the engine, are finished (`_end`), and come back with their
outcomes (`_take`). The user's code for single rows, `preprocess`, `postprocess` and `where`, runs
on row threads. Other threads put calls of `_take` into the queue of the run's thread (`post`).
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from time import perf_counter
from typing import Any, Final

from ..._collate.arguments import signature_of
from ..._collate.arrays import is_array
from ..._collate.features.outputs import tree_flatten, tree_unflatten
from ...errors import RunStopped
from ..engines.engine import SEARCHED, Engine, Unfit, WorkerClosed
from ..engines.row_threads import RowThreads
from ..report import StepCounts
from ..types.columns import Columns
from .failures import Failure, Failures, Row, text_of

AHEAD: Final = 33
"""Most batches of rows in a step."""
AHEAD_BY_LENGTH: Final = 64
"""The same where items have lengths, so that items of similar length are found."""
TOGETHER: Final = 16
"""Most rows in one task of a row thread."""
CHUNK: Final = 2048
"""Most rows that the engine gets at once."""
FILTERED: Final[Any] = object()
"""Result of a row for which the step's `where` is false."""

Post = Callable[[Callable[[], object]], object]
"""Function that has the thread of the run call a function."""


class Room:
    """One step, and its rows."""

    def __init__(
        self, number: int, engine: Engine, post: Post, row_threads: RowThreads | None
    ) -> None:
        self.number = number
        self.engine = engine
        self.step = step = engine.step
        self.columns = Columns(step.outputs, step.declared)
        self._post = post
        self._prepares = row_threads if step.preprocess is not None else None
        has_code = step.postprocess is not None or step.where is not None
        self._finishes = has_code or engine.takes_features
        self._row_threads = row_threads if has_code else None
        self._where = step.where
        if step.where is not None and not _takes_two(step.where):
            self._where = lambda output, _, where=step.where: where(output)
        # the column with the items; None: items are dicts of columns
        (*_, column) = step.inputs
        of_columns = len(step.inputs) > 1 or (engine.takes_features and step.preprocess is None)
        self._column = None if of_columns else column
        size, slots = engine.options.policy.batch_size, engine.slots
        once = size == step.retry.attempts == 1
        self.failures = Failures(step.name, step.call_retry, step.outage_s, once=once)
        varies = engine.options.item_length is not None or engine.takes_features
        batches = max(AHEAD_BY_LENGTH if varies else AHEAD, 2 * slots + 1)
        self.limit = batches * size
        """Rows that may be in this step."""
        self.least = (1 + slots) * size
        """Rows that keep the engine busy; read even if they are large."""
        # The output of `preprocess` is often far larger than the row: an image and its path.
        few = self._prepares is not None and not varies
        self._ahead = 2 * slots + 1 if few else batches  # batches that the engine may have
        self.open = 0  # rows that have entered and have not ended
        self.waiting: deque[Row] = deque()  # rows that are to be called
        self.out = 0  # rows that are prepared, with the engine, or finished
        self._preparing = 0  # rows that are being prepared
        self.done: list[Row] = []  # rows with results that wait for the next commit
        self.committed = -math.inf  # moment of the last commit (s)
        self._ended = {"ok": 0, "failed": 0, "filtered": 0}  # rows

    # rows in

    def enter(self, rows: Sequence[Row]) -> None:
        """Take rows that arrive."""
        self.open += len(rows)
        self.waiting.extend(rows)

    @property
    def busy(self) -> bool:
        """Whether a row runs, is prepared or finished, or waits for a commit."""
        engine = self.engine
        out = self.out - engine.waiting
        if engine.options.dedupe:  # equal items wait as one
            out = self._preparing + engine.running
        return out > 0 or bool(self.done or self.failures.dead)

    def feed(self, now: float, *, more: bool, stuck: bool) -> float:
        """Hand rows to the engine, or try one. Return when this is due again without an event (s).

        `more`: rows may still enter. `stuck`: nothing in the run goes on unless batches leave.
        """
        failures, engine, waiting = self.failures, self.engine, self.waiting
        last = stuck or not more
        if last and not (self.out or waiting):
            failures.doubt_rest()
        waiting.extendleft(failures.take_due(now))
        if not failures.doubt:
            engine.paused = False
            most = self._ahead * engine.batch_size
            while waiting and self.out < most:
                self._send(min(most - self.out, CHUNK if self._prepares is None else TOGETHER))
            engine.hold(holds=not stuck and (more or self._preparing > 0 or bool(waiting)))
        elif failures.trial is None:
            engine.paused = True
            engine.hold(holds=False)  # batches come back, and are not computed
            if now >= failures.trial_at and not (self._preparing or engine.waiting):
                row = failures.pick(waiting)
                if row is not None:
                    engine.paused = False
                    self._give([row])
                elif last and not self.out:
                    failures.give_up()
        return failures.moment(now)

    def _send(self, most: int) -> None:
        """Send up to `most` rows that are alike to the engine."""
        waiting = self.waiting
        rows = [waiting.popleft()]
        while waiting and len(rows) < most and waiting[0].searched is rows[0].searched:
            rows.append(waiting.popleft())
        self._give(rows)

    def _give(self, rows: list[Row]) -> None:
        self.out += len(rows)
        if self._prepares is None:
            self._prepare(rows)
        else:
            self._preparing += len(rows)
            self._prepares.submit(self._prepare, rows)

    def _note_prepared(self, rows: int) -> None:
        self._preparing -= rows

    def _prepare(self, rows: list[Row]) -> None:
        """Make items of rows, and hand them to the engine."""
        owner = SEARCHED if rows[0].searched else None
        groups: dict[tuple[Any, ...], tuple[list[Row], list[Any]]] = {}  # by further arguments
        for row in rows:
            try:
                args, item = self._item(row.values)
                some, items = groups.setdefault(args, ([], []))
            except BaseException as error:
                closed = isinstance(error, WorkerClosed)
                self._end([row], [0], [error if closed else Unfit("preprocess", error)])
            else:
                some.append(row)
                items.append(item)
        for args, (some, items) in groups.items():
            self.engine.submit(items, partial(self._end, some), args, owner)
        if self._prepares is not None:
            self._post(partial(self._note_prepared, len(rows)))

    def _item(self, values: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """Return the further arguments for a row that differ from row to row, and its item."""
        step = self.step
        if self._column is not None:
            item = values[self._column]
        else:
            item = {name: values[name] for name in step.inputs}
        args = () if step.route is None else (step.route(item),)
        if step.preprocess is not None:
            if self.engine.closed:
                raise WorkerClosed
            item = step.preprocess(item)
        elif self.engine.takes_features:
            item = features_of_row(item)
        return args, item

    # outcomes

    def _end(self, rows: list[Row], places: list[int], outcomes: list[Any]) -> None:
        """Finish the outcomes of `rows` at these places. Any thread may call this."""
        rows = [rows[place] for place in places]
        if not self._finishes:
            self._post(partial(self._take, rows, outcomes))
        elif self._row_threads is None:
            self._finish(rows, outcomes)
        else:
            for at in range(0, len(rows), TOGETHER):
                some = slice(at, at + TOGETHER)
                self._row_threads.submit(self._finish, rows[some], outcomes[some])

    def _finish(self, rows: list[Row], outcomes: list[Any]) -> None:
        self._post(partial(self._take, rows, list(map(self._finished, rows, outcomes))))

    def _finished(self, row: Row, output: Any) -> Any:
        """Return the result of a row, made of the output of the function, or its error."""
        if isinstance(output, BaseException):
            return output
        try:
            if self.engine.takes_features:
                arrays = [array[0] for _, array in tree_flatten(output)]
                output = tree_unflatten(output, iter(arrays))
            if self.step.postprocess is not None:
                if self.engine.options.dedupe:  # equal rows share it
                    output = deepcopy(output)
                output = self.step.postprocess(output)
            keeps = self._where is None or bool(self._where(output, {**row.values}))
        except BaseException as error:
            return Unfit("postprocess", error)
        return output if keeps else FILTERED

    def _take(self, rows: list[Row], outcomes: list[Any]) -> None:
        """Take the outcomes of rows."""
        self.out -= len(rows)
        failures = self.failures
        is_probe = rows[0] is failures.probe
        worked = False
        failed: list[Failure] = []
        for row, outcome in zip(rows, outcomes, strict=True):
            row.attempts += 1
            if not isinstance(outcome, BaseException):
                worked = True
                if not is_probe:
                    row.result = outcome
                    self.done.append(row)
            elif isinstance(outcome, WorkerClosed):  # it was not computed
                row.attempts -= 1
                if not is_probe:
                    self.waiting.appendleft(row)
            elif not isinstance(outcome, Unfit):
                failed.append((row, outcome))
            elif is_probe:
                failed.append((row, outcome.error))
            else:
                worked = worked or outcome.phase == "postprocess"
                failures.dead.append((row, outcome.phase, outcome.error))
        if worked or failed:
            failures.note(failed, worked=worked, now=perf_counter())
        if rows[0] is failures.trial:
            failures.trial = None

    def check(self) -> None:
        """Raise RunStopped if the step counts as broken."""
        if self.failures.stopped is not None:
            why, error = self.failures.stopped
            cause = error if isinstance(error, BaseException) else None
            why = f"step {self.step.name!r} {why}; the last error: {text_of(error)[0]}"
            raise RunStopped(why) from cause

    # counts

    def note_ended(self, **rows: int) -> None:
        """Count rows that have ended."""
        for how, count in rows.items():
            self._ended[how] += count
            self.open -= count

    def counts(self) -> StepCounts:
        """Return the counts of now."""
        return StepCounts(
            name=self.step.name,
            waiting=self.open,
            batches=self.engine.batches,
            **self._ended,
        )


def features_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays and tensors [1, ...] of the values of one row."""
    import numpy

    return {
        name: (value if is_array(value) else numpy.asarray(value))[None]
        for name, value in row.items()
    }


def _takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a function has two parameters without a default."""
    parameters = signature_of(function).parameters.values()
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([one for one in parameters if one.default is one.empty and one.kind in places]) == 2
