"""What both runtimes share: one scheduler under one lock, and the rule by which free workers are called.

Workers lead and follow. At any time one free worker at most is on watch: awake and about to ask for a batch, or asleep until
the moment that one may leave. `_alarm` is when it looks. Whoever lets a batch leave earlier than that calls a
worker; one that takes a batch hands the watch over if there is anything left to watch. So nothing polls.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from concurrent.futures import CancelledError
from typing import Any, Final

from .._core.linger import NEVER
from .._core.policy import BatchPolicy
from .._core.scheduler import Batch, Request, Scheduler
from ..errors import BatcherClosed
from ..stats import Recorder
from .execution import Execution, Outcome, settle
from .loops import current_loop
from .shift import is_on_shift
from .wakers import Future, Waker, wake_all

AWAKE: Final = -math.inf
"""The alarm while a free worker is awake."""

_alive: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()


def alive() -> list[Runtime]:
    """Every runtime of this process."""
    return [runtime for ref in _alive.valuerefs() if (runtime := ref()) is not None]


class Runtime(ABC):
    """Owns a scheduler; subclasses own the workers."""

    workers_stay: bool
    """Whether workers without work rest until they are called; else they end."""

    def __init__(self, policy: BatchPolicy, execution: Execution, recorder: Recorder, name: str) -> None:
        self.policy = policy
        self.most_workers = policy.max_concurrent_batches
        self.execution = execution
        self.recorder = recorder
        self.name = name  # of the batch function, for messages and thread names
        self.badge = object()  # what workers carry instead of a reference to this
        self._lock = threading.Lock()  # guards what follows; never held while user code runs or callers are woken
        self._closed = False  # no more calls are taken
        self._reset()
        _alive[id(self)] = self

    def _reset(self) -> None:
        self._scheduler = Scheduler(self.policy)
        self._alarm = NEVER  # when a free worker looks for a batch (s): AWAKE, a deadline, or NEVER
        self._workers = 0  # started and not ended
        self._resting: list[Any] = []  # what rings each worker that rests
        self._answering: dict[Batch, tuple[list[Request], list[Any]]] = {}  # requests that have ended, and wakers not yet woken
        self._until_drained: list[Waker] = []  # those who wait for the end of all accepted calls

    @property
    def queue_size(self) -> int:
        """Items that wait."""
        return self._scheduler.waiting

    @property
    def in_flight(self) -> int:
        """Items in batches that are running."""
        return self._scheduler.in_flight

    @property
    def busy(self) -> bool:
        """Whether any worker has not ended."""
        return self._workers > 0

    def pending(self, *, running_only: bool) -> bool:
        """Whether accepted calls have not been answered; with `running_only`, of those that have begun to run."""
        return bool(self._scheduler.running) or (self._scheduler.waiting > 0 and not running_only)

    @property
    def within(self) -> bool:
        """Whether this code is part of a batch that this runtime is running, and so must not wait for its end."""
        return is_on_shift(self.badge)

    def submit(self, request: Request) -> None:
        """Accepts `request`, whose waker will be woken once.

        Raises:
            BatcherClosed: after `close`.
        """
        call = torn = False
        try:
            with self._lock:
                if self._closed:
                    request.waker = None
                    self.recorder.rejected()
                    raise BatcherClosed(f"{self.name} was shut down; `with {self.name}:`, or `async with`, opens it again")
                torn = True
                call = self._scheduler.submit(request, time.monotonic()) < self._alarm and self._scheduler.has_room
                if call:
                    self._alarm = AWAKE
                torn = False
            self.recorder.accepted()
        except BaseException:
            if torn:  # a signal handler raised, or the stack is full: the queue may be half changed
                self.forsake("a signal or a full stack broke in on a call that was being queued")
            raise
        finally:  # also if a signal handler raises just here: everyone relies on that worker now
            if call:
                try:
                    self._call_worker()
                except BaseException:
                    self._alarm = NEVER  # so that the next call tries again
                    raise

    def refuse_to_wait(self) -> None:
        """Raises in code that this runtime is running as part of a batch, and that is about to wait for another one.

        Raises:
            RuntimeError: with one worker, both would wait for ever.
        """
        if self.within:
            raise RuntimeError(f"{self.name} is called from within its own batch, and would wait for itself; call {self.name}.__wrapped__")

    def cancel(self, request: Request) -> bool:
        """Takes a request out of the queue, never to be computed; False if any of it runs or has run, or it has ended."""
        with self._lock:
            if request.taken or request.waker is None:
                return False
            self._scheduler.cancel(request)
            request.waker = None
        self.recorder.cancelled()
        return True

    def abandon(self, request: Request) -> None:
        """Drops what is left of a request that nobody waits for any more."""
        with self._lock:
            if request.waker is None:
                return
            self._scheduler.cancel(request)
            request.waker = None
        self.recorder.cancelled()

    def close(self, cancel: bool) -> None:
        """Takes no more calls; what waits is run without being held back or, with `cancel`, ends now."""
        ended: list[Request] = []
        with self._lock:
            self._closed = True
            self._scheduler.close()
            if cancel:
                ended = list(self._scheduler)
                for request in ended:
                    self._scheduler.cancel(request)
            resting, self._resting = self._resting, []
            wakers = [*_end(ended), *self._drained()]
        for request, waker in zip(ended, wakers, strict=False):
            request.error = (
                CancelledError() if isinstance(waker, Future) else BatcherClosed(f"{self.name} was shut down before this call ran")
            )
            self.recorder.cancelled()
        for bell in resting:  # before the wakers: callbacks of futures may wait for what these workers do
            self._ring(bell)
        wake_all(wakers, current_loop())

    def open(self) -> None:
        """Takes calls again."""
        with self._lock:
            self._closed = False
            self._scheduler.reopen()
            overtaken, self._until_drained = self._until_drained, []
        wake_all(overtaken, current_loop())

    def when_drained(self, waker: Waker) -> None:
        """Has `waker` woken once this is closed, every accepted call has ended and so have the workers, or it was opened again."""
        with self._lock:
            self._until_drained.append(waker)
            drained = self._drained()
        wake_all(drained, current_loop())

    def forsake(self, why: str, *, forked: bool = False) -> None:
        """Ends every call with `BatcherClosed`, those in running batches too, and starts afresh, with other workers."""
        if forked:  # whoever held the lock is gone
            self._lock = threading.Lock()
        with self._lock:
            scheduler, answering = self._scheduler, self._answering
            drained, resting = self._until_drained, self._resting
            self._reset()
            if self._closed:
                self._scheduler.close()
            running = [request for batch in scheduler.running for request, _, _ in batch.slices]
            ended = list(dict.fromkeys(request for request in (*scheduler, *running) if request.waker is not None))
            orphans = list(zip(ended, _end(ended), strict=True))
        if forked:  # the thread that was about to wake them is gone
            orphans += [pair for ended, wakers in answering.values() for pair in zip(ended, wakers, strict=True)]
        for request, waker in orphans:
            request.error = BatcherClosed(f"{self.name}: {why}")
            self.recorder.cancelled()
            if forked and isinstance(waker, Future):
                waker.renew_lock()
        for bell in resting:
            self._ring(bell)
        wake_all([*(waker for _, waker in orphans), *drained], current_loop())

    def _call_worker(self) -> None:
        """Wakes a worker that rests, or starts one; all others are about to look for a batch anyway."""
        bell, starting = None, False
        try:
            with self._lock:
                if self._resting:
                    bell = self._resting[-1]  # it takes itself off the list
                elif self._workers < self.most_workers:
                    starting = True
                    self._workers += 1
            if bell is not None:
                self._ring(bell)
            elif starting:
                self._start_worker()
        except BaseException as error:  # no more threads, or a signal, or a full stack: only plain stores are sure to work now
            self._alarm = NEVER
            if starting:
                self._workers -= 1
                if not self._workers:
                    self.forsake(f"no worker could be started: {error}")
            elif bell is not None:
                self._ring(bell)
            if not starting or not isinstance(error, Exception):
                raise

    def _take(self, bell: Any) -> Batch | float | None:
        """What a free worker does next: run a batch, rest until `bell` rings or a moment has come, or (None) end."""
        drained: list[Waker] = []
        end = False
        with self._lock:
            if bell.scheduler is not self._scheduler:  # it worked for what was forsaken
                return None
            if bell in self._resting:  # it woke by itself
                self._resting.remove(bell)
            batch = self._scheduler.take(time.monotonic())
            deadline = self._scheduler.next_deadline() if batch is None or self._scheduler.has_room else NEVER
            if batch is not None:
                more = deadline < NEVER
                self._alarm = AWAKE if more else NEVER
            else:
                more = False
                self._alarm = deadline
                if deadline == NEVER and not self._scheduler.waiting and (self._closed or not self.workers_stay):
                    self._workers -= 1
                    drained = self._drained()
                    end = True
                else:
                    self._resting.append(bell)
        if more:
            self._call_worker()
        if drained:
            wake_all(drained, current_loop())
        return None if end else batch or deadline

    def _finish(self, batch: Batch, outcomes: list[Outcome]) -> None:
        """Frees the worker of `batch`, then answers the callers: one that comes straight back finds it free."""
        with self._lock:
            if batch not in self._scheduler.running:  # forsaken
                return
            self._scheduler.finished(batch, time.monotonic())
            ended = settle(self._scheduler, outcomes)
            answer = (ended, _end(ended)) if ended else None
            if answer is not None:
                self._answering[batch] = answer
        if answer is not None:
            self._answer(batch, *answer)
        else:
            self.recorder.ended(batch, 0)

    def _answer(self, batch: Batch, ended: list[Request], wakers: list[Any]) -> None:
        """Wakes the callers whose requests have ended with `batch`."""
        try:
            self.recorder.ended(batch, self.execution.conclude(ended))
        except BaseException:
            for request in ended:
                request.error = request.error or BatcherClosed(f"{self.name}: its results were lost to a failure")
            raise
        finally:
            wake_all(wakers, current_loop())
            self._answering.pop(batch, None)

    def _drained(self) -> list[Waker]:
        """Those to be told that nothing is left to do, if so."""
        if not self._closed or self._workers or self._scheduler.waiting or self._scheduler.running:
            return []
        wakers, self._until_drained = self._until_drained, []
        return wakers

    @abstractmethod
    def _start_worker(self) -> None:
        """Starts a worker that calls `_take` until it is told to end."""

    @abstractmethod
    def _ring(self, bell: Any) -> None:
        """Wakes the worker that rests on `bell`."""


def _end(requests: list[Request]) -> list[Any]:
    """The wakers of `requests`, to be woken once, now that nobody else can."""
    wakers = [request.waker for request in requests]
    for request in requests:
        request.waker = None
    return wakers


def _after_fork() -> None:
    for runtime in alive():
        runtime.recorder.renew_lock()
        runtime.forsake("the process was forked; calls made before run in the parent only", forked=True)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
