"""Callers' side of a runtime: queue a call, cancel it, close and open the runtime.

`Runtime` adds the workers' side, with the state that is declared here.

Finalizers and signal handlers interrupt a thread anywhere, also while it holds the lock. A method
that they call then changes nothing, and is called again a moment later (`_postpone`). An exception
of a signal handler may leave a change half made. The next thread repairs the queue (`_repair`).
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final
from weakref import WeakSet, WeakValueDictionary

from .._core.linger import NEVER
from .._core.policy import BatchPolicy
from .._core.scheduler import Request, Scheduler
from ..errors import BatcherClosed, QueueFull, QueueTimeout
from . import observer
from .async_backend import current_loop, is_over
from .notices import Notices
from .recorder import Recorder
from .recorder import after_fork as count_anew
from .timer_thread import daemon_thread, timer
from .waits import Pool, Wait, is_running, note_wait
from .wakers import POLL_INTERVAL, Future, async_waker, log_failure, wait, wake_all
from .wakeups import Wakeups

AWAKE: Final = -math.inf
"""Value of `CallQueue._alarm` while a free worker is awake and about to look for a batch."""
FIRST_PAUSE: Final = 1e-3
"""First interval at which a caller of `drain` looks for the end of all calls (s)."""


_alive: WeakValueDictionary[int, CallQueue] = WeakValueDictionary()


def alive() -> list[CallQueue]:
    """Return every runtime of this process."""
    return [runtime for ref in _alive.valuerefs() if (runtime := ref()) is not None]


class CallQueue(ABC):
    """Queue of the calls for one scheduler. Subclasses have the workers (`_call_worker`)."""

    tick = 0.0  # the shortest time for which workers can wait (s)
    # whether accepted calls are finished when the interpreter exits
    finishes_at_exit = True
    # whether a call can be cancelled that has begun to run
    cancels_running = False
    # whether the interpreter exits. If so, code of running batches may call closed functions
    exiting = False

    def __init__(self, policy: BatchPolicy, recorder: Recorder, name: str) -> None:
        self.policy = policy
        self.recorder = recorder
        self.name = name  # name of the batch function, for messages and thread names
        self.notices = Notices(name)
        self.pool = Pool(name, policy.max_concurrent_batches)
        self._closed = False  # whether calls are refused
        self._wakeups = Wakeups()  # of callers whose calls have ended
        self._renew_lock()
        self._reset()
        _alive[id(self)] = self

    def _renew_lock(self) -> None:
        # guards the state that `_reset` declares; never held while user code runs or callers are
        # woken; an RLock, because `_is_owned` says whether this thread holds it
        self._lock: Any = threading.RLock()

    def _reset(self) -> None:
        self._scheduler = Scheduler(self.policy, self.tick)
        self.pool.running = self._scheduler.running
        # moment at which a free worker looks for a batch (s): AWAKE, a deadline, or NEVER
        self._alarm = NEVER
        self._expiry = NEVER  # moment at which the timer calls `expire` (s)
        self._workers = 0  # workers that have started and not ended
        self._parked: list[Any] = []  # one parker for each worker that waits for work
        # whether this state is being changed. If true while the lock is free, a signal or a full
        # stack has interrupted a change
        self._changing = False

    def _postpone(self, method: Callable[..., object], *args: Any) -> bool:
        """Postpone a call of `method` until the lock is free, if this thread holds the lock.

        Return True if the call was postponed; the caller must then change nothing.
        """
        if not self._lock._is_owned():
            return False
        self._call_soon(functools.partial(method, *args))
        return True

    def _call_soon(self, act: Callable[[], object]) -> None:
        """Call `act` a moment later, in a new thread, because callbacks of futures may block."""
        timer.start()
        timer.call_soon(daemon_thread(f"{self.name}-later", act).start)

    def note_wait(
        self, request: Request | None, *, is_over: Callable[[], bool] | None = None
    ) -> Wait | None:
        """Note that this code is about to wait for `request`. Return None outside any batch.

        With `request` None the code waits for all calls. `is_over` returns whether the wait has
        ended; by default it ends when the request does.

        Raises:
            RuntimeError: the code would wait for itself, and so for ever.
        """
        if self._lock._is_owned():
            raise RuntimeError(
                f"{self.name} is called by a finalizer or a signal handler that interrupted it, "
                "and would wait for itself"
            )
        return note_wait(
            self.pool, request, is_over or (lambda: request is None or request.waker is None)
        )

    def waiting_for(
        self, request: Request | None, *, room: bool = False
    ) -> AbstractContextManager[None] | None:
        """Return a context manager for code that waits, or None if it would wait for itself.

        The context is the wait that `note_wait` notes. With `room` the code waits only until the
        request has entered the queue.
        """
        is_over = (lambda: request not in self._scheduler.blocked) if room else None
        try:
            return self.note_wait(request, is_over=is_over) or nullcontext()
        except RuntimeError:
            return None

    def load(self) -> tuple[int, int, int]:
        """Return the numbers of waiting items, of blocked calls, and of running items."""
        scheduler = self._scheduler
        return scheduler.waiting, len(scheduler.blocked), scheduler.in_flight

    def pending(self, *, running_only: bool) -> bool:
        """Return whether accepted calls are unanswered.

        With `running_only`, consider only items that were handed out in a batch.
        """
        return bool(self._scheduler.running) or (self._scheduler.waiting > 0 and not running_only)

    def submit(self, request: Request, *, from_event_loop: bool) -> bool:
        """Accept `request`. Its waker is woken once, when the call has ended.

        Return False if the call waits for room in the queue first, and True if it is queued or its
        submission is postponed. `from_event_loop`: see `Scheduler.submit`.

        Raises:
            BatcherClosed: after `close`.
            QueueFull: the queue has no room, and `on_full` is "raise".
            RuntimeError: a finalizer or a signal handler would block this thread.
        """
        if self._lock._is_owned():
            if not isinstance(request.waker, Future) and not hasattr(request.waker, "get_loop"):
                self.note_wait(request)  # raises: this caller would block its thread
            return self._postpone(self._submit_late, request, from_event_loop)
        if observer.probe is not None:
            request.origin = observer.probe.origin()
        policy = self.policy
        may_expire = policy.queue_timeout_ms is not None
        must_call_worker = False
        try:
            if may_expire:
                timer.start()
            with self._lock:
                if self._changing:
                    self._repair()
                scheduler = self._scheduler
                is_open = not self._closed or (
                    self.exiting and is_running() and not isinstance(request.waker, Future)
                )
                if not is_open or (policy.on_full == "raise" and not scheduler.admits(request)):
                    raise self._refused(request)
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
                        must_call_worker = True
                if may_expire:
                    self._set_timer(now)
                queued = request.queued
                self._changing = False
        except BaseException as error:
            self._call_for_repair()
            if isinstance(error, QueueFull | BatcherClosed):
                why = "the function was shut down"
                if isinstance(error, QueueFull):
                    why = f"the queue is full (max_queue_size={policy.max_queue_size})"
                self.notices.add("refusal", f"a call was refused: {why}")
            raise
        finally:
            # even if a signal handler raises here: all callers depend on this worker
            try:
                if must_call_worker:
                    self._call_worker()
            except BaseException:
                self._alarm = NEVER  # so that the next call tries again
                raise
        return queued

    def _call_for_repair(self) -> None:
        """Wake a worker to repair the queue if an exception has left a change half made.

        No signal handler interrupts a worker's thread, which is never the main thread. A worker
        that is awake repairs the queue anyway.
        """
        if self._changing and self._parked:
            self._parked[-1].unpark(self)

    def _repair(self) -> None:
        """Rebuild the queue from the requests that wait. The caller holds the lock."""
        self._scheduler.repair()
        self._alarm = self._expiry = NEVER
        self._changing = False

    def _refused(self, request: Request) -> Exception:
        """Count a refused call, and return its exception."""
        self.recorder.count("rejected")
        if self._closed:
            return BatcherClosed(
                f"{self.name} was shut down; `with {self.name}:`, or `async with`, opens it again"
            )
        error = QueueFull(
            f"{self.name} has no room for a call of {request.size}: {self._scheduler.waiting} "
            f"items wait, of at most {self.policy.max_queue_size} (max_queue_size)"
        )
        error.retry_after_s = self._time_of_queue()
        return error

    def _time_of_queue(self) -> float:
        """Return the time in which the present queue will have run (s)."""
        return self._scheduler.time_left(self.policy.batch_size) / self.pool.size

    def _submit_late(self, request: Request, from_event_loop: bool) -> None:
        """Submit a request of a finalizer or signal handler; an error is its answer."""
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

        Return False if the request has ended, or if the cancellation is postponed. Unless
        `even_begun`, also return False if any of its items was handed out in a batch.
        """
        if self._postpone(self.cancel, request, even_begun):
            return False
        key = object()  # of the entry in `_wakeups`
        try:
            with self._lock:
                begun = request.dispatched > 0 and not self.cancels_running
                if request.waker is None or (begun and not even_begun):
                    return False
                if self._changing:
                    self._repair()
                self._changing = True
                request.error = CancelledError()
                self._wakeups.add(key, [request])
                self._scheduler.cancel(request)
                self._changing = False
            if not request.dispatched:
                request.items = None  # frees the items while other objects may keep the request
            if request.arrived:  # not if `submit` has refused the request
                self.recorder.count("cancelled")
            self._notify_admitted()
            self._wakeups.wake(key)
        except BaseException:
            self._wakeups.leave(key)
            self._call_for_repair()
            raise
        return True

    def count_wait(self, request: Request, counts: bool) -> None:
        """Let `queue_timeout_ms` of `request` begin now.

        With `counts` False the request does not expire.
        """
        if self._postpone(self.count_wait, request, counts):
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
        key = object()  # of the entry in `_wakeups`
        with self._lock:
            if self._changing:
                self._repair()
            now = time.perf_counter()
            ended = self._scheduler.expire(now)
            self._set_timer(now)
            for request in ended:
                request.error = error = QueueTimeout(
                    f"{self.name}: the call had waited for {self.policy.queue_timeout_ms} ms "
                    "(queue_timeout_ms), and none of its items had begun to run; raise "
                    "queue_timeout_ms, or limit the waiting items by max_queue_size"
                )
                error.retry_after_s = self._time_of_queue()
                self.recorder.count("timed_out")
            calls_back = any(getattr(request.waker, "calls_back", False) for request in ended)
            self._wakeups.add(key, ended)
        for request in ended:
            request.items = None  # as in `cancel`
            self.notices.add("timeout", "a call has waited for longer than queue_timeout_ms")
        self._notify_admitted()
        if calls_back:  # callbacks may block, and all batchers share the timer
            try:
                daemon_thread(f"{self.name}-callbacks", self._wakeups.wake, key).start()
            except RuntimeError:  # no more threads
                self._wakeups.wake(key)
        else:
            self._wakeups.wake(key)

    def _notify_admitted(self) -> None:
        """Notify the callers of requests that were blocked and have entered the queue.

        No worker needs to be called: all workers are busy, because no group is held while requests
        are blocked.
        """
        entered = self._scheduler.admitted
        for request in list(entered):
            future = request.waker
            if isinstance(future, Future):
                future.notify_of_room()
            entered.pop(request, None)

    def close(self, cancel: bool) -> None:
        """Refuse further calls.

        Waiting calls run as soon as a worker is free. With `cancel` they end now.
        """
        if self._postpone(self.close, cancel):
            return
        key = object()  # of the entry in `_wakeups`
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
            # workers before callers, because callbacks of futures may wait for these workers
            for parker in parked:
                parker.unpark(self)
            self._notify_admitted()
            self._wakeups.wake(key)
        except BaseException:
            self._wakeups.leave(key)
            self._call_for_repair()
            raise

    def shutdown(self, *, wait: bool, cancel: bool) -> None:
        """Close. With `wait`, return once every accepted call has ended."""
        self.close(cancel)
        if wait:
            self.drain()

    async def aclose(self, *, cancel: bool) -> None:
        """Close, and return once every accepted call has ended."""
        self.close(cancel)
        await self.drain_async()

    def open(self) -> None:
        """Accept calls again. Callers that wait in `drain` go on."""
        if self._postpone(self.open):
            return
        with self._lock:
            self._closed = False
            self._scheduler.draining = False

    def drain(self, loop: object = None) -> bool:
        """Wait until the closed runtime has ended every call and every worker, or is open again.

        If `loop`, the event loop that runs the calls, has stopped, end them with an error. Return
        False at once if the code would wait for itself.
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
        """Yield the pauses of `drain` until all calls and workers have ended (s).

        Each pause is twice as long as the last one, up to `POLL_INTERVAL`.
        """
        seconds = FIRST_PAUSE
        while not self._drained():
            yield seconds
            seconds = min(2 * seconds, POLL_INTERVAL)
            self._abort_if_over(loop)

    def _abort_if_over(self, loop: object) -> None:
        """End every call if the event loop that was to run it has stopped."""
        if loop is not None and is_over(loop):
            self.abort("the event loop that was to run this call has stopped")

    def abort(self, why: str, *, forked: bool = False) -> None:
        """End every call with `BatcherClosed`, also in running batches, and reset the queue.

        The workers of the old state end. The next call starts a worker. `why` is the reason in the
        message. `forked`: called in the child of a fork.
        """
        if forked:  # the child has no thread that could release the lock, or that waits
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
            request.error = self._lost_call(why)
            if not forked:  # the parent counts it
                self.recorder.count("lost")
                self.notices.add("loss", f"a call was lost: {why}")
            if forked and isinstance(waker, Future):
                waker.renew_lock()
        for parker in parked:
            parker.unpark(self)
        wake_all(orphans.values())
        self._wakeups.wake_left()

    def _lost_call(self, why: str) -> BatcherClosed:
        """Return the error of a call that `abort` ends."""
        return BatcherClosed(f"{self.name}: {why}")

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
        """Wake a worker that is parked, or start one if fewer run than may run.

        A worker that is awake looks for a batch anyway.
        """


def _after_fork() -> None:
    """Reset all runtimes in the child of a fork, which has no thread of the parent."""
    timer.renew()
    count_anew()
    for runtime in alive():
        try:
            runtime.abort(
                "the process was forked; calls made before run in the parent only", forked=True
            )
        except Exception:
            log_failure("%s may not work in the forked process", runtime.name)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
