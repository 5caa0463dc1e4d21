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
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final

from ...errors import RunStopped
from ..engines import engine_for
from ..engines.cluster import Ray
from ..engines.row_threads import RowThreads
from ..progress.commit import Commit, Key, Letter, letter_text
from ..progress.committer import Committer
from ..progress.store import Progress
from ..report import Snapshot
from ..sources.base import WINDOW_ROWS, Source, Window
from .failures import text_of
from .interrupts import interrupts
from .plan import Plan
from .reader import Reader, Reading
from .room import FILTERED, Room
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
STALE: Final = {"merged": None}
"""Note with each commit: from then on, the result at the destination is out of date."""
GRACE: Final = 10.0
"""Time that all steps have, at the end of a run, to end their running calls (s)."""


class Run:
    """Owner of the state of one run: reader, rooms, committer and counts."""

    def __init__(
        self,
        plan: Plan,
        source: Source,
        progress: Progress,
        note_kinds: Callable[[Window], None],
        ray: Ray | None,
        max_failed: float | None,
        row_threads: int,
        watch: Callable[[Snapshot], None],
    ) -> None:
        self._plan = plan
        self._source = source
        self._progress = progress
        self._inbox = queue.SimpleQueue[Callable[[], object]]()
        self._fail = partial(self._post, _raise)
        # before any thread starts: a step may be refused
        engines = [engine_for(step, self._fail, ray) for step in plan.steps]
        tell = partial(self._post, self._take_reading)
        self._reader = Reader(source, plan, progress, note_kinds, tell, self._fail)
        needed = any(each.preprocess or each.postprocess or each.where for each in plan.steps)
        self._row_threads = RowThreads(row_threads if needed else 0, "rows")
        self._rooms = [
            Room(number, engine, self._inbox.put, self._row_threads)
            for number, engine in enumerate(engines)
        ]
        self._watch = watch
        # rows that may be open: read, and not ended
        self._max_open = sum([room.limit for room in self._rooms])
        self._awaits_window = False  # whether the reader reads a window
        self._more_to_read = True  # whether the source has rows that were not read
        self._counts = Counter(read=0, skipped=0, recomputed=0, unreadable=0)  # as in `Snapshot`
        self.tally = Tally(max_failed)
        # clients with a budget, which is that of the run, by the steps that call them
        self._clients: dict[str, Any] = {
            step.name: step.fn
            for step in plan.steps
            if isinstance(getattr(step.fn, "spent", None), int | float)
        }
        spent = progress.get("spent") or {}
        for name, client in self._clients.items():
            client.spent = max(client.spent, spent.get(name, 0.0))
        self._began = self._watched = time.perf_counter()

    def execute(self) -> None:
        """Run all rows through all steps.

        Raises:
            RunStopped: the budget of failed rows is spent, or a step does not work.
            Exception: the source or the progress file fails, or the class of a step cannot be
                built.
        """
        self._committer = Committer(self._progress, self._fail)
        with ExitStack() as ends:  # each callback runs, even if Ctrl-C interrupts another
            if self._clients:  # requests without a result cost money, too
                ends.callback(lambda: self._progress.put_all(self._spent()))
            ends.callback(self._committer.close)
            ends.callback(self._save_rest)
            for room in self._rooms:
                ends.callback(room.engine.close)
            ends.callback(self._finish_running)
            ends.enter_context(interrupts(self._inbox.put, GRACE))
            while self._more_to_read or self._open():
                self._call_events(self._dispatch())
                self._check()

    def note_letters(self, letters: Sequence[Letter]) -> None:
        """Count dead letters: rows that cannot be read, or that the result cannot hold."""
        self._counts["unreadable"] += len(letters)
        for letter in letters:
            self.tally.note(letter.key, "", letter.error)
        self._check_budget()

    def check_results(self, good: int) -> None:
        """Stop the run if rows have failed and none is in the result; `good` are there."""
        if self.tally.failed and not good:
            why = f"none of the {self._counts['read']:,} rows has a result: {self.tally}"
            if isinstance(self.tally.last_error, TypeError | AttributeError):
                why += "; the function gets a list of items, preprocess and postprocess one"
            raise RunStopped(why) from self.tally.last_error

    def snapshot(self) -> Snapshot:
        """Return the counts of this moment."""
        total, is_estimate = self._total()
        return Snapshot(
            total=total,
            total_is_estimate=is_estimate,
            **self._counts,
            seconds=time.perf_counter() - self._began,
            steps=tuple([room.counts() for room in self._rooms]),
            errors=dict(self.tally.errors),
            examples=dict(self.tally.examples),
            stopped="",
        )

    def _total(self) -> tuple[int | None, bool]:
        """Return the number of rows of the source, if known, and whether it is an estimate."""
        if not self._more_to_read:
            return self._counts["read"], False
        if self._source.rows is not None:
            return self._source.rows, False
        return self._source.estimate, True

    def _open(self) -> int:
        return sum([room.open for room in self._rooms])

    def _check(self) -> None:
        """Stop the run if it is to end, and show how far it has come."""
        self._check_budget()
        for room in self._rooms:
            room.check()
        now = time.perf_counter()
        if now - self._watched >= TICK:
            self._watched = now
            self._watch(self.snapshot())

    def _check_budget(self) -> None:
        """Raise RunStopped if more rows have failed than `max_failed` allows."""
        total, is_estimate = self._total()
        self.tally.check(self._counts["read"], None if is_estimate else total)

    def _call_events(self, timeout: float) -> None:
        """Wait for an event, and call some that are there."""
        for _ in range(EVENTS):
            try:
                event = self._inbox.get(timeout=timeout)
            except queue.Empty:
                return
            event()
            timeout = 0.0

    def _post(self, method: Callable[..., object], *arguments: object) -> None:
        """Have the thread of the run call `method`."""
        self._inbox.put(partial(method, *arguments))

    # into a step

    def _take_reading(self, reading: Reading) -> None:
        """Let the rows of a window enter the steps that they lack."""
        self._awaits_window = False
        self._more_to_read = not reading.last
        if 0 < reading.size < WINDOW_ROWS:  # the rows are large, or the source ends
            # fewer rows in memory, but enough to keep all engines busy
            least = sum([room.least for room in self._rooms])
            self._max_open = min(self._max_open, max(2 * reading.size, least))
        self._counts.update(reading.counts, read=reading.size)
        self.note_letters(reading.letters)
        for row, number in reading.samples:
            self._rooms[number].failures.probe = row
        for room, rows in zip(self._rooms, reading.rows, strict=False):
            room.enter(rows)

    def _dispatch(self) -> float:
        """Ask for rows, send batches and commits that are due. Return the time to the next (s)."""
        if self._more_to_read and not self._awaits_window and self._open() < self._max_open:
            self._awaits_window = True
            self._reader.ask()
        # nothing runs and nothing is read: no batch will get more rows, so all must leave
        stuck = not (self._awaits_window or any(room.busy for room in self._rooms))
        more = self._more_to_read  # whether more rows may come to the next room
        due = time.perf_counter() + TICK
        for room in self._rooms:
            now = time.perf_counter()
            if room.open:
                due = min(due, room.feed(now, more=more, stuck=stuck))
            if room.done or room.failures.dead:
                is_full = len(room.done) >= COMMIT_ROWS
                moment = now if is_full else room.committed + COMMIT_S
                due = min(due, moment)
                if moment <= now:
                    self._commit(room)
            more = more or room.open > 0
        return max(0.0, due - time.perf_counter())

    # out of a step

    def _commit(self, room: Room) -> None:
        """Commit the rows that have ended in a step, and let good rows enter the next step."""
        number, failures = room.number, room.failures
        done, room.done = room.done, []
        dead, failures.dead = failures.dead, []
        if not (done or dead):
            return
        room.committed = time.perf_counter()
        filtered = [row for row in done if row.result is FILTERED]
        good = [row for row in done if row.result is not FILTERED] if filtered else done
        values = room.columns.read([row.result for row in good])
        rows = [good[place] for place in values.places]
        dead += [(good[place], "output", why) for place, why in values.misfits.items()]
        for row in done:
            row.result = None
        room.note_ended(ok=len(rows), filtered=len(filtered), failed=len(dead))
        outside = [error for _, phase, error in dead if phase != "inference"]
        failures.note_outside(outside, worked=bool(rows or filtered))
        ended: list[tuple[Key, int, str | None]] = [
            (row.key, row.inputs[number], None) for row in filtered
        ]
        for row, phase, error in dead:
            letter = letter_text(phase, *text_of(error), row.attempts)
            ended.append((row.key, row.inputs[number], letter))
            self.tally.note(row.key, room.step.name, letter, error)
        self._committer.submit(
            Commit(
                number,
                [(row.key, row.inputs[number]) for row in rows],
                values,
                ended,
                notes={**STALE, **self._spent()},
            )
        )
        if rows and failures.probe is None:
            failures.probe = rows[0]
        if rows and number + 1 < len(self._rooms):
            rows = [row.next() for row in rows]
            columns = dict(zip(room.columns.names, values.columns, strict=True))
            for name in self._plan.needed[number]:
                for row, value in zip(rows, columns[name], strict=True):
                    row.values[name] = value
            self._rooms[number + 1].enter(rows)

    def _spent(self) -> dict[str, Any]:
        """Return a note of the money that clients have spent."""
        return {"spent": {name: client.spent for name, client in self._clients.items()}}

    # the end

    def _finish_running(self) -> None:
        """Begin no batch, and take the outcomes of running batches, for `GRACE` seconds at most."""
        deadline = time.perf_counter() + GRACE
        for room in self._rooms:
            room.engine.stop()
        try:
            while any(room.out for room in self._rooms) and time.perf_counter() < deadline:
                with suppress(Exception):  # the run has ended for another reason
                    self._call_events(deadline - time.perf_counter())
        except KeyboardInterrupt:  # the second one
            deadline = 0.0
            raise
        finally:
            self._reader.close(deadline)
            self._row_threads.close(deadline)

    def _save_rest(self) -> None:
        """Commit the results that exist at the end of the run."""
        while not self._inbox.empty():
            with suppress(Exception, KeyboardInterrupt):
                self._call_events(0.0)
        for room in self._rooms:
            self._commit(room)


def _raise(error: BaseException) -> None:
    raise error
