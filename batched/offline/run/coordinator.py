"""Coordinator: one source through all steps.

The thread of the coordinator owns the state of the run; other threads put calls of its methods into
one queue.

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
from ...errors import RemoteError, RunStopped
from ..engines import Outcome, engine_for
from ..engines.cluster import Ray
from ..engines.row_threads import RowThreads
from ..failures import error_text, letter_text
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
"""Longest time between two snapshots for `watch` (s)."""
TOGETHER: Final = 16
"""Rows that are prepared, or finished, in one task of a row thread."""
COMMIT_S: Final = 0.01
"""Time from one commit of a step to the next (s). Results of a slow function do not wait; results
of a fast function share chunks and transactions.
"""
COMMIT_ROWS: Final = 2048
"""Results of a step that are committed at once."""
GRACE: Final = 10.0
"""Time for calls that run to end when a run ends early (s), for all steps together."""


class Coordinator:
    """The owner of one run."""

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
        self._reader = Reader(source, plan, progress, kept, partial(self._post, self._take_in))
        self._stages = stages = [
            Stage(
                number,
                step,
                engine_for(step, partial(self._post, self._end, number), ray),
                self._reserve,
            )
            for number, step in enumerate(plan.steps)
        ]
        self._watch = watch
        self._limit = sum([stage.limit for stage in stages])  # rows under way
        self._asked = False  # whether a window is being read
        self._reading = True
        self._ended = False  # row threads are closed
        self.read = self.skipped = self.recomputed = self.unreadable = 0  # rows
        self.tally = Tally(max_failed)
        # notes for the first commit: the result at the destination is then out of date
        self._notes: dict[str, Any] = {"merged": None}
        self._began = self._watched = time.perf_counter()
        needed = any(each.transform.prepares or each.transform.finishes for each in stages)
        self._row_threads = RowThreads(row_threads if needed else 0, "batched-rows")

    def execute(self) -> None:
        """Run all rows through all steps.

        Raises:
            RunStopped: the budget is spent, or nothing succeeds any more.
            Exception: of the source, of a class that cannot be built, or of the progress file.
        """
        self._committer = Committer(self._progress, partial(self._post, _raise))
        with ExitStack() as ends:  # all of them run, even if Ctrl-C interrupts one
            ends.callback(self._committer.close)
            ends.callback(self._save_rest)
            ends.callback(self._close)
            ends.enter_context(interrupts(self._inbox.put, GRACE))
            self._reader.start()
            self._loop()

    def note_letters(self, letters: Sequence[Letter]) -> None:
        """Count rows that cannot be read, or that the result cannot hold."""
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
        """Return the state of now."""
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
        if not self._reading or source.rows is not None:
            return (source.rows if self._reading else self.read), False
        return source.about(), True

    def _loop(self) -> None:
        while True:
            self._check_budget()
            for stage in self._stages:
                stage.check()
            open_rows = sum([stage.open for stage in self._stages])
            if self._reading and not self._asked and open_rows < self._limit:
                self._asked = True
                self._reader.ask()
            if not self._reading and not open_rows:
                return
            with suppress(queue.Empty):
                self._inbox.get(timeout=self._dispatch())()
                while True:
                    self._inbox.get_nowait()()
            now = time.perf_counter()
            if now - self._watched >= TICK:
                self._watched = now
                self._watch(self.snapshot())

    def _post(self, method: Callable[..., object], *arguments: Any) -> None:
        """Have the coordinator's thread call `method`."""
        self._inbox.put(partial(method, *arguments))

    # into a step

    def _take_in(self, reading: Reading) -> None:
        """Let the rows of a window enter the steps that they lack."""
        self._asked = False
        if reading.error is not None:
            raise reading.error
        self._reading = not reading.last
        if 0 < reading.size < WINDOW:  # the rows are large, or the source ends
            few = sum([stage.least for stage in self._stages])
            self._limit = min(self._limit, max(2 * reading.size, few))
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
        """Reserve room for all engines, before one of them takes all of a cluster."""
        for stage in self._stages:
            stage.engine.reserve()

    def _admit(self, stage: Stage, prepared: tuple[list[Request], list[Dead]]) -> None:
        stage.admit(*prepared, time.perf_counter())

    def _dispatch(self) -> float:
        """Send all batches that may be sent now. Return the time until the next moment (s)."""
        wait = TICK
        busy = any(stage.busy for stage in self._stages)
        # no batch can be filled, and no row can be read
        stuck = not busy and not self._asked
        more = self._reading  # whether more rows may come to the next stage
        for stage in self._stages:
            now = time.perf_counter()
            stage.dispatch(now, drain=stuck or not (more or stage.expects))
            while rows := stage.take_unprepared(TOGETHER):
                prepare = stage.transform.prepare
                self._row_threads.submit(self._beside, self._admit, stage, prepare, rows)
            if dead := stage.take_dead():
                self._bury(stage, dead)
                wait = 0.0  # no row may be left
            wait = min(wait, stage.verdicts.next_moment() - now)
            if stage.done:
                left = stage.committed + COMMIT_S - now
                wait = min(wait, left)
                if left <= 0:
                    self._commit(stage)
            more = more or stage.open > 0
        return max(0.0, wait)

    # out of a step

    def _end(self, number: int, outcome: Outcome) -> None:
        """Take the outcome of a batch of a step."""
        stage = self._stages[number]
        if (fatal := outcome.fatal) is not None:
            fatal.add_note(f"in step {stage.name!r}")
            if isinstance(fatal, RemoteError):
                fatal.add_note(fatal.lines)
            raise fatal
        rows, finish = stage.end(outcome, time.perf_counter()), stage.transform.finish
        if not stage.transform.finishes or self._ended:
            self._keep(stage, finish(rows))
            return
        for first in range(0, len(rows), TOGETHER):
            some = rows[first : first + TOGETHER]
            self._row_threads.submit(self._beside, self._keep, stage, finish, some)

    def _beside(
        self, then: Callable[..., object], stage: Stage, work: Callable[[Any], Any], rows: Any
    ) -> None:
        """Do `work` on rows on another thread, and post its outcome."""
        self._post(then, stage, work(rows))

    def _keep(self, stage: Stage, finished: tuple[list[Row], list[Dead]]) -> None:
        """Let rows with results wait for the next commit. Rows that failed are dead letters."""
        rows, dead = finished
        stage.done += rows
        self._bury(stage, dead)
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
        for row in done:  # a request keeps its rows until the last one has ended
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
            # as it is read here: a later step may replace a column
            stage.verdicts.sample = rows[0].copy()
        self._bury(stage, [(good[place], "output", why) for place, why in values.misfits.items()])
        if rows and number + 1 < len(self._stages):
            columns = dict(zip(stage.columns.names, values.columns, strict=True))
            for name in self._plan.needed[number]:
                for row, value in zip(rows, columns[name], strict=True):
                    row.values[name] = value
            for row in rows:
                row.start_step()
            self._stages[number + 1].enter(rows, time.perf_counter())

    def _bury(self, stage: Stage, dead: Sequence[Dead]) -> None:
        """Commit rows that have failed for good."""
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
        commit.notes = self._notes
        self._committer.submit(commit)
        self._notes = {}  # only now: Ctrl-C may end the wait for the committer

    def _check_budget(self) -> None:
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
        """Commit the results that came before the run ended."""
        self._ended = True
        with suppress(queue.Empty):
            while True:
                event = self._inbox.get_nowait()
                with suppress(Exception, KeyboardInterrupt):  # the run has ended for another reason
                    event()
        for stage in self._stages:
            self._bury(stage, stage.take_dead())
            if stage.done:
                self._commit(stage)


def _raise(error: BaseException) -> None:
    raise error
