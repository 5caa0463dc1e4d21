"""What both runtimes share: the rule by which free workers are called, find a batch, and answer
callers.

Workers lead and follow. At any time one free worker at most is on watch: awake and about to ask for
a batch, or asleep until the moment that one may leave. `_alarm` is when it looks. Whoever lets a
batch leave earlier than that calls a worker; one that takes a batch hands the watch over if there
is anything left to watch. So nothing polls.
"""

from __future__ import annotations

import os
import time
import weakref
from abc import abstractmethod
from typing import Any

from .._core.linger import NEVER
from .._core.policy import BatchPolicy
from .._core.scheduler import Batch, Request
from .._execution.attempts import Outcomes
from .._execution.execution import Execution
from ..errors import BatcherClosed
from ..stats import Recorder
from .async_backend import current_loop
from .observer import Observer
from .reception import AWAKE, Reception
from .settling import complete, settle
from .timer_thread import timer
from .wakers import Waker, log_failure, wake_all

_NOBODY: Any = None
"""Instead of a bell: there is no worker to call."""

Look = tuple[Batch | float | None, bool, list[Waker]]
"""What a free worker does next (see `Runtime._take`), whether another one is to be called, and who
waits for the end of all calls and is to be told of it.
"""

_alive: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()


def alive() -> list[Runtime]:
    """Every runtime of this process."""
    return [runtime for ref in _alive.valuerefs() if (runtime := ref()) is not None]


class Runtime(Reception):
    """Owns a scheduler; subclasses own the workers."""

    workers_stay: bool
    """Whether workers without work rest until they are called; else they end."""

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
        """Wakes a worker that rests, or starts one; all others are about to look for a batch
        anyway.
        """
        bell, starting = _NOBODY, False
        try:
            with self._lock:
                if self._resting:
                    bell = self._resting[-1]  # it takes itself off the list
                elif self._workers < self.most_workers:
                    bell = self._new_bell()
                    starting = True
                    self._workers += 1
            if starting:
                self._start_worker(bell)
            elif bell is not _NOBODY:
                self._ring(bell)
        # no more threads, or a signal, or a full stack: only plain stores are sure to work now
        except BaseException as error:
            self._alarm = NEVER
            if starting:
                with self._lock:
                    # if it has begun nevertheless, it ends as one that nobody has counted
                    bell.scheduler = None
                    rests = bell in self._resting
                    self._workers -= 1
                if rests:
                    self._ring(bell)
                if not self._workers:
                    self.forsake(f"no worker could be started: {error}")
            elif bell is not _NOBODY:
                self._ring(bell)
            if not starting or not isinstance(error, Exception):
                raise

    def _take(self, bell: Any, look: Look | None = None) -> Batch | float | None:
        """What a free worker does next: run a batch, rest until `bell` rings or a moment has come,
        or (None) end. `look`: it has looked already.
        """
        if look is None:
            if self._torn or self._answers.left:
                self._mend()
            with self._lock:
                look = self._look(bell, time.perf_counter())
        found, more, drained = look
        if self._scheduler.admitted:
            self._admit()
        if more:
            self._call_worker()
        if drained:
            wake_all(drained, current_loop())
        return found

    def _look(self, bell: Any, now: float) -> Look:
        """Looks for a batch; under the lock."""
        scheduler = self._scheduler
        if bell in self._resting:  # it woke by itself
            self._resting.remove(bell)
        # it worked for what was forsaken, or was given up when it was started
        uncounted = bell.scheduler is not scheduler
        batch = None if uncounted else scheduler.take(now)
        if batch is not None or uncounted:
            more = scheduler.has_room and scheduler.waiting > 0
            self._alarm = AWAKE if more else NEVER
            # it may have answered callers since
            return batch, more, self._drained() if uncounted else []
        deadline = scheduler.next_deadline()
        if deadline == NEVER and self.workers_stay and scheduler.has_room:
            # who comes back then need not call the worker, only to have it wait
            deadline = scheduler.return_time(now)
        self._alarm = deadline
        done = deadline == NEVER and not scheduler.waiting
        if done and (not self.workers_stay or (self._closed and not self.exiting)):
            self._workers -= 1
            return None, False, self._drained()
        self._resting.append(bell)
        return deadline, False, []

    def _finish(self, batch: Batch, outcomes: Outcomes, bell: Any = _NOBODY) -> Look | None:
        """Frees the worker of `batch`, then answers the callers: one that comes straight back finds
        it free. Where there is none to answer, the worker looks for its next batch meanwhile.
        """
        look: Look | None = None
        if self._torn:
            self._mend()
        try:
            with self._lock:
                scheduler = self._scheduler
                if batch not in scheduler.running:  # forsaken
                    return None
                ended = settle(scheduler, outcomes)
                if ended:
                    self._answers.end(batch, ended)
                now = time.perf_counter()
                # last, so that its callers are somewhere if something breaks in
                scheduler.finished(batch, now)
                if not ended and self.observer is None and bell is not _NOBODY:
                    look = self._look(bell, now)
            if scheduler.admitted:
                self._admit()
            if ended:
                self._answer(batch, ended)
            else:
                self.recorder.ended(batch, 0)
        except BaseException:
            self._answers.leave(batch)
            raise
        if self.observer is not None:
            self.observer.observe(batch, outcomes)
        return look

    def _answer(self, batch: Batch, ended: list[Request]) -> None:
        """Wakes the callers whose requests have ended with `batch`."""
        try:
            join = self.execution.collator.join
            self.recorder.ended(batch, complete(ended, join, self.name))
        except BaseException:
            for request in ended:
                lost = BatcherClosed(f"{self.name}: its results were lost to a failure")
                request.error = lost if request.error is None else request.error
            raise
        finally:
            self._answers.tell(batch)

    def answer(self, request: Request, result: Any) -> None:
        """Answers a call of one item while its batch runs on."""
        try:
            with self._lock:
                ended = settle(self._scheduler, ([(request, 0, 1)], [result], [1]))
                self._answers.end(request, ended)
                self._scheduler.answer_early(ended)
            complete(ended, self.execution.collator.join, self.name)
            self._answers.tell(request)
        except BaseException:
            self._answers.leave(request)
            raise

    @abstractmethod
    def _new_bell(self) -> Any:
        """What a worker for the present scheduler rests on; it knows that `scheduler`."""

    @abstractmethod
    def _start_worker(self, bell: Any) -> None:
        """Starts a worker that calls `_take` with `bell` until it is told to end."""


def _after_fork() -> None:
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
