"""Room: one step of a run, with the rows that have entered it and have not ended.

A room belongs to the thread of the run. All other threads put calls of its methods into the queue
of that thread (`post`). Rows wait here until the step has room for them (`feed`), go to the engine,
and come back with their outcomes (`_take`). The user's code for single rows, `preprocess`,
`postprocess` and `where`, runs on row threads.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final

from ..._collate.features.outputs import tree_flatten, tree_unflatten
from ..._services.failures import error_text
from ...errors import RunStopped
from ..engines.engine import ISOLATING, TRIAL, Engine, Unprepared, WorkerClosed
from ..engines.row_threads import RowThreads
from ..report import StepCounts
from ..step import Step
from ..types.columns import Columns, Values
from ..types.values import describe_kind
from .failures import Failure, Failures, Row

AHEAD: Final = 33
"""Most batches of rows in a step."""
AHEAD_BY_LENGTH: Final = 64
"""The same where items have lengths, so that items of similar length are found."""
TOGETHER: Final = 16
"""Most rows in one task of a row thread."""
CHUNK: Final = 2048
"""Most rows that the engine gets at once."""
USELESS: Final = 256
"""Rows in a row that fail outside the function, after which the run ends."""
FILTERED: Final[Any] = object()
"""Result of a row for which the step's `where` is false."""

Dead = tuple[Row, str, BaseException | str]
"""A row that has failed for good, the phase in which it did, and its error or the reason."""
Post = Callable[[Callable[[], object]], object]
"""Function that has the thread of the run call a function."""


class Room:
    """One step, and its rows."""

    def __init__(
        self, number: int, step: Step, engine: Engine, post: Post, row_threads: RowThreads | None
    ) -> None:
        self.number = number
        self.step = step
        self.engine = engine
        self.columns = Columns(step.outputs, step.declared)
        self.failures = Failures(step.name, step.call_retry, step.outage_s)
        self._post = post
        self._prepares = row_threads if step.preprocess is not None else None
        finishes = step.postprocess is not None or step.where is not None
        self._finishes = row_threads if finishes else None
        # the column with the items; None: items are dicts of columns
        (*_, column) = step.inputs
        self._column = None if len(step.inputs) > 1 or engine.takes_features else column
        # errors of the user's code that cost one row, also where they would end a thread
        on_threads = self._prepares is not None or self._finishes is not None
        self._caught = BaseException if on_threads else Exception
        self._where: Callable[[Any, Row], bool] | None = None
        if (where := step.where) is not None:
            takes_row = _takes_two(where)
            self._where = lambda output, row: (
                where(output, {**row.values}) if takes_row else where(output)
            )
        options = step.parts.function.options
        policy, slots = options.policy, engine.slots
        varies = options.item_length is not None or engine.takes_features
        batches = max(AHEAD_BY_LENGTH if varies else AHEAD, 2 * slots + 1)
        self.limit = batches * policy.batch_size
        """Rows that may be in this step."""
        self.least = (1 + slots) * policy.batch_size
        """Rows that keep the engine busy; read even if they are large."""
        # The output of `preprocess` is often far larger than the row: an image and its path.
        few = self._prepares is not None and not varies
        self._ahead = 2 * slots + 1 if few else batches  # batches that the engine may have
        self.open = 0  # rows that have entered and have not ended
        self.waiting: deque[Row] = deque()  # rows that the engine does not have yet
        self._out = 0  # rows that the engine has, or that are being prepared
        self._preparing = 0  # rows that are being prepared
        self._trial: Row | None = None  # row that is being tried
        self.dead: list[Dead] = []  # rows that have failed for good
        self.done: list[Row] = []  # rows with results that wait for the next commit
        self.committed = -math.inf  # moment of the last commit (s)
        # rows in a row that failed outside the function, and the last error
        self._useless = 0
        self._useless_error: tuple[str, BaseException | None] = "", None
        self.ok = self.failed = self.filtered = 0
        # rows by type of value, for each output column
        self._types: dict[str, Counter[str]] = {name: Counter() for name in step.outputs}

    # rows in

    def enter(self, rows: Sequence[Row]) -> None:
        """Take rows that arrive."""
        self.open += len(rows)
        self.waiting.extend(rows)

    @property
    def busy(self) -> bool:
        """Whether a row runs, is prepared or finished, or waits for a commit."""
        idle = len(self.waiting) + self.engine.waiting + self.failures.pending
        return self.open > idle or self._trial is not None

    @property
    def runs(self) -> bool:
        """Whether a row is with the engine or a row thread, and is not known to wait."""
        ended = len(self.done) + len(self.dead) + len(self.failures.dead)
        idle = len(self.waiting) + self.failures.pending
        return self.open > idle + ended or self._trial is not None

    @property
    def moment(self) -> float:
        """Moment at which `feed` is due, without any event (s)."""
        failures = self.failures
        tries = failures.doubt and self._trial is None
        return min(failures.next_moment(), failures.trial_at if tries else math.inf)

    def feed(self, now: float, *, more: bool, stuck: bool) -> None:
        """Hand rows to the engine, or try one.

        `more`: rows may still enter. `stuck`: nothing in the run goes on unless batches leave.
        """
        failures, engine = self.failures, self.engine
        last = stuck or not more
        self.waiting.extendleft(failures.take_due(now))
        if last and not (self._out or self.waiting) and len(failures.held) == failures.pending:
            failures.doubt_held(now)
        engine.trials_only = failures.doubt
        if failures.doubt:
            engine.hold(holds=False)  # batches come back, and are not computed
            if now >= failures.trial_at and not (self._trial or self._preparing or engine.waiting):
                self._try_row(last=last)
            return
        most = self._ahead * engine.batch_size
        while self.waiting and self._out < most:
            self._send(min(most - self._out, CHUNK if self._prepares is None else TOGETHER))
        engine.hold(holds=not stuck and (more or self._preparing > 0 or bool(self.waiting)))

    def _send(self, most: int) -> None:
        """Send up to `most` rows that are alike to the engine."""
        waiting = self.waiting
        rows = [waiting.popleft()]
        while waiting and len(rows) < most and waiting[0].isolating is rows[0].isolating:
            rows.append(waiting.popleft())
        self._give(rows, ISOLATING if rows[0].isolating else None)

    def _try_row(self, *, last: bool) -> None:
        row = self._trial = self.failures.pick(self.waiting)
        if row is not None:
            self._give([row], TRIAL)
        elif last and not self._out:
            self.failures.give_up()

    def _give(self, rows: list[Row], owner: object) -> None:
        self._out += len(rows)
        if self._prepares is None:
            self._prepare(rows, owner)
        else:
            self._preparing += len(rows)
            self._prepares.submit(self._prepare_beside, rows, owner)

    def _prepare_beside(self, rows: list[Row], owner: object) -> None:
        """Prepare rows on a row thread."""
        self._prepare(rows, owner)
        self._post(partial(self._note_prepared, len(rows)))

    def _note_prepared(self, rows: int) -> None:
        self._preparing -= rows

    def _prepare(self, rows: list[Row], owner: object) -> None:
        """Make items of rows, and hand them to the engine."""
        step, column = self.step, self._column
        if step.route is None and step.preprocess is None and column is not None:
            self.engine.submit(
                [row.values[column] for row in rows], partial(self._end, rows), owner=owner
            )
            return
        groups: dict[tuple[Any, ...], tuple[list[Row], list[Any]]] = {}  # by further arguments
        for row in rows:
            try:
                args, item = self._item(row)
                some, items = groups.setdefault(args, ([], []))
            except WorkerClosed as closed:
                self._end([row], [0], [closed])
            except self._caught as error:
                self._end([row], [0], [Unprepared(error)])
            else:
                some.append(row)
                items.append(item)
        for args, (some, items) in groups.items():
            self.engine.submit(items, partial(self._end, some), args, owner)

    def _item(self, row: Row) -> tuple[tuple[Any, ...], Any]:
        """Return the further arguments for a row that differ from row to row, and its item."""
        step = self.step
        if self.engine.closed:
            raise WorkerClosed
        if self._column is not None:
            item = row.values[self._column]
        else:
            item = {name: row.values[name] for name in step.inputs}
        args = () if step.route is None else (step.route(item),)
        if step.preprocess is not None:
            item = step.preprocess(item)
        elif self.engine.takes_features:
            import numpy

            item = {name: numpy.asarray(each)[None] for name, each in item.items()}
        return args, item

    # outcomes

    def _end(self, rows: list[Row], places: list[int], outcomes: list[Any]) -> None:
        """Post the outcomes of `rows` at these places. Any thread may call this."""
        self._post(partial(self._take, [rows[place] for place in places], outcomes))

    def _take(self, rows: list[Row], outcomes: list[Any]) -> None:
        """Take the outcomes of rows."""
        now = perf_counter()
        self._out -= len(rows)
        is_trial = rows[0] is self._trial
        if is_trial:
            self._trial = None
        is_probe = rows[0] is self.failures.probe
        good: list[Row] = []
        back: list[Row] = []
        failed: list[Failure] = []
        for row, outcome in zip(rows, outcomes, strict=True):
            row.attempts += 1
            if not isinstance(outcome, BaseException):
                row.result = outcome
                good.append(row)
            elif isinstance(outcome, WorkerClosed):  # it was not computed
                row.attempts -= 1
                back.append(row)
            elif isinstance(outcome, Unprepared) and not is_probe:
                self.dead.append((row, "preprocess", outcome.error))
            else:
                failed.append((row, outcome))
        if is_trial:
            for row in good:
                self.failures.end_trial(row, None, now)
            for row, error in failed:
                self.failures.end_trial(row, error, now)
        elif good or failed:
            moment = self.engine.succeeded if good else now
            self.failures.note(failed, worked=bool(good), now=moment)
        if not is_probe:
            self.waiting.extendleft(reversed(back))
            self._finish(good)

    def _finish(self, rows: list[Row]) -> None:
        """Make outputs results."""
        if not rows:
            return
        if self._finishes is None or self.engine.closed:
            self._take_finished(*self._finished(rows))
            return
        for first in range(0, len(rows), TOGETHER):
            self._finishes.submit(self._finish_beside, rows[first : first + TOGETHER])

    def _finish_beside(self, rows: list[Row]) -> None:
        """Finish rows on a row thread."""
        self._post(partial(self._take_finished, *self._finished(rows)))

    def _finished(self, rows: list[Row]) -> tuple[list[Row], list[Dead]]:
        """Make the outputs of rows their results. Return these rows, and the rows that failed."""
        step, takes_features = self.step, self.engine.takes_features
        if step.postprocess is None and step.where is None and not takes_features:
            return rows, []
        good: list[Row] = []
        dead: list[Dead] = []
        for row in rows:
            try:
                output = row.result
                if takes_features:
                    arrays = [array[0] for _, array in tree_flatten(output)]
                    output = tree_unflatten(output, iter(arrays))
                if step.postprocess is not None:
                    output = step.postprocess(output)
                keep = self._where is None or self._where(output, row)
                row.result = output if keep else FILTERED
                good.append(row)
            except self._caught as error:
                dead.append((row, "postprocess", error))
        return good, dead

    def _take_finished(self, good: list[Row], dead: list[Dead]) -> None:
        self.done += good
        self.dead += dead

    def take_dead(self) -> list[Dead]:
        """Remove and return the rows that have failed for good."""
        failures = self.failures
        dead: list[Dead] = [(row, "inference", error) for row, error in failures.dead]
        dead += self.dead
        failures.dead, self.dead = [], []
        return dead

    def check(self) -> None:
        """Raise RunStopped if the step counts as broken."""
        if self.failures.stopped is not None:
            why, error = self.failures.stopped
            text = error_text(error).error
            raise RunStopped(f"step {self.step.name!r} {why}; the last error: {text}") from error
        if self._useless >= USELESS:
            text, cause = self._useless_error
            raise RunStopped(
                f"step {self.step.name!r}: none of the last rows has a result, the last one failed "
                f"with {text}"
            ) from cause

    # counts

    def note_useless(self, text: str, error: BaseException | None) -> None:
        """Count a row that failed outside the function."""
        self._useless += 1
        self._useless_error = text, error

    def note_ended(self, *, ok: int = 0, filtered: int = 0, failed: int = 0) -> None:
        """Count rows that have ended."""
        self.ok += ok
        self.filtered += filtered
        self.failed += failed
        self.open -= ok + filtered + failed
        if ok or filtered:
            self._useless = 0

    def note_kinds(self, values: Values) -> None:
        """Count the types of results."""
        for counts, kinds in zip(self._types.values(), values.kinds, strict=True):
            for kind, rows in kinds.items():
                if kind != "null":
                    counts[describe_kind(kind)] += rows

    def counts(self) -> StepCounts:
        """Return the counts of now."""
        return StepCounts(
            name=self.step.name,
            ok=self.ok,
            failed=self.failed,
            waiting=self.open,
            batches=self.engine.batches,
            seconds=self.engine.seconds,
            filtered=self.filtered,
            types={name: dict(counts) for name, counts in self._types.items()},
        )


def _takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a function has two parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a builtin
        return False
    return len([one for one in parameters if one.default is one.empty]) == 2
