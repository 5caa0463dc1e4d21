"""Workers' side of a runtime, common to threads and loops: call a worker, find a batch, answer.

Workers follow the leader/followers pattern. At most one free worker is on watch at any time: it is
about to ask for a batch, or it sleeps until the moment at which a batch may leave. `_alarm` is the
moment at which it looks. A caller that lets a batch leave earlier calls a worker. A worker that
takes a batch calls another worker to watch if items still wait. So no thread polls.
"""

from __future__ import annotations

import os
import time
import weakref
from abc import abstractmethod
from typing import Any, Final

from .._core.linger import NEVER
from .._core.policy import BatchPolicy
from .._core.scheduler import Batch, Request
from .._execution.attempts import Outcomes
from .._execution.execution import Execution
from ..errors import BatcherClosed
from ..stats import Recorder
from .observer import Observer
from .reception import AWAKE, Reception
from .settling import complete, settle
from .timer_thread import timer
from .wakers import Waker, log_failure, wake_all

_NOBODY: Any = None  # in place of a bell

CANNOT_START: Final = (RuntimeError, MemoryError)
"""Errors for which no thread can start. A signal handler is taken to raise another type."""

Look = tuple[Batch | float | None, bool, list[Waker]]
"""Result of a look for a batch: see `Runtime._look`."""

_alive: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()


def alive() -> list[Runtime]:
    """Return every runtime of this process."""
    return [runtime for ref in _alive.valuerefs() if (runtime := ref()) is not None]


class Runtime(Reception):
    """Owner of a scheduler; subclasses own the workers."""

    workers_stay: bool
    """Whether workers without work rest until they are called; if not, they end."""

    def __init__(
        self,
        policy: BatchPolicy,
        execution: Execution,
        recorder: Recorder,
        observer: Observer | None,
        name: str,
    ) -> None:
        super().__init__(policy, recorder, name)
        self.most_workers = policy.max_concurrent_batches
        self.execution = execution
        self.observer = observer
        _alive[id(self)] = self

    def _call_worker(self) -> None:
        """Wake a worker that rests, or start one. Any other worker is about to look for a batch."""
        bell, starting = _NOBODY, False
        try:
            with self._lock:
                if self._resting:
                    bell = self._resting[-1]  # the worker removes its bell from the list
                elif self._workers < self.most_workers:
                    bell = self._new_bell()
                    starting = True
                    self._workers += 1
            if starting:
                self._start_worker(bell)
            elif bell is not _NOBODY:
                bell.ring(self)
        # no more threads, or a signal, or a full stack: only assignments are certain to work now
        except BaseException as error:
            self._alarm = NEVER
            if starting:
                with self._lock:
                    # if the worker has begun nevertheless, it ends uncounted
                    bell.scheduler = None
                    rests = bell in self._resting
                    self._workers -= 1
                if rests:
                    bell.ring(self)
                if not self._workers:
                    self._start_later(error)
            if not starting or not isinstance(error, CANNOT_START):
                raise

    def _start_later(self, error: BaseException) -> None:
        """Start a worker in a thread that no signal interrupts, or end all calls if this fails."""
        if not isinstance(error, CANNOT_START):
            try:
                self._soon(self._call_worker)
                return
            except Exception as again:
                error = again
        self.forsake(f"no worker could be started: {error}")

    def _take(self, bell: Any) -> Batch | float | None:
        """Return the next step of a free worker.

        The step is a batch to run, the moment until which to rest on `bell`, or None to end.
        """
        if self._answers.left:
            self._answers.tell_left()
        with self._lock:
            if self._torn:
                self._repair()
            found, more, drained = self._look(bell, time.perf_counter())
        if more or drained or self._scheduler.admitted:
            self._hand_on(more, drained)
        return found

    def _look(self, bell: Any, now: float) -> Look:
        """Look for a batch, under the lock.

        Return the next step of the worker (see `_take`), and whether another worker must be called.
        If all calls have ended, also return the wakers of the callers that wait for that.
        """
        scheduler = self._scheduler
        if bell in self._resting:  # the worker woke by itself
            self._resting.remove(bell)
        # the scheduler was replaced, or starting the worker was given up
        uncounted = bell.scheduler is not scheduler
        batch = None if uncounted else scheduler.take(now)
        if batch is not None or uncounted:
            more = scheduler.has_room and scheduler.waiting > 0
            self._alarm = AWAKE if more else NEVER
            # the worker may have answered callers in the meantime
            return batch, more, self._drained() if uncounted else []
        deadline = scheduler.next_deadline()
        if deadline == NEVER and self.workers_stay and scheduler.has_room:
            # callers who come back until then need not ring the worker
            deadline = scheduler.return_time(now)
        self._alarm = deadline
        done = deadline == NEVER and not scheduler.waiting
        if done and (not self.workers_stay or (self._closed and not self.exiting)):
            self._workers -= 1
            return None, False, self._drained()
        self._resting.append(bell)
        return deadline, False, []

    def _hand_on(self, more: bool, drained: list[Waker]) -> None:
        """Notify admitted callers, call another worker if `more`, and wake `drained`."""
        self._admit()
        if more:
            self._call_worker()
        wake_all(drained)

    def _finish(self, batch: Batch, outcomes: Outcomes, bell: Any = None) -> Batch | float | None:
        """Free the worker of `batch`, then answer the callers: one that comes straight back finds
        it free. With `bell`, return the next step of the worker (see `_take`).
        """
        look: Look | None = None
        ended: list[Request] = []
        open_ended = ended
        try:
            with self._lock:
                if self._torn:
                    self._repair()
                scheduler = self._scheduler
                forsaken = batch not in scheduler.running
                if not forsaken:
                    ended, open_ended = settle(scheduler, outcomes)
                    if ended:
                        self._answers.end(batch, ended)
                    now = time.perf_counter()
                    # last: an exception that interrupts must not lose the callers
                    scheduler.finished(batch, now)
                    if bell is not None and not ended and self.observer is None:
                        look = self._look(bell, now)
            if scheduler.admitted:
                self._admit()
            if ended:
                self._answer(batch, ended, open_ended)
            elif not forsaken:
                self.recorder.ended(batch, 0)
        except BaseException:
            self._answers.leave(batch)
            raise
        if self.observer is not None and not forsaken:
            self.observer.observe(batch, outcomes)
        if look is None:
            return None if bell is None else self._take(bell)
        found, more, drained = look
        if more or drained:
            self._hand_on(more, drained)
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
            self._answers.tell(batch)

    def answer(self, batch: Batch, request: Request, result: Any) -> None:
        """Answer a call of one item while its batch still runs."""
        try:
            with self._lock:
                ended, open_ended = settle(self._scheduler, ([(request, 0, 1)], [result], [1]))
                self._answers.end(request, ended)
                self._scheduler.answer_early(batch, len(ended))
            complete(open_ended, self.execution.collator.join, self.name)
            self._answers.tell(request)
        except BaseException:
            self._answers.leave(request)
            raise

    @abstractmethod
    def _new_bell(self) -> Any:
        """Return the bell on which a worker for the present scheduler rests."""

    @abstractmethod
    def _start_worker(self, bell: Any) -> None:
        """Start a worker that calls `_take` with `bell` until the next step is None."""


def _after_fork() -> None:
    """Reset all runtimes in the child of a fork, which has no thread of the parent."""
    timer.renew()
    for runtime in alive():
        runtime.recorder.renew_lock()
        try:
            runtime.forsake(
                "the process was forked; calls made before run in the parent only", forked=True
            )
        except Exception:
            log_failure("%s may not work in the forked process", runtime.name)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
