"""Coordinator: one source through all steps.

The thread that runs `Coordinator.execute` owns the state of the run, so there is no lock. All other
threads put calls of the coordinator's methods into one queue (`_post`).

A row enters a step and leaves it with a result, with an error, or to be called again. The result is
queued for the committer before the row enters the next step, and the committer keeps that order. So
no step is committed for a row before the step on which it depends.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final

import orjson

from ..._core.request import Request
from ..._services.failures import error_text
from ...errors import RunStopped
from ..engines import Outcome, engine_for
from ..engines.cluster import Ray
from ..engines.row_threads import RowThreads
from ..failures import letter_text
from ..progress.commit import Commit, Letter
from ..progress.committer import Committer
from ..progress.store import Progress
from ..report import DeadLetter, Snapshot
from ..sources.base import Source
from .interrupts import interrupts
from .plan import Plan
from .reader import WINDOW, Kept, Reader, Reading
from .stage import Stage
from .tally import Tally
from .transform import FILTERED, Dead
from .verdicts import Row

TICK: Final = 0.25
"""Time between two snapshots for `watch`, and the longest wait for an event (s)."""
TOGETHER: Final = 16
"""Most rows in one task of a row thread, before the function (`prepare`) or after it (`finish`)."""
COMMIT_S: Final = 0.01
"""Time between two commits of a step (s). Results of a slow function hardly wait; results of a fast
function share chunks and transactions.
"""
COMMIT_ROWS: Final = 2048
"""Results of a step that are committed without a wait for `COMMIT_S`."""
GRACE: Final = 10.0
"""Time that all steps have, at the end of a run, to end their running calls (s)."""


class Coordinator:
    """Owner of the state of one run: reader, stages, committer and counts."""

    def __init__(
        self,
        plan: Plan,
        source: Source,
        progress: Progress,
        kept: Kept,
        ray: Ray | None,
        max_failed: float | None,
        row_threads: int,
        watch: Callable[[Snapshot], None],
    ) -> None:
        self._plan = plan
        self._source = source
        self._progress = progress
        self._inbox = queue.SimpleQueue[Callable[[], object]]()
        self._reader = Reader(source, plan, progress, kept, partial(self._post, self._take_reading))
        self._stages = stages = [
            Stage(
                number,
                step,
                engine_for(step, partial(self._post, self._take_outcome, number), ray),
                self._reserve,
            )
            for number, step in enumerate(plan.steps)
        ]
        self._watch = watch
        self._max_open = sum(
            [stage.limit for stage in stages]
        )  # rows that may be open: read, and not ended
        self._awaits_window = False  # whether the reader reads a window
        self._more_to_read = True  # whether the source has rows that were not read
        self._ended = False  # whether the row threads are closed
        self.read = self.skipped = self.recomputed = self.unreadable = 0  # rows, as in `Snapshot`
        self.tally = Tally(max_failed)
        # notes of the first commit: from then on, the result at the destination is out of date
        self._notes: dict[str, Any] = {"merged": None}
        self._began = self._watched = time.perf_counter()
        needed = any(each.transform.prepares or each.transform.finishes for each in stages)
        self._row_threads = RowThreads(row_threads if needed else 0, "batched-rows")

    def execute(self) -> None:
        """Run all rows through all steps.

        Raises:
            RunStopped: the budget of failed rows is spent, or a step does not work.
            Exception: the source or the progress file fails, or the class of a step cannot be
                built.
        """
        self._committer = Committer(self._progress, partial(self._post, _raise))
        with ExitStack() as ends:  # each callback runs, even if Ctrl-C interrupts another
            ends.callback(self._committer.close)
            ends.callback(self._save_rest)
            ends.callback(self._close)
            ends.enter_context(interrupts(self._inbox.put, GRACE))
            self._reader.start()
            self._loop()

    def note_letters(self, letters: Sequence[Letter]) -> None:
        """Count dead letters: rows that cannot be read, or that the result cannot hold."""
        self.unreadable += len(letters)
        for letter in letters:
            dead: Any = {"key": letter.key, "step": "", "attempts": 0, **orjson.loads(letter.error)}
            self.tally.note(dead)
        self._check_budget()

    def check_results(self) -> None:
        """Stop the run if all computed rows have failed, and no other row has a result."""
        last = self._stages[-1]
        filtered = sum([stage.filtered for stage in self._stages])
        if self.tally.failed and not (self.skipped or last.ok or filtered):
            why = f"none of the {self.read:,} rows has a result: {self.tally}"
            raise RunStopped(why) from self.tally.last_error

    def snapshot(self) -> Snapshot:
        """Return the counts of this moment."""
        total, is_estimate = self._total()
        return Snapshot(
            total=total,
            total_is_estimate=is_estimate,
            read=self.read,
            skipped=self.skipped,
            recomputed=self.recomputed,
            unreadable=self.unreadable,
            seconds=time.perf_counter() - self._began,
            steps=tuple([stage.counts() for stage in self._stages]),
            errors=dict(self.tally.errors),
            examples=dict(self.tally.examples),
        )

    def _total(self) -> tuple[int | None, bool]:
        """Return the number of rows of the source, if known, and whether it is an estimate."""
        source = self._source
        if not self._more_to_read or source.rows is not None:
            return (source.rows if self._more_to_read else self.read), False
        return source.estimate_rows(), True

    def _loop(self) -> None:
        while True:
            self._check_budget()
            for stage in self._stages:
                stage.check()
            open_rows = sum([stage.open for stage in self._stages])
            if self._more_to_read and not self._awaits_window and open_rows < self._max_open:
                self._awaits_window = True
                self._reader.ask()
            if not self._more_to_read and not open_rows:
                return
            event = self._next_event(self._dispatch())
            while event is not None:
                event()
                event = self._next_event(0.0)
            now = time.perf_counter()
            if now - self._watched >= TICK:
                self._watched = now
                self._watch(self.snapshot())

    def _next_event(self, timeout: float) -> Callable[[], object] | None:
        try:
            return self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None

    def _post(self, method: Callable[..., object], *arguments: Any) -> None:
        """Have the coordinator's thread call `method`."""
        self._inbox.put(partial(method, *arguments))

    # into a step

    def _take_reading(self, reading: Reading) -> None:
        """Let the rows of a window enter the steps that they lack."""
        self._awaits_window = False
        if reading.error is not None:
            raise reading.error
        self._more_to_read = not reading.last
        if 0 < reading.size < WINDOW:  # the rows are large, or the source ends
            # fewer rows in memory, but enough to keep all engines busy
            least = sum([stage.least for stage in self._stages])
            self._max_open = min(self._max_open, max(2 * reading.size, least))
        self.read += reading.size
        self.skipped += reading.skipped
        self.recomputed += reading.recomputed
        if reading.letters:
            self._committer.submit(Commit(0, letters=reading.letters))
            self.note_letters(reading.letters)
        for row, number in reading.samples:
            self._stages[number].verdicts.sample = row
        for number, rows in enumerate(reading.rows):
            if rows:
                self._stages[number].enter(rows, time.perf_counter())

    def _reserve(self) -> None:
        """Reserve room for the engines of all steps before the first of them starts."""
        for stage in self._stages:
            stage.engine.reserve()

    def _admit(self, stage: Stage, prepared: tuple[list[Request], list[Dead]]) -> None:
        """Let prepared rows wait for their batches."""
        stage.admit(*prepared, time.perf_counter())

    def _dispatch(self) -> float:
        """Send the batches, row tasks and commits that are due. Return the time to the next (s)."""
        wait = TICK
        busy = any(stage.busy for stage in self._stages)
        # nothing runs and nothing is read: no batch will get more rows, so all must leave
        stuck = not busy and not self._awaits_window
        more = self._more_to_read  # whether more rows may come to the next stage
        for stage in self._stages:
            now = time.perf_counter()
            stage.dispatch(now, drain=stuck or not (more or stage.expects))
            while rows := stage.take_unprepared(TOGETHER):
                prepare = stage.transform.prepare
                self._row_threads.submit(self._post_result, self._admit, stage, prepare, rows)
            if dead := stage.take_dead():
                self._commit_dead(stage, dead)
                wait = 0.0  # these rows have ended: the loop checks whether the run has
            wait = min(wait, stage.verdicts.next_moment() - now)
            if stage.done:
                left = stage.committed + COMMIT_S - now
                wait = min(wait, left)
                if left <= 0:
                    self._commit(stage)
            more = more or stage.open > 0
        return max(0.0, wait)

    # out of a step

    def _take_outcome(self, number: int, outcome: Outcome) -> None:
        """Take the outcome of a batch of step `number`: finish the rows that succeeded.

        Raises:
            BaseException: the engine of the step cannot go on.
        """
        stage = self._stages[number]
        if (fatal := outcome.fatal) is not None:
            fatal.add_note(f"in step {stage.name!r}")
            raise fatal
        rows, finish = stage.end(outcome, time.perf_counter()), stage.transform.finish
        if not stage.transform.finishes or self._ended:
            self._take_finished(stage, finish(rows))
            return
        for first in range(0, len(rows), TOGETHER):
            some = rows[first : first + TOGETHER]
            self._row_threads.submit(self._post_result, self._take_finished, stage, finish, some)

    def _post_result(
        self, then: Callable[..., object], stage: Stage, work: Callable[[Any], Any], rows: Any
    ) -> None:
        """Do `work` on `rows`, on a row thread, and post its result to `then`."""
        self._post(then, stage, work(rows))

    def _take_finished(self, stage: Stage, finished: tuple[list[Row], list[Dead]]) -> None:
        """Let rows with results wait for the next commit. Commit the rows that failed."""
        rows, dead = finished
        stage.done += rows
        self._commit_dead(stage, dead)
        if len(stage.done) >= COMMIT_ROWS:
            self._commit(stage)

    def _commit(self, stage: Stage) -> None:
        """Commit the results of a step, and let their rows enter the next step."""
        number, done, stage.done = stage.number, stage.done, []
        stage.committed = time.perf_counter()
        filtered = [row for row in done if row.result is FILTERED]
        good = [row for row in done if row.result is not FILTERED] if filtered else done
        values = stage.columns.read([row.result for row in good])
        rows = [good[place] for place in values.places]
        for row in done:  # a request keeps its rows until the last of them has ended
            row.result = None
        self._submit(
            Commit(
                number,
                [(row.key, row.inputs[number], row.attempts) for row in rows],
                values,
                filtered=[(row.key, row.inputs[number], row.attempts) for row in filtered],
            )
        )
        stage.note_ended(ok=len(rows), filtered=len(filtered))
        stage.note_kinds(values)
        if rows and stage.verdicts.sample is None:
            # a copy, because a later step may replace a value of the row
            stage.verdicts.sample = rows[0].copy()
        self._commit_dead(
            stage, [(good[place], "output", why) for place, why in values.misfits.items()]
        )
        if rows and number + 1 < len(self._stages):
            columns = dict(zip(stage.columns.names, values.columns, strict=True))
            for name in self._plan.needed[number]:
                for row, value in zip(rows, columns[name], strict=True):
                    row.values[name] = value
            for row in rows:
                row.start_step()
            self._stages[number + 1].enter(rows, time.perf_counter())

    def _commit_dead(self, stage: Stage, dead: Sequence[Dead]) -> None:
        """Commit rows that have failed for good, as dead letters."""
        if not dead:
            return
        failed = []
        for row, phase, error in dead:
            cause = error if isinstance(error, BaseException) else None
            text, lines = error_text(error) if isinstance(error, BaseException) else (error, "")
            letter = letter_text(phase, text, lines)
            failed.append((row.key, row.inputs[stage.number], row.attempts, letter))
            self.tally.note(
                DeadLetter(
                    key=row.key,
                    step=stage.name,
                    phase=phase,
                    error=text,
                    attempts=row.attempts,
                    traceback=lines,
                ),
                cause,
            )
            if phase != "inference":
                stage.note_useless(text, cause)
        self._submit(Commit(stage.number, failed=failed))
        stage.note_ended(failed=len(failed))

    def _submit(self, commit: Commit) -> None:
        """Queue a commit, the first one with the notes."""
        commit.notes = self._notes
        self._committer.submit(commit)
        self._notes = {}  # last: if Ctrl-C interrupts `submit`, the next commit has the notes

    def _check_budget(self) -> None:
        """Raise RunStopped if more rows have failed than `max_failed` allows."""
        total, is_estimate = self._total()
        self.tally.check(self.read, None if is_estimate else total)

    # the end

    def _close(self) -> None:
        """End all threads, processes and actors, by one deadline."""
        deadline = time.perf_counter() + GRACE
        with ExitStack() as ends:
            ends.callback(self._reader.close)
            ends.callback(self._row_threads.close, deadline)
            for stage in self._stages:
                ends.callback(stage.engine.close, deadline)
            for stage in self._stages:
                stage.engine.stop()

    def _save_rest(self) -> None:
        """Commit the results that exist at the end of the run."""
        self._ended = True
        with suppress(queue.Empty):
            while True:
                event = self._inbox.get_nowait()
                with suppress(Exception, KeyboardInterrupt):  # the run has ended for another reason
                    event()
        for stage in self._stages:
            self._commit_dead(stage, stage.take_dead())
            if stage.done:
                self._commit(stage)


def _raise(error: BaseException) -> None:
    raise error
