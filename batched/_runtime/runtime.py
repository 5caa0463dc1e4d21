"""Workers' side of a runtime, common to threads and loops: call a worker, find a batch, answer.

Workers follow the leader/followers pattern. At any time at most one free worker watches the queue:
it is about to ask for a batch, or it sleeps until the moment at which a batch may leave. `_alarm`
is the moment at which it looks. A caller that lets a batch leave earlier wakes or starts a worker.
A worker that takes a batch wakes or starts another worker if items still wait. So no thread polls.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Final

from .._core.capacity import Room
from .._core.linger import NEVER
from .._core.policy import BatchPolicy
from .._core.scheduler import Batch, Request, Scheduler, Slice
from .._execution.attempts import Outcomes
from .._execution.execution import Execution
from ..errors import BatcherClosed
from . import observer
from .call_queue import AWAKE, CallQueue
from .observer import Observer
from .recorder import Recorder
from .settling import complete, settle

CANNOT_START: Final = (RuntimeError, MemoryError)
"""Errors for which no thread can start. A signal handler is taken to raise another type."""

MANY: Final = 1 << 30
"""Number of batches that may run at once where something else is the limit."""

Live = tuple[int, int, int]
"""Number of live rows, length of the longest of them, and most rows that may join."""

Look = tuple[Batch | float | None, bool]
"""Result of a look for a batch: see `Runtime._look`."""


class Runtime(CallQueue):
    """Runtime of one scheduler; subclasses own the workers."""

    workers_stay: bool
    """Whether workers without work are parked until they are called; if not, they end."""

    def __init__(
        self,
        policy: BatchPolicy,
        execution: Execution,
        recorder: Recorder,
        on_batch: Observer | None,
        name: str,
    ) -> None:
        most = policy.max_concurrent_batches
        # with `prefetch` further threads call the function
        self.most_workers = 1 if policy.prefetch else most
        self.execution = execution
        self.cancels_running = execution.in_steps
        if execution.in_steps:  # calls that join a run are batches of their own
            policy = replace(policy, max_concurrent_batches=MANY)
        super().__init__(policy, recorder, name)
        self.pool.size = most
        self.observer = on_batch

    def _call_worker(self) -> None:
        """Wake a worker that is parked, or start one if fewer run than may run."""
        parker: Any = None
        starting = False
        try:
            with self._lock:
                if self._parked:
                    parker = self._parked[-1]  # the worker removes its parker from the list
                elif self._workers < self.most_workers:
                    parker = self._new_parker()
                    starting = True
                    self._workers += 1
            if starting:
                self._start_worker(parker)
            elif parker is not None:
                parker.unpark(self)
        # no more threads, or a signal, or a full stack: only assignments are certain to work now
        except BaseException as error:
            self._alarm = NEVER
            if starting and parker is not None:
                with self._lock:
                    # if the worker has begun nevertheless, it ends uncounted
                    parker.scheduler = None
                    parked = parker in self._parked
                    self._workers -= 1
                if parked:
                    parker.unpark(self)
                if not self._workers:
                    self._start_later(error)
            if not starting or not isinstance(error, CANNOT_START):
                raise

    def _start_later(self, error: BaseException) -> None:
        """Start a worker in a thread that no signal interrupts. End all calls if this fails."""
        if not isinstance(error, CANNOT_START):
            try:
                self._call_soon(self._call_worker)
                return
            except Exception as again:
                error = again
        self.abort(f"no worker could be started: {error}")

    def _take(self, parker: Any) -> Batch | float | None:
        """Return the next step of a free worker.

        The step is a batch to run, the moment until which to park on `parker`, or None to end.
        """
        if self._wakeups.left:
            self._wakeups.wake_left()
        with self._lock:
            if self._changing:
                self._repair()
            found, more = self._look(parker, time.perf_counter())
        if self._scheduler.admitted:
            self._notify_admitted()
        if more:
            self._call_worker()
        return found

    def _look(self, parker: Any, now: float) -> Look:
        """Look for a batch, under the lock.

        Return the next step of the worker (see `_take`), and whether another worker must be called.
        """
        scheduler = self._scheduler
        if parker in self._parked:  # the worker woke by itself
            self._parked.remove(parker)
        # the scheduler was replaced, or starting the worker was given up
        uncounted = parker.scheduler is not scheduler
        batch = None if uncounted else scheduler.take(now)
        if batch is not None or uncounted:
            more = scheduler.has_room and scheduler.waiting > 0
            self._alarm = AWAKE if more else NEVER
            return batch, more
        deadline = scheduler.next_deadline()
        if deadline == NEVER and self.workers_stay and scheduler.has_room:
            # callers who come back until then need not wake the worker
            deadline = scheduler.linger_end(now)
        self._alarm = deadline
        done = deadline == NEVER and not scheduler.waiting
        if done and (not self.workers_stay or (self._closed and not self.exiting)):
            self._workers -= 1
            return None, False
        self._parked.append(parker)
        return deadline, False

    def _finish(self, batch: Batch, outcomes: Outcomes, parker: Any = None) -> Batch | float | None:
        """Free the worker of `batch`, then answer the callers.

        So a caller that calls again at once finds the worker free. With `parker`, return the next
        step of the worker (see `_take`).
        """
        look: Look | None = None
        ended: list[Request] = []
        open_ended = ended
        try:
            with self._lock:
                if self._changing:
                    self._repair()
                scheduler = self._scheduler
                aborted = batch not in scheduler.running
                if not aborted:
                    ended, open_ended = settle(scheduler, outcomes)
                    if ended:
                        self._wakeups.add(batch, ended)
                    now = time.perf_counter()
                    # last: an exception that interrupts must not lose the callers
                    scheduler.finished(batch, now)
                    if parker is not None and not ended and self.observer is None:
                        look = self._look(parker, now)
            if scheduler.admitted:
                self._notify_admitted()
            if ended:
                self._answer(batch, ended, open_ended)
            elif not aborted:
                self.recorder.ended(batch, 0)
        except BaseException:
            self._wakeups.leave(batch)
            raise
        if self.observer is not None and not aborted:
            self.observer(batch, outcomes)
        if batch.attempts > 1:
            self._note_attempts(batch, outcomes)
        if look is None:
            return None if parker is None else self._take(parker)
        found, more = look
        if more:
            self._call_worker()
        return found

    def _answer(self, batch: Batch, ended: list[Request], open_ended: list[Request]) -> None:
        """Wake the callers whose requests have ended with `batch`. `open_ended`: see `settle`."""
        try:
            errors = 0
            if open_ended:
                errors = complete(open_ended, self.execution.collator.join, self.name)
            self.recorder.ended(batch, errors)
        except BaseException:
            for request in ended:
                lost = BatcherClosed(f"{self.name}: its results were lost to a failure")
                request.error = lost if request.error is None else request.error
            raise
        finally:
            self._wakeups.wake(batch)

    def _note_attempts(self, batch: Batch, outcomes: Outcomes) -> None:
        """Log that the function ran in parts, because memory ran out or an item failed."""
        if batch.too_big:
            self.notices.add(
                "memory",
                f"{batch.too_big[0][0]} items ran out of memory, and were run in smaller parts",
            )
        # no code of the classes of errors is called
        if any(issubclass(type(part), BaseException) for part in outcomes[1]):
            self.notices.add(
                "item",
                f"items of a batch of {batch.size} failed; the function was called "
                f"{batch.attempts} times in all, to find them",
            )

    def join(self, scheduler: Scheduler, key: Hashable, rows: Live) -> Batch | None:
        """Return calls of the group `key` that join live rows, or None if no call may join.

        `scheduler` handed out these rows. No call joins them once the queue was reset.
        """
        if not scheduler.waiting:
            return None
        with self._lock:
            if self._changing:
                self._repair()
            if scheduler is not self._scheduler:
                return None
            room = Room(scheduler.capacity, *rows)
            batch = scheduler.join(key, room, time.perf_counter())
            if batch is not None:
                batch.begun = True
        if scheduler.admitted:
            self._notify_admitted()
        if batch is not None and observer.probe is not None:
            observer.probe.joined(self.name, batch)
        return batch

    def answer(self, batch: Batch, piece: Slice, part: Any) -> int:
        """Answer a row of a run. Return the number of calls that have failed with the row."""
        failed = 0
        try:
            with self._lock:
                scheduler = self._scheduler
                if batch not in scheduler.running:  # the queue was reset
                    return 0
                ended, open_ended = settle(scheduler, ([piece], [part], [1]))
                self._wakeups.add(piece, ended)
                scheduler.answer_early(batch, 1)
            failed = complete(open_ended, self.execution.collator.join, self.name)
            self._wakeups.wake(piece)
        except BaseException:
            self._wakeups.leave(piece)
            raise
        return failed

    def leave(self, batch: Batch) -> None:
        """Note that a row of a run leaves without an answer."""
        with self._lock:
            if batch in self._scheduler.running:
                self._scheduler.answer_early(batch, 1)

    def end(self, batch: Batch, errors: int, largest: tuple[int, int], outcomes: Outcomes) -> None:
        """Note that all rows that joined a run together have ended.

        `errors`: calls that have failed; `largest`: most rows that ran at once, and the length of
        the longest of them.
        """
        with self._lock:
            if self._changing:
                self._repair()
            scheduler = self._scheduler
            if batch not in scheduler.running:
                return
            batch.fitted = False  # the rows of other batches ran beside its rows
            scheduler.finished(batch, time.perf_counter())
            scheduler.capacity.fitted(*largest)
        if scheduler.admitted:
            self._notify_admitted()
        self.recorder.ended(batch, errors)
        if self.observer is not None:
            self.observer(batch, outcomes)

    def too_big(self, rows: int, longest: int) -> None:
        """Note that `rows` live rows, none longer than `longest`, ran out of memory."""
        with self._lock:
            self._scheduler.capacity.too_big(rows, longest)
        self.recorder.memory_error()
        self.notices.add("memory", f"{rows} rows ran out of memory, and run in smaller parts")

    @abstractmethod
    def _new_parker(self) -> Any:
        """Return the parker of a new worker for the present scheduler."""

    @abstractmethod
    def _start_worker(self, parker: Any) -> None:
        """Start a worker that calls `_take` with `parker` until the next step is None."""
