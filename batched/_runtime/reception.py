"""Callers' side of a runtime: queue a call, cancel it, close and open the runtime.

`Runtime` adds the workers' side of the state that is declared here.
"""

from __future__ import annotations

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
from .guard import Guard
from .shift import Badge, daemon_thread, is_running
from .timer_thread import timer
from .wakers import Future, Waker, wake_all

AWAKE: Final = -math.inf
"""Value of the alarm while a free worker is awake."""


class Reception(Guard, ABC):
    """Receiver of the calls for one scheduler. Of workers it knows only how to call one."""

    tick = 0.0  # the shortest time for which workers can wait (s)
    # whether the interpreter exits: running batches may then still call functions that are closed
    exiting = False

    def __init__(self, policy: BatchPolicy, recorder: Recorder, name: str) -> None:
        # creates the lock that guards the state below
        super().__init__(Badge(name, policy.max_concurrent_batches))
        self.policy = policy
        self.recorder = recorder
        self.name = name  # name of the batch function, for messages and thread names
        self._may_expire = policy.queue_timeout_ms is not None
        self._raises = policy.on_full == "raise"
        self._closed = False  # whether calls are refused
        self._answers = Answers()  # ended calls with callers that are not yet woken
        self._reset()

    def _reset(self) -> None:
        self._scheduler = Scheduler(self.policy, self.tick)
        self.badge.running = self._scheduler.running
        self._alarm = NEVER  # when a free worker looks for a batch (s): AWAKE, a deadline, or NEVER
        self._expiry = NEVER  # when the timer looks for calls that have waited too long (s)
        self._workers = 0  # workers that have started and not ended
        self._resting: list[Any] = []  # bells of the workers that rest
        # whether this state is being changed. If true while the lock is free, a signal or a full
        # stack has interrupted a change
        self._torn = False
        self._until_drained: list[Waker] = []  # wakers to wake once all calls have ended

    def load(self) -> tuple[int, int, int]:
        """Return the items that wait, the calls that wait for room, and the items that run."""
        scheduler = self._scheduler
        return scheduler.waiting, len(scheduler.blocked), scheduler.in_flight

    @property
    def busy(self) -> bool:
        """Whether any worker has not ended yet."""
        return self._workers > 0

    def pending(self, *, running_only: bool) -> bool:
        """Return whether accepted calls are unanswered.

        With `running_only`, consider only calls that have begun to run.
        """
        return bool(self._scheduler.running) or (self._scheduler.waiting > 0 and not running_only)

    def submit(self, request: Request, *, from_event_loop: bool) -> bool:
        """Accept `request`, and wake its waker once when the call has ended.

        Return False if the call waits for room in the queue first. `from_event_loop`: see
        `Scheduler.submit`.

        Raises:
            BatcherClosed: after `close`.
            QueueFull: the queue has no room, and `on_full` is "raise".
        """
        if self._lock._is_owned():
            if not isinstance(request.waker, Future) and not hasattr(request.waker, "get_loop"):
                self.wait_for(request)  # raises
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
        # even if a signal handler raises here: all callers depend on this worker and on the timer
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
        """Return the exception for a refused call."""
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
        """Submit `request` of a finalizer or signal handler that has gone on. Answer any error."""
        try:
            self.submit(request, from_event_loop=from_event_loop)
        except BaseException as error:
            request.error = error
            wake_all([request.waker])

    def cancel(self, request: Request) -> bool:
        """Remove a request from the queue, so that it is never computed.

        Return False if any of its items runs or has run, or if the request has ended.
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
        """Drop the waiting items of a request that no caller waits for any more."""
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
        """Count the time that `request` waits for `queue_timeout_ms`, from now on.

        With `counts` False the time does not count.
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
        """Return the moment for which the timer must be set (s); infinite if it is set.

        The caller holds the lock.
        """
        if now <= self._expiry < NEVER:
            return NEVER
        # the timer is not set, or a signal interrupted setting it
        self._expiry = self._scheduler.next_expiry()
        return self._expiry

    def expire(self) -> None:
        """End the calls that have waited too long.

        The timer thread runs this; no signal handler interrupts that thread.
        """
        key = object()
        with self._lock:
            if self._torn:
                self._repair()
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
        if futures:  # their callbacks may block, and all batchers share the timer
            try:
                daemon_thread(f"{self.name}-callbacks", self._answers.tell, key).start()
            except RuntimeError:  # no more threads
                self._answers.tell(key)
        else:
            self._answers.tell(key)

    def _admit(self) -> None:
        """Notify callers whose requests have entered the queue. Called after room was made.

        No worker needs to be called: while requests are blocked no group is held, so all workers
        are busy.
        """
        entered = self._scheduler.admitted
        for request in list(entered):
            future = request.waker
            if isinstance(future, Future):
                future.enters()
            entered.pop(request, None)

    def close(self, cancel: bool) -> None:
        """Refuse further calls.

        Calls that wait run without being held or, with `cancel`, end now.
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
            # before the callers: callbacks of futures may wait for these workers
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
        """Accept calls again."""
        if self._later(self.open):
            return
        with self._lock:
            self._closed = False
            self._scheduler.draining = False
            overtaken, self._until_drained = self._until_drained, []
        wake_all(overtaken)

    def when_drained(self, waker: Waker) -> None:
        """Wake `waker` once the closed runtime has ended every call and every worker.

        If the runtime opens again, wake it then.
        """
        with self._lock:
            self._until_drained.append(waker)
            drained = self._drained() if self._closed else [waker]
        wake_all(drained)

    def forsake(self, why: str, *, forked: bool = False) -> None:
        """End every call with `BatcherClosed`, also in running batches, and replace all workers.

        `why` is the reason in the message. `forked`: called in the child of a fork.
        """
        if forked:  # the thread that held the lock is gone
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
        """Return the wakers of callers that wait for the end of all calls, if all have ended."""
        if (
            not self._closed
            or self._workers
            or self._scheduler.waiting
            or self._scheduler.running
            or self._answers.of_batches
        ):
            return []  # with `prefetch`, threads may still answer after their worker has ended
        wakers, self._until_drained = self._until_drained, []
        return wakers

    @abstractmethod
    def _call_worker(self) -> None:
        """Wake a worker that rests, or start one. Any other worker is about to look for a batch."""
