"""Run: one source through all steps.

The thread that runs `Run.execute` owns the state of the run, so there is no lock. All other threads
put functions into one queue (`_inbox`), which that thread calls.

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

from ..._services.failures import error_text
from ...errors import RunStopped
from ..engines import engine_for
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
from .room import FILTERED, Dead, Room
from .tally import Tally

TICK: Final = 0.25
"""Time between two snapshots for `watch`, and the longest wait for an event (s)."""
EVENTS: Final = 64
"""Most events that are handled before rows are handed to the engines again."""
COMMIT_S: Final = 0.01
"""Time between two commits of a step (s). Results of a slow function hardly wait; results of a fast
function share chunks and transactions.
"""
COMMIT_ROWS: Final = 2048
"""Results of a step that are committed without a wait for `COMMIT_S`."""
GRACE: Final = 10.0
"""Time that all steps have, at the end of a run, to end their running calls (s)."""


class Run:
    """Owner of the state of one run: reader, rooms, committer and counts."""

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
        needed = any(each.preprocess or each.postprocess or each.where for each in plan.steps)
        self._row_threads = RowThreads(row_threads if needed else 0, "batched-rows")
        self._rooms = [
            Room(
                number,
                step,
                engine_for(step, partial(self._post, self._take_fatal, step.name), ray),
                self._inbox.put,
                self._row_threads,
            )
            for number, step in enumerate(plan.steps)
        ]
        self._begun = False  # whether any engine has got rows
        self._watch = watch
        # rows that may be open: read, and not ended
        self._max_open = sum([room.limit for room in self._rooms])
        self._awaits_window = False  # whether the reader reads a window
        self._more_to_read = True  # whether the source has rows that were not read
        self.read = self.skipped = self.recomputed = self.unreadable = 0  # rows, as in `Snapshot`
        self.tally = Tally(max_failed)
        # clients with a budget, which is that of the run, by the steps that call them
        self._clients: dict[str, Any] = {
            step.name: step.fn for step in plan.steps if hasattr(step.fn, "spent")
        }
        spent = progress.get("spent") or {}
        for name, client in self._clients.items():
            client.spent = max(client.spent, spent.get(name, 0.0))
        # notes of the first commit: from then on, the result at the destination is out of date
        self._notes: dict[str, Any] = {"merged": None}
        self._began = self._watched = time.perf_counter()

    def execute(self) -> None:
        """Run all rows through all steps.

        Raises:
            RunStopped: the budget of failed rows is spent, or a step does not work.
            Exception: the source or the progress file fails, or the class of a step cannot be
                built.
        """
        self._committer = Committer(self._progress, partial(self._post, _raise))
        with ExitStack() as ends:  # each callback runs, even if Ctrl-C interrupts another
            if self._clients:  # requests without a result cost money, too
                ends.callback(lambda: self._progress.put_all(self._spent()))
            ends.callback(self._committer.close)
            ends.callback(self._save_rest)
            for room in self._rooms:
                ends.callback(room.engine.close)
            ends.callback(self._finish_running)
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
        last = self._rooms[-1]
        filtered = sum([room.filtered for room in self._rooms])
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
            steps=tuple([room.counts() for room in self._rooms]),
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
            for room in self._rooms:
                room.check()
            open_rows = sum([room.open for room in self._rooms])
            if self._more_to_read and not self._awaits_window and open_rows < self._max_open:
                self._awaits_window = True
                self._reader.ask()
            if not self._more_to_read and not open_rows:
                return
            event = self._next_event(self._dispatch())
            left = EVENTS
            while event is not None:
                event()
                left -= 1
                event = self._next_event(0.0) if left else None
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
        """Have the thread of the run call `method`."""
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
            least = sum([room.least for room in self._rooms])
            self._max_open = min(self._max_open, max(2 * reading.size, least))
        self.read += reading.size
        self.skipped += reading.skipped
        self.recomputed += reading.recomputed
        if reading.letters:
            self._committer.submit(Commit(0, letters=reading.letters))
            self.note_letters(reading.letters)
        for row, number in reading.samples:
            self._rooms[number].failures.probe = row
        for number, rows in enumerate(reading.rows):
            if rows:
                self._rooms[number].enter(rows)

    def _dispatch(self) -> float:
        """Send the batches and commits that are due. Return the time to the next (s)."""
        wait = TICK
        # nothing runs and nothing is read: no batch will get more rows, so all must leave
        stuck = not (self._awaits_window or any(room.busy for room in self._rooms))
        more = self._more_to_read  # whether more rows may come to the next room
        for room in self._rooms:
            now = time.perf_counter()
            if room.open:
                if room.waiting and not self._begun:  # late: nothing may have to be computed
                    self._begun = True
                    for each in self._rooms:  # before one takes all of a cluster
                        each.engine.workers[0].reserve()
                room.feed(now, more=more, stuck=stuck)
                wait = min(wait, room.moment - now)
            if dead := room.take_dead():
                self._commit_dead(room, dead)
                wait = 0.0  # these rows have ended: the loop checks whether the run has
            if len(room.done) >= COMMIT_ROWS:
                self._commit(room)
            elif room.done:
                left = room.committed + COMMIT_S - now
                wait = min(wait, left)
                if left <= 0:
                    self._commit(room)
            more = more or room.open > 0
        return max(0.0, wait)

    # out of a step

    def _take_fatal(self, name: str, error: BaseException) -> None:
        """Raise the error of a worker that cannot be built."""
        error.add_note(f"in step {name!r}")
        raise error

    def _commit(self, room: Room) -> None:
        """Commit the results of a step, and let their rows enter the next step."""
        number, done, room.done = room.number, room.done, []
        room.committed = time.perf_counter()
        filtered = [row for row in done if row.result is FILTERED]
        good = [row for row in done if row.result is not FILTERED] if filtered else done
        values = room.columns.read([row.result for row in good])
        rows = [good[place] for place in values.places]
        for row in done:
            row.result = None
        self._submit(
            Commit(
                number,
                [(row.key, row.inputs[number]) for row in rows],
                values,
                filtered=[(row.key, row.inputs[number]) for row in filtered],
            )
        )
        room.note_ended(ok=len(rows), filtered=len(filtered))
        room.note_kinds(values)
        if rows and room.failures.probe is None:
            # a copy, because a later step may replace a value of the row
            room.failures.probe = rows[0].copy()
        self._commit_dead(
            room, [(good[place], "output", why) for place, why in values.misfits.items()]
        )
        if rows and number + 1 < len(self._rooms):
            columns = dict(zip(room.columns.names, values.columns, strict=True))
            for name in self._plan.needed[number]:
                for row, value in zip(rows, columns[name], strict=True):
                    row.values[name] = value
            for row in rows:
                row.start_step()
            self._rooms[number + 1].enter(rows)

    def _commit_dead(self, room: Room, dead: Sequence[Dead]) -> None:
        """Commit rows that have failed for good, as dead letters."""
        if not dead:
            return
        failed = []
        for row, phase, error in dead:
            cause = error if isinstance(error, BaseException) else None
            text, lines = error_text(error) if isinstance(error, BaseException) else (error, "")
            letter = letter_text(phase, text, lines, row.attempts)
            failed.append((row.key, row.inputs[room.number], letter))
            self.tally.note(
                DeadLetter(
                    key=row.key,
                    step=room.step.name,
                    phase=phase,
                    error=text,
                    attempts=row.attempts,
                    traceback=lines,
                ),
                cause,
            )
            if phase != "inference":
                room.note_useless(text, cause)
        self._submit(Commit(room.number, failed=failed))
        room.note_ended(failed=len(failed))

    def _submit(self, commit: Commit) -> None:
        """Queue a commit, the first one with the notes."""
        commit.notes = {**self._notes, **self._spent()}
        self._committer.submit(commit)
        self._notes = {}  # last: if Ctrl-C interrupts `submit`, the next commit has the notes

    def _spent(self) -> dict[str, Any]:
        """Return a note of the money that clients have spent."""
        return {"spent": {name: client.spent for name, client in self._clients.items()}}

    def _check_budget(self) -> None:
        """Raise RunStopped if more rows have failed than `max_failed` allows."""
        total, is_estimate = self._total()
        self.tally.check(self.read, None if is_estimate else total)

    # the end

    def _finish_running(self) -> None:
        """Begin no batch, and take the outcomes of those that run, for `GRACE` seconds at most."""
        deadline = time.perf_counter() + GRACE
        for room in self._rooms:
            room.engine.stop()
        try:
            while any(room.runs for room in self._rooms) and (
                event := self._next_event(max(0.0, deadline - time.perf_counter()))
            ):
                self._call(event)
        except KeyboardInterrupt:  # the second one
            deadline = 0.0
            raise
        finally:
            self._reader.close(deadline)
            self._row_threads.close(deadline)

    def _save_rest(self) -> None:
        """Commit the results that exist at the end of the run."""
        while event := self._next_event(0.0):
            self._call(event)
        for room in self._rooms:
            if dead := room.take_dead():
                self._commit_dead(room, dead)
            if room.done:
                self._commit(room)

    def _call(self, event: Callable[[], object]) -> None:
        with suppress(Exception, KeyboardInterrupt):  # the run has ended for another reason
            event()


def _raise(error: BaseException) -> None:
    raise error
