"""What callers do to a runtime: queue a call, give it up, close and open it; `Runtime` adds what
workers do to the state declared here.
"""

from __future__ import annotations

import _thread
import math
import time
from abc import ABC, abstractmethod
from concurrent.futures import CancelledError
from typing import Any, Final

from .._core.linger import NEVER
from .._core.policy import BatchPolicy
from .._core.scheduler import Request, Scheduler
from ..errors import BatcherClosed, QueueFull, QueueTimeout
from ..stats import Recorder
from .answers import Answers
from .async_backend import current_loop
from .guard import Guard
from .shift import Badge, daemon_thread, is_running
from .timer_thread import timer
from .wakers import Future, Waker, wake_all

AWAKE: Final = -math.inf
"""The alarm while a free worker is awake."""


class Reception(Guard, ABC):
    """Takes calls for one scheduler, and gives them up; knows of workers only that they can be
    called.
    """

    tick = 0.0  # the shortest time for which workers can wait (s)
    # the interpreter is; batches may still wait for functions that are closed to everybody else
    exiting = False

    def __init__(self, policy: BatchPolicy, recorder: Recorder, name: str) -> None:
        # with a lock that guards what follows
        super().__init__(Badge(name, policy.max_concurrent_batches))
        self.policy = policy
        self.recorder = recorder
        self.name = name  # of the batch function, for messages and thread names
        self._may_expire = policy.queue_timeout is not None
        self._raises = policy.on_full == "raise"
        self._closed = False  # no more calls are taken
        self._answers = Answers()  # that are not given yet
        self._reset()

    def _reset(self) -> None:
        self._scheduler = Scheduler(self.policy, self.tick)
        self.badge.running = self._scheduler.running
        self._alarm = NEVER  # when a free worker looks for a batch (s): AWAKE, a deadline, or NEVER
        self._expiry = NEVER  # when the timer looks for calls that have waited too long (s)
        self._workers = 0  # started and not ended
        self._resting: list[Any] = []  # what rings each worker that rests
        # this is being changed or, if nobody has the lock, was left half changed by a signal or a
        # full stack
        self._torn = False
        self._until_drained: list[Waker] = []  # those who wait for the end of all accepted calls

    @property
    def queue_size(self) -> int:
        """Items that wait."""
        return self._scheduler.waiting

    @property
    def blocked(self) -> int:
        """Calls that wait for room in the queue."""
        return self._scheduler.blocked

    @property
    def in_flight(self) -> int:
        """Items in batches that are running."""
        return self._scheduler.in_flight

    @property
    def busy(self) -> bool:
        """Whether any worker has not ended."""
        return self._workers > 0

    def pending(self, *, running_only: bool) -> bool:
        """Whether accepted calls have not been answered; with `running_only`, of those that have
        begun to run.
        """
        return bool(self._scheduler.running) or (self._scheduler.waiting > 0 and not running_only)

    def submit(self, request: Request, *, from_event_loop: bool) -> bool:
        """Accepts `request`, whose waker will be woken once; False if it waits for room first.
        `from_event_loop`: see `Scheduler.submit`.

        Raises:
            BatcherClosed: after `close`.
            QueueFull: there is no room, and no waiting for it.
        """
        if self._lock._is_owned():
            if isinstance(request.waker, _thread.LockType):
                self.wait_for(request)  # which refuses
            return self._later(self._submit_late, request, from_event_loop)
        call = False
        expiry = NEVER  # for which the timer has to be set
        try:
            if self._may_expire:
                timer.start()
            with self._lock:
                if self._torn:
                    self._repair()
                scheduler = self._scheduler
                taken = not self._closed or (
                    self.exiting and is_running() and not isinstance(request.waker, Future)
                )
                if not taken or (self._raises and not scheduler.admits(request)):
                    raise self._refused()
                self._torn = True
                now = request.arrived = time.perf_counter()
                self.recorder.accepted()
                scheduler.submit(request, now, from_event_loop=from_event_loop)
                if (
                    self._alarm > AWAKE
                    and scheduler.has_room
                    and scheduler.ready_at(request.queued_in) < self._alarm
                ):
                    self._alarm = AWAKE
                    if self._resting:
                        self._resting[-1].ring(self)  # the worker takes its bell off the list
                    else:
                        call = True
                if self._may_expire:
                    expiry = self._new_expiry(now)
                queued = request.queued_in is not None
                self._torn = False
        except BaseException:
            self._call_for_repair()
            raise
        # also if a signal handler raises just here: all callers rely on that worker and on the
        # timer now
        finally:
            try:
                if call:
                    self._call_worker()
            except BaseException:
                self._alarm = NEVER  # so that the next call tries again
                raise
            finally:
                if expiry < NEVER:
                    timer.call_at(expiry, self.expire)
        return queued

    def _call_for_repair(self) -> None:
        """Have a worker repair the queue, if an exception from a signal handler, or of a full
        stack, has left a change half made. No signal breaks in on a worker's thread.
        """
        if self._torn and self._resting:
            self._resting[-1].ring(self)  # a worker that does not rest looks for a batch anyway

    def _repair(self) -> None:
        """Make the queue whole again, under the lock."""
        self._scheduler.repair()
        self._alarm = self._expiry = NEVER
        self._torn = False

    def _refused(self) -> Exception:
        """What a caller is told who cannot be served."""
        self.recorder.rejected()
        if self._closed:
            return BatcherClosed(
                f"{self.name} was shut down; `with {self.name}:`, or `async with`, opens it again"
            )
        return QueueFull(
            f"{self.name} has {self._scheduler.waiting} items waiting, of at most "
            f"{self.policy.max_queue_size} (max_queue_size)"
        )

    def _submit_late(self, request: Request, from_event_loop: bool) -> None:
        """As `submit`, after a finalizer or a signal handler has gone on without knowing."""
        try:
            self.submit(request, from_event_loop=from_event_loop)
        except BaseException as error:
            request.error = error
            wake_all([request.waker])

    def cancel(self, request: Request) -> bool:
        """Takes a request out of the queue, never to be computed; False if any of it runs or has
        run, or it has ended.
        """
        if self._later(self.cancel, request):
            return False
        key = object()
        try:
            with self._lock:
                if request.dispatched or request.waker is None:
                    return False
                if self._torn:
                    self._repair()
                self._torn = True
                request.error = CancelledError()
                self._answers.end(key, [request])
                self._scheduler.cancel(request)
                self._torn = False
            request.items = None  # the queue may keep the request for a while
            self.recorder.cancelled()
            self._admit()
            self._answers.tell(key)
        except BaseException:
            self._answers.leave(key)
            self._call_for_repair()
            raise
        return True

    def abandon(self, request: Request) -> None:
        """Drops what is left of a request that nobody waits for any more."""
        if self._later(self.abandon, request):
            return
        try:
            with self._lock:
                if request.waker is None:
                    return
                if self._torn:
                    self._repair()
                self._torn = True
                request.waker = None
                self._scheduler.cancel(request)
                self._torn = False
            if not request.dispatched:
                request.items = None  # as in `cancel`
            if request.arrived:  # else it was never accepted
                self.recorder.cancelled()
            self._admit()
        except BaseException:
            self._call_for_repair()
            raise

    def count_wait(self, request: Request, counts: bool) -> None:
        """Has the time that `request` waits count for `queue_timeout_ms`, from now on, or not at
        all.
        """
        if self._later(self.count_wait, request, counts):
            return
        with self._lock:
            now = time.perf_counter()
            self._scheduler.count_wait(request, now if counts else None)
            expiry = self._new_expiry(now)
        if expiry < NEVER:
            timer.call_at(expiry, self.expire)

    def _new_expiry(self, now: float) -> float:
        """The moment for which the timer has to be set, infinite if it is; under the lock."""
        if now <= self._expiry < NEVER:
            return NEVER
        # not set, or a signal broke in on setting it
        self._expiry = self._scheduler.next_expiry()
        return self._expiry

    def expire(self) -> None:
        """Ends the calls that have waited too long. Called by the timer, where no signal is
        handled.
        """
        key = object()
        with self._lock:
            ended = self._scheduler.expire(time.perf_counter())
            expiry = self._expiry = self._scheduler.next_expiry()
            for request in ended:
                request.error = QueueTimeout(
                    f"{self.name}: the call had waited for {self.policy.queue_timeout_ms} ms "
                    "(queue_timeout_ms), and nothing of it had begun to run; let calls wait for "
                    "longer, or fewer of them (max_queue_size)"
                )
                self.recorder.timed_out()
            futures = any(isinstance(request.waker, Future) for request in ended)
            self._answers.end(key, ended)
        for request in ended:
            request.items = None  # as in `cancel`
        if expiry < NEVER:
            timer.call_at(expiry, self.expire)
        self._admit()
        if futures:  # whose callbacks may block, and the timer is everybody's
            try:
                daemon_thread(f"{self.name}-callbacks", self._answers.tell, key).start()
            except RuntimeError:  # no more threads
                self._answers.tell(key)
        else:
            self._answers.tell(key)

    def _admit(self) -> None:
        """Tells the callers that have got room in the queue; to be asked after whatever made room.

        No worker needs to be called: while anybody stands in line, nothing is held back, so that
        all of them work.
        """
        entered = self._scheduler.admitted
        for request in list(entered):
            future = request.waker
            if isinstance(future, Future):
                future.enters()
            entered.pop(request, None)

    def close(self, cancel: bool) -> None:
        """Takes no more calls; what waits is run without being held back or, with `cancel`, ends
        now.
        """
        if self._later(self.close, cancel):
            return
        key = object()
        try:
            with self._lock:
                if self._torn:
                    self._repair()
                self._torn = True
                self._closed = True
                self._scheduler.draining = True
                ended = list(self._scheduler) if cancel else []
                for request in ended:
                    request.error = (
                        CancelledError()
                        if isinstance(request.waker, Future)
                        else BatcherClosed(f"{self.name} was shut down before this call ran")
                    )
                    self.recorder.cancelled()
                self._answers.end(key, ended)
                for request in ended:
                    self._scheduler.cancel(request)
                resting = list(self._resting)
                drained = self._drained()
                self._torn = False
            # before the callers: callbacks of futures may wait for what these workers do
            for bell in resting:
                bell.ring(self)
            self._admit()
            self._answers.tell(key)
            wake_all(drained)
        except BaseException:
            self._answers.leave(key)
            self._call_for_repair()
            raise

    def open(self) -> None:
        """Takes calls again."""
        if self._later(self.open):
            return
        with self._lock:
            self._closed = False
            self._scheduler.draining = False
            overtaken, self._until_drained = self._until_drained, []
        wake_all(overtaken)

    def when_drained(self, waker: Waker) -> None:
        """Has `waker` woken once this is closed, every accepted call has ended and so have the
        workers, or it was opened again.
        """
        with self._lock:
            self._until_drained.append(waker)
            drained = self._drained() if self._closed else [waker]
        wake_all(drained)

    def forsake(self, why: str, *, forked: bool = False) -> None:
        """End every call with `BatcherClosed`, also in running batches, and start afresh with other
        workers.
        """
        if forked:  # the thread that had the lock is gone
            self._renew_lock()
        with self._lock:
            scheduler, drained, resting = self._scheduler, self._until_drained, self._resting
            self._reset()
            if self._closed:
                self._scheduler.draining = True
            running = [request for batch in scheduler.running for request, _, _ in batch.slices]
            ended = list(
                dict.fromkeys(
                    request for request in (*scheduler, *running) if request.waker is not None
                )
            )
            orphans = [(request, request.waker) for request in ended]
            for request in ended:
                request.waker = None
            if forked:
                orphans += self._answers.take_all()
        for request, waker in orphans:
            request.error = BatcherClosed(f"{self.name}: {why}")
            self.recorder.cancelled()
            if forked and isinstance(waker, Future):
                waker.renew_lock()
        for bell in resting:
            bell.ring(self)
        wake_all([*(waker for _, waker in orphans), *drained])
        self._answers.tell_left()

    def _drained(self) -> list[Waker]:
        """Those to be told that nothing is left to do, if so."""
        if (
            not self._closed
            or self._workers
            or self._scheduler.waiting
            or self._scheduler.running
            or self._answers.of_batches
        ):
            return []  # answers may be given by threads that work for a worker which has ended
        wakers, self._until_drained = self._until_drained, []
        return wakers

    @abstractmethod
    def _call_worker(self) -> None:
        """Wakes a worker that rests, or starts one; all others are about to look for a batch
        anyway.
        """
