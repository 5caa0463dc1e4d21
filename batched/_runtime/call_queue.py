"""Callers' side of a runtime: queue a call, cancel it, close and open the runtime.

`Runtime` adds the workers' side of the state that is declared here.

Finalizers and signal handlers interrupt a thread anywhere, also while it holds the lock. Then they
change nothing, and their work is done a moment later. An exception of a signal handler may leave a
change half made: the next thread repairs the queue.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final
from weakref import WeakSet

from .._core.linger import NEVER
from .._core.policy import BatchPolicy
from .._core.scheduler import Request, Scheduler
from ..errors import BatcherClosed, QueueFull, QueueTimeout
from .async_backend import current_loop, is_over
from .recorder import Recorder
from .timer_thread import daemon_thread, timer
from .waits import Pool, Wait, is_running, wait_for
from .wakers import POLL_INTERVAL, Future, async_waker, wait, wake_all
from .wakeups import Wakeups

AWAKE: Final = -math.inf
"""Value of the alarm while a free worker is awake."""
FIRST_PAUSE: Final = 1e-3
"""First interval at which a caller of `drain` looks for the end of all calls (s)."""


class CallQueue(ABC):
    """Queue of the calls for one scheduler. Of workers it knows only how to call one."""

    tick = 0.0  # the shortest time for which workers can wait (s)
    # whether the interpreter exits: running batches may then still call functions that are closed
    exiting = False

    def __init__(self, policy: BatchPolicy, recorder: Recorder, name: str) -> None:
        self.policy = policy
        self.recorder = recorder
        self.name = name  # name of the batch function, for messages and thread names
        self.pool = Pool(name, policy.max_concurrent_batches)
        self._closed = False  # whether calls are refused
        self._wakeups = Wakeups()  # of callers whose calls have ended
        self._renew_lock()
        self._reset()

    def _renew_lock(self) -> None:
        # guards the state below; never held while user code runs or callers are woken; reentrant,
        # to know its owner
        self._lock: Any = threading.RLock()

    def _reset(self) -> None:
        self._scheduler = Scheduler(self.policy, self.tick)
        self.pool.running = self._scheduler.running
        self._alarm = NEVER  # when a free worker looks for a batch (s): AWAKE, a deadline, or NEVER
        self._expiry = NEVER  # when the timer looks for calls that have waited too long (s)
        self._workers = 0  # workers that have started and not ended
        self._parked: list[Any] = []  # parkers of the workers that wait for work
        # whether this state is being changed. If true while the lock is free, a signal or a full
        # stack has interrupted a change
        self._changing = False

    def _later(self, method: Callable[..., object], *args: Any) -> bool:
        """Return whether this thread holds the lock, and must change nothing now.

        If so, `method` is called after the lock is free.
        """
        if not self._lock._is_owned():
            return False
        self._soon(functools.partial(method, *args))
        return True

    def _soon(self, act: Callable[[], object]) -> None:
        """Call `act` a moment later, in a new thread: callbacks of futures may block."""
        timer.start()
        timer.call_soon(daemon_thread(f"{self.name}-later", act).start)

    def wait_for(
        self, request: Request | None, *, is_over: Callable[[], bool] | None = None
    ) -> Wait | None:
        """Note that this code is about to wait for `request`. Return None outside any batch.

        `request` None stands for all calls. `is_over` returns whether the code has been woken, if
        this is not at the end of the request.

        Raises:
            RuntimeError: the code would wait for itself, and so for ever.
        """
        if self._lock._is_owned():
            raise RuntimeError(
                f"{self.name} is called by a finalizer or a signal handler that broke in on it, "
                "and would wait for itself"
            )
        return wait_for(
            self.pool, request, is_over or (lambda: request is None or request.waker is None)
        )

    def waiting_for(
        self, request: Request | None, *, room: bool = False
    ) -> AbstractContextManager[None] | None:
        """Return `wait_for` as a context manager, or None if the code would wait for itself.

        With `room` the wait is only for room in the queue.
        """
        is_over = (lambda: request not in self._scheduler.blocked) if room else None
        try:
            return self.wait_for(request, is_over=is_over) or nullcontext()
        except RuntimeError:
            return None

    def load(self) -> tuple[int, int, int]:
        """Return the items that wait, the calls that wait for room, and the items that run."""
        scheduler = self._scheduler
        return scheduler.waiting, len(scheduler.blocked), scheduler.in_flight

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
        policy = self.policy
        may_expire = policy.queue_timeout_ms is not None
        call = False
        try:
            if may_expire:
                timer.start()
            with self._lock:
                if self._changing:
                    self._repair()
                scheduler = self._scheduler
                taken = not self._closed or (
                    self.exiting and is_running() and not isinstance(request.waker, Future)
                )
                if not taken or (policy.on_full == "raise" and not scheduler.admits(request)):
                    raise self._refused()
                self._changing = True
                now = request.arrived = time.perf_counter()
                self.recorder.accepted()
                group = scheduler.submit(request, now, from_event_loop=from_event_loop)
                if (
                    self._alarm > AWAKE
                    and scheduler.has_room
                    and scheduler.ready_at(group) < self._alarm
                ):
                    self._alarm = AWAKE
                    if self._parked:
                        self._parked[-1].unpark(self)  # the worker takes its parker off the list
                    else:
                        call = True
                if may_expire:
                    self._set_timer(now)
                queued = request.queued
                self._changing = False
        except BaseException:
            self._call_for_repair()
            raise
        # even if a signal handler raises here: all callers depend on this worker
        finally:
            try:
                if call:
                    self._call_worker()
            except BaseException:
                self._alarm = NEVER  # so that the next call tries again
                raise
        return queued

    def _call_for_repair(self) -> None:
        """Wake a worker to repair the queue if an exception has left a change half made.

        No signal interrupts a worker's thread.
        """
        if self._changing and self._parked:
            self._parked[-1].unpark(self)  # a worker that is awake looks for a batch anyway

    def _repair(self) -> None:
        """Rebuild the queue from the requests that wait, under the lock."""
        self._scheduler.repair()
        self._alarm = self._expiry = NEVER
        self._changing = False

    def _refused(self) -> Exception:
        """Return the exception for a refused call."""
        self.recorder.count("rejected")
        if self._closed:
            return BatcherClosed(
                f"{self.name} was shut down; `with {self.name}:`, or `async with`, opens it again"
            )
        return QueueFull(
            f"{self.name} has {self._scheduler.waiting} items waiting, of at most "
            f"{self.policy.max_queue_size} (max_queue_size)"
        )

    def _submit_late(self, request: Request, from_event_loop: bool) -> None:
        """Submit `request` of a finalizer or signal handler that has gone on. Answer errors."""
        try:
            self.submit(request, from_event_loop=from_event_loop)
        except BaseException as error:
            request.error = error
            wake_all([request.waker])

    def abandon(self, request: Request) -> None:
        """Drop the waiting items of a request that no caller waits for any more."""
        self.cancel(request, True)

    def cancel(self, request: Request, even_begun: bool = False) -> bool:
        """Remove the waiting items of a request from the queue, so that they are never computed.

        Return False if the request has ended. Unless `even_begun`, also return False if any of its
        items runs or has run.
        """
        if self._later(self.cancel, request, even_begun):
            return False
        key = object()
        try:
            with self._lock:
                if request.waker is None or (request.dispatched and not even_begun):
                    return False
                if self._changing:
                    self._repair()
                self._changing = True
                request.error = CancelledError()
                self._wakeups.add(key, [request])
                self._scheduler.cancel(request)
                self._changing = False
            if not request.dispatched:
                request.items = None  # the queue may keep the request for a while
            if request.arrived:  # else it was never accepted
                self.recorder.count("cancelled")
            self._admit()
            self._wakeups.wake(key)
        except BaseException:
            self._wakeups.leave(key)
            self._call_for_repair()
            raise
        return True

    def count_wait(self, request: Request, counts: bool) -> None:
        """Count the time that `request` waits for `queue_timeout_ms`, from now on.

        With `counts` False the time does not count.
        """
        if self._later(self.count_wait, request, counts):
            return
        with self._lock:
            now = time.perf_counter()
            self._scheduler.count_wait(request, now if counts else None)
            self._set_timer(now)

    def _set_timer(self, now: float) -> None:
        """Let the timer look for calls that have waited too long. The caller holds the lock."""
        if not now < self._expiry < NEVER:
            expiry = self._scheduler.next_expiry()
            if expiry < NEVER:
                timer.call_at(expiry, self.expire)
            self._expiry = expiry  # last: an exception that interrupts must not lose the timer

    def expire(self) -> None:
        """End the calls that have waited too long.

        The timer thread runs this; no signal handler interrupts that thread.
        """
        key = object()
        with self._lock:
            if self._changing:
                self._repair()
            now = time.perf_counter()
            ended = self._scheduler.expire(now)
            self._set_timer(now)
            for request in ended:
                request.error = QueueTimeout(
                    f"{self.name}: the call had waited for {self.policy.queue_timeout_ms} ms "
                    "(queue_timeout_ms), and nothing of it had begun to run; let calls wait for "
                    "longer, or fewer of them (max_queue_size)"
                )
                self.recorder.count("timed_out")
            futures = any(isinstance(request.waker, Future) for request in ended)
            self._wakeups.add(key, ended)
        for request in ended:
            request.items = None  # as in `cancel`
        self._admit()
        if futures:  # their callbacks may block, and all batchers share the timer
            try:
                daemon_thread(f"{self.name}-callbacks", self._wakeups.wake, key).start()
            except RuntimeError:  # no more threads
                self._wakeups.wake(key)
        else:
            self._wakeups.wake(key)

    def _admit(self) -> None:
        """Notify callers whose requests have entered the queue. Called after room was made.

        No worker needs to be called: while requests are blocked no group is held, so all workers
        are busy.
        """
        entered = self._scheduler.admitted
        for request in list(entered):
            future = request.waker
            if isinstance(future, Future):
                future.notify_of_room()
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
                if self._changing:
                    self._repair()
                self._changing = True
                self._closed = True
                self._scheduler.draining = True
                ended = list(self._scheduler) if cancel else []
                for request in ended:
                    request.error = (
                        CancelledError()
                        if isinstance(request.waker, Future)
                        else BatcherClosed(f"{self.name} was shut down before this call ran")
                    )
                    self.recorder.count("cancelled")
                self._wakeups.add(key, ended)
                for request in ended:
                    self._scheduler.cancel(request)
                parked = list(self._parked)
                self._changing = False
            # before the callers: callbacks of futures may wait for these workers
            for parker in parked:
                parker.unpark(self)
            self._admit()
            self._wakeups.wake(key)
        except BaseException:
            self._wakeups.leave(key)
            self._call_for_repair()
            raise

    def open(self) -> None:
        """Accept calls again."""
        if self._later(self.open):
            return
        with self._lock:
            self._closed = False
            self._scheduler.draining = False

    def drain(self, loop: object = None) -> bool:
        """Wait until the closed runtime has ended every call and every worker, or is open again.

        If `loop`, which runs them, stops, end them. Return False at once if the code would wait for
        itself.
        """
        self._abort_if_over(loop)
        waiting = self.waiting_for(None)
        if waiting is None:
            return False
        with waiting:
            for seconds in self._pauses(loop):
                time.sleep(seconds)
        return True

    async def drain_async(self, loop: object = None) -> None:
        """Wait as `drain` does, without blocking the event loop."""
        self._abort_if_over(loop)
        waiting = self.waiting_for(None)
        if waiting is not None:
            with waiting:
                for seconds in self._pauses(loop):
                    await wait(async_waker(current_loop()), seconds)

    def _pauses(self, loop: object) -> Iterator[float]:
        """Yield pauses for `drain` to wait, each twice as long as the last (s)."""
        seconds = FIRST_PAUSE
        while not self._drained():
            yield seconds
            seconds = min(2 * seconds, POLL_INTERVAL)
            self._abort_if_over(loop)

    def _abort_if_over(self, loop: object) -> None:
        if loop is not None and is_over(loop):
            self.abort("the event loop that was to run it has stopped")

    def abort(self, why: str, *, forked: bool = False) -> None:
        """End every call with `BatcherClosed`, also in running batches, and replace all workers.

        `why` is the reason in the message. `forked`: called in the child of a fork.
        """
        if forked:  # threads that held the lock, or waited, are gone
            self._renew_lock()
            self.pool.waits = WeakSet()
        with self._lock:
            scheduler, parked = self._scheduler, self._parked
            self._reset()
            self._scheduler.draining = self._closed
            running = [request for batch in scheduler.running for request, _, _ in batch.slices]
            orphans = {
                request: request.waker
                for request in (*scheduler, *running)
                if request.waker is not None
            }
            for request in orphans:
                request.waker = None
            if forked:
                orphans.update(self._wakeups.take_all())
        for request, waker in orphans.items():
            request.error = BatcherClosed(f"{self.name}: {why}")
            self.recorder.count("cancelled")
            if forked and isinstance(waker, Future):
                waker.renew_lock()
        for parker in parked:
            parker.unpark(self)
        wake_all(orphans.values())
        self._wakeups.wake_left()

    def _drained(self) -> bool:
        """Return whether the runtime is open, or has ended every call and every worker."""
        with self._lock:
            return not self._closed or not (
                self._workers
                or self._scheduler.waiting
                or self._scheduler.running
                # with `prefetch`, threads may still answer after their worker has ended
                or self._wakeups.of_batches
            )

    @abstractmethod
    def _call_worker(self) -> None:
        """Wake a worker that rests, or start one. Any other worker is about to look for a batch."""
