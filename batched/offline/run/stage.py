"""Stage: one step of a run. Rows wait in a scheduler, as online calls do, and leave in batches.

A stage owns its counts, its queues and its engine; the coordinator only calls its methods.

1. A batch is formed when the engine has room: for each slot one batch runs and one waits. The
   batch must be full, unless no more rows will come.
2. An engine with a model for each key gets all full batches at once, since it takes the batches of
   the models that it has first.
3. `verdicts.py` judges the rows that fail.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any, Final

from ..._core.scheduler import Batch, Request, Scheduler
from ..._runtime.observer import make_observer
from ..._services.failures import error_text
from ...errors import RunStopped
from ..engines.engine import Engine, Outcome
from ..failures import has_error
from ..report import StepCounts
from ..step import Auto, Step
from ..types.columns import Columns, Values
from ..types.values import describe_kind
from .sizes import AutoSize
from .transform import Dead, Transform, take_row
from .verdicts import Failure, Row, Verdicts

AHEAD: Final = 33
"""Batches of each step that may be read and not yet done; enough to group similar lengths."""
USELESS_BATCHES: Final = 8
USELESS_ROWS: Final = 256
"""Consecutive rows that fail outside the function, after which the run ends; or the rows of
`USELESS_BATCHES` batches, if that is more.
"""
SPREAD: Final = (math.sqrt(5) - 1) / 2
"""Step between trials as a share of the waiting rows: multiples of it spread most evenly."""


_is_isolating = attrgetter("isolating")


class Stage:
    """One step of a run, owned by the thread of the coordinator."""

    def __init__(
        self,
        number: int,
        step: Step,
        engine: Engine,
        reserve: Callable[[], object] = lambda: None,
    ) -> None:
        """Make a stage; `reserve` makes room for the engines of all steps before one has it all."""
        self.number = number
        self.step = step
        self.name = step.name
        self.engine = engine
        self.columns = Columns(step.outputs, step.declared)
        self.verdicts = Verdicts(step.call_retry, step.outage_s)
        self.transform = Transform(step)
        options = step.parts.function.options
        policy = options.policy
        slots = engine.slots
        # most rows that are read and not yet done
        self.limit = max(AHEAD, 2 * slots + 1) * policy.batch_size
        self._room = 2 * slots  # batches in the engine
        self._scheduler = Scheduler(
            replace(
                policy,
                flush="window",  # hold a batch until it is full
                timeout_ms=1e15,
                max_concurrent_batches=self.limit if step.models else self._room,
                max_queue_size=None,
                queue_timeout_ms=None,
            )
        )
        # rows that keep the engine busy; read even if they are large
        self.least = (1 + slots) * policy.batch_size
        # Batches of items that may be prepared and not yet run. The output of `preprocess` is often
        # far larger than the row: an image and its path. Items with a length are all prepared.
        varies = options.length is not None or self.transform.takes_features
        self._prepared = self.limit // policy.batch_size if varies else 2 * slots + 1
        self._most_useless = max(USELESS_BATCHES * policy.batch_size, USELESS_ROWS)
        self._auto = AutoSize(step.batch_size) if isinstance(step.batch_size, Auto) else None
        if self._auto:
            self._scheduler.resize(self._auto.size)
        self._observer = (
            None if options.on_batch is None else make_observer(step.name, options.on_batch)
        )
        self._reserve = reserve
        self._began = False  # whether the engine was started: late, because it may build a model
        self._unprepared: deque[Row] = deque()  # rows that wait to be prepared
        self._preparing = 0  # rows that are being prepared
        self._trial: Batch | None = None  # batch of the row that is being tried
        self._spread = 0  # trials of waiting rows so far
        self.open = 0  # rows that have arrived and have not ended
        self._dead: list[Dead] = []  # rows that could not be prepared
        self.done: list[Row] = []  # rows with results that wait for the next commit
        self.committed = -math.inf  # moment of the last commit (s)
        # rows that failed outside the function since the last one with a result, and the last error
        self._useless = 0
        self._useless_error: tuple[str, BaseException | None] = "", None
        self.ok = self.failed = self.filtered = self.batches = 0
        self.seconds = 0.0  # time of the function (s)
        # rows by type of value, for each output column
        self._types: dict[str, Counter[str]] = {name: Counter() for name in step.outputs}

    # rows that arrive

    def enter(self, rows: Sequence[Row], now: float) -> None:
        """Take rows that arrive."""
        self.open += len(rows)
        self._queue(rows, now)

    def _queue(self, rows: Sequence[Row], now: float) -> None:
        """Take rows that are to be called."""
        if self.transform.prepares:
            self._unprepared.extend(rows)
        else:
            self.admit(*self.transform.prepare(rows), now)

    def take_unprepared(self, together: int) -> list[Row]:
        """Return up to `together` rows that another thread is to prepare now."""
        ready = self._scheduler.waiting + self._preparing
        if ready >= self._prepared * self._scheduler.capacity.batch_size:
            return []
        rows = [self._unprepared.popleft() for _ in range(min(together, len(self._unprepared)))]
        self._preparing += len(rows)
        return rows

    def admit(self, requests: Sequence[Request], dead: Sequence[Dead], now: float) -> None:
        """Let prepared rows wait for their batches; `dead` are rows that failed."""
        if self.transform.prepares:
            self._preparing -= sum([request.size for request in requests]) + len(dead)
        self._dead += dead
        for request in requests:
            self._scheduler.submit(request, now)

    # batches

    @property
    def expects(self) -> bool:
        """Whether rows are on their way to the queue."""
        return bool(self._preparing or self._unprepared)

    @property
    def busy(self) -> bool:
        """Whether a row is in the engine, is prepared or finished, or waits for a commit."""
        idle = self._scheduler.waiting + len(self._unprepared) + self.verdicts.pending
        return self.open > idle or self._trial is not None

    def dispatch(self, now: float, *, drain: bool) -> None:
        """Send batches, or a trial. `drain`: no more rows will come."""
        verdicts, scheduler = self.verdicts, self._scheduler
        if rows := verdicts.take_due(now):
            self._queue(rows, now)
        if drain and 0 < self.open == len(verdicts.aside):  # no row is left that could succeed
            verdicts.doubt(now)
        if verdicts.in_doubt:
            if self._trial is None and now >= verdicts.next_moment():
                self._try_row(now, drain=drain)
            return
        scheduler.draining = drain
        while scheduler.waiting and not (drain and len(scheduler.running) >= self._room):
            batch = scheduler.take(now)
            if batch is None:
                break
            self._submit(batch)

    def _submit(self, batch: Batch, *, isolating: bool = False) -> None:
        if not self._began:
            self._began = True
            self._reserve()
            self.engine.start()
        rows = chain.from_iterable([each.waker[start:stop] for each, start, stop in batch.slices])
        isolating = isolating or any(map(_is_isolating, rows))
        self.engine.submit(batch, isolating=isolating)

    def _try_row(self, now: float, *, drain: bool) -> None:
        """Run the sample, or another row, alone."""
        verdicts = self.verdicts
        row = verdicts.sample or self._pick(now)
        if row is None:
            if drain:
                verdicts.give_up()
            return
        verdicts.start_trial(row, now)
        requests, dead = self.transform.prepare([row])
        for _, _, error in dead:
            assert isinstance(error, BaseException)
            verdicts.end_trial(row, error, now)
        for request in requests:
            self._trial = Batch([(request, 0, 1)], 1, "drain", now, request.longest)
            self._submit(self._trial, isolating=True)

    def _pick(self, now: float) -> Row | None:
        """Return a row to try: by turns one that waits and one that has failed."""
        scheduler, failed = self._scheduler, self.verdicts.candidates()
        self._spread += 1
        if not scheduler.waiting or (failed and self._spread % 2):
            return failed[0] if failed else None
        # rows far from each other tell most
        place = int(self._spread * SPREAD % 1 * scheduler.waiting)
        requests = iter(scheduler)
        request = next(requests)
        while place >= (waiting := request.size - request.dispatched):
            place -= waiting
            request = next(requests)
        scheduler.cancel(request)
        row, rest = take_row(request, place)
        if rest is not None:
            scheduler.submit(rest, now)
        return row

    # outcomes

    def end(self, outcome: Outcome, now: float) -> list[Row]:
        """Take the outcome of a batch. Return the rows that succeeded; their results are set."""
        batch = outcome.batch
        assert batch is not None
        self.batches += 1
        self.seconds += outcome.seconds
        batch.started = now - outcome.seconds
        good: list[Row] = []
        bad: list[Row] = []
        for (request, start, stop), part, tried in zip(
            outcome.slices, outcome.results, outcome.tried, strict=True
        ):
            rows: list[Row] = request.waker[start:stop]
            results: Sequence[Any] = [part] * len(rows)
            if request.listed and not isinstance(part, BaseException):
                results = part
            for row, result in zip(rows, results, strict=True):
                row.attempts += tried
                row.result = result
            if has_error(results):
                bad += [row for row in rows if isinstance(row.result, BaseException)]
                rows = [row for row in rows if not isinstance(row.result, BaseException)]
            good += rows
        # rows that failed in one call have one error
        rows_with = Counter([id(row.result) for row in bad])
        isolates = self.step.isolate_errors
        failures = []
        for row in bad:
            error, row.result = row.result, None
            alone = rows_with[id(error)] == 1 or row.isolating or not isolates
            failures.append(Failure(row, error, alone, now))
        verdicts = self.verdicts
        if batch is self._trial:
            self._trial = None
            (row,) = batch.slices[0][0].waker
            error = failures[0].error if failures else None
            verdicts.end_trial(row, error, now)
            return [] if row is verdicts.sample else good  # the sample is committed
        self._scheduler.finished(batch, now)
        if self._auto and batch.fitted and batch.attempts == 1:
            size = self._auto.next(batch.size, outcome.seconds)
            self._scheduler.resize(size)
        if self._observer is not None:
            self._observer(batch, (outcome.slices, outcome.results, outcome.tried))
        verdicts.note_batch(failures, succeeded=bool(good), started=batch.started, now=now)
        return good

    def take_dead(self) -> list[Dead]:
        """Return the rows that have failed for good since the last call."""
        dead, self._dead = self._dead, []
        return dead + [(each.row, "inference", each.error) for each in self.verdicts.take_dead()]

    def check(self) -> None:
        """Raise RunStopped if the step counts as broken."""
        if self.verdicts.stopped is not None:
            why, error = self.verdicts.stopped
            text = error_text(error).error
            raise RunStopped(f"step {self.name!r} {why}; the last error: {text}") from error
        if self._useless >= self._most_useless:
            text, cause = self._useless_error
            raise RunStopped(
                f"step {self.name!r}: none of the last rows has a result, the last one failed "
                f"with {text}"
            ) from cause

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
            name=self.name,
            ok=self.ok,
            failed=self.failed,
            waiting=self.open,
            batches=self.batches,
            seconds=self.seconds,
            filtered=self.filtered,
            types={name: dict(counts) for name, counts in self._types.items()},
        )
