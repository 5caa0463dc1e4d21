"""Callers' side of a runtime: queue a call, cancel it, close and open the runtime.

`Runtime` adds the workers' side, with the state that is declared here.

One rule holds if a signal handler raises while the queue is being changed, if a worker or its loop
ends, and in the child of a fork: the queue is reset, and its calls end with an error (`abort`). A
finalizer may interrupt a thread that holds the lock. What it cancels or closes is then done a
moment later (`_postpone`), and calls that it makes are refused.
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any, Final
from weakref import WeakValueDictionary

from .._core.linger import NEVER
from .._core.policy import BatchPolicy
from .._core.scheduler import Request, Scheduler
from ..errors import BatcherClosed, QueueFull, QueueTimeout
from . import observer, waits
from .async_backend import current_loop, is_over
from .notices import Notices
from .recorder import Recorder
from .settling import Wakers, take_wakers
from .timer_thread import daemon_thread, timer
from .wakers import POLL_INTERVAL, Future, async_waker, wait, wake_all

AWAKE: Final = -math.inf
"""Value of `CallQueue._alarm` while a free worker is awake and about to look for a batch."""
INTERRUPTED: Final = "a signal handler has raised while the queue was changed"
FIRST_PAUSE: Final = 1e-3
"""First interval at which a caller of `drain` looks for the end of all calls (s)."""


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
        self.pool = waits.Pool(name, policy.max_concurrent_batches)
        self._closed = False  # whether calls are refused
        # guards the state that `_reset` declares; never held while user code runs or callers are
        # woken; an RLock, because `_is_owned` says whether this thread holds it
        self._lock: Any = threading.RLock()
        # ids of ended batches with callbacks that still run, where no worker runs them
        self.waking: set[int] = set()
        self._reset()
        _alive[id(self)] = self

    def _reset(self) -> None:
        self._scheduler = Scheduler(self.policy, self.tick)
        self._scheduler.draining = self._closed
        # moment at which a free worker looks for a batch (s): AWAKE, a deadline, or NEVER
        self._alarm = NEVER
        self._expiry = NEVER  # moment at which the timer calls `expire` (s)
        self._workers: set[Any] = set()  # parkers of the workers that have not ended
        self._parked: list[Any] = []  # those of the workers that wait for work

    def wait(self, _request: Request, waker: Any, /) -> None:
        """Block this thread until the waker of a request is woken."""
        waker.acquire()

    def here(self, _: object) -> CallQueue:
        """Return the runtime for callers on any loop, or on none: this one."""
        return self

    def _postpone(self, method: Callable[..., object], *args: Any) -> bool:
        """Call `method` a moment later if this thread holds the lock. Return whether it does."""
        if not self._lock._is_owned():
            return False
        daemon_thread(f"{self.name}-later", method, *args).start()
        return True

    def check_wait(self) -> None:
        """Note that this code is about to wait for a call.

        Raises:
            RuntimeError: the code might wait for itself, and so for ever.
        """
        waits.check_wait(self.pool)

    def may_wait(self) -> bool:
        """Return whether this code may wait for a call."""
        try:
            self.check_wait()
        except RuntimeError:
            return False
        return True

    def load(self) -> tuple[int, int, int]:
        """Return the numbers of waiting items, of blocked calls, and of running items."""
        scheduler = self._scheduler
        return scheduler.waiting, len(scheduler.blocked), scheduler.in_flight

    def open_calls(self) -> int:
        """Return the number of accepted calls without an answer."""
        with self._lock:
            return len(self._find_open())

    def _find_open(self) -> list[Request]:
        """Return the accepted calls without an answer, under the lock."""
        scheduler = self._scheduler
        running = [piece[0] for batch in scheduler.running for piece in batch.slices]
        return [request for request in {*scheduler, *running} if request.waker is not None]

    def submit(self, request: Request, *, from_event_loop: bool) -> bool:
        """Accept `request`. Its waker is woken once, when the call has ended.

        Return whether the call is queued; if not, it waits for room in the queue first.
        `from_event_loop`: see `Scheduler.submit`.

        Raises:
            BatcherClosed: after `close`.
            QueueFull: the queue has no room, and `on_full` is "raise".
            RuntimeError: a finalizer calls that has interrupted a change of this queue.
        """
        if self._lock._is_owned():
            raise RuntimeError(
                f"{self.name} is called by a finalizer or a signal handler that has interrupted it"
            )
        if observer.probe is not None:
            request.origin = observer.probe.origin()
        policy = self.policy
        if policy.queue_timeout_ms:
            timer.start()
        is_open = queued = must_call_worker = False
        try:
            with self._lock:
                scheduler = self._scheduler
                is_open = not self._closed or (
                    self.exiting
                    and waits.current_worker() is not None
                    and not isinstance(request.waker, Future)
                )
                if is_open and (policy.on_full == "wait" or scheduler.admits(request)):
                    now = request.arrived = time.perf_counter()
                    self.recorder.accept()
                    group = scheduler.submit(request, now, from_event_loop=from_event_loop)
                    if (
                        self._alarm > AWAKE
                        and scheduler.has_room
                        and scheduler.ready_at(group) < self._alarm
                    ):
                        self._alarm = AWAKE
                        if self._parked:
                            self._parked[-1].unpark(self)  # the worker takes its parker off
                        else:
                            must_call_worker = True
                    if policy.queue_timeout_ms:
                        self._set_timer(now)
                    queued = request.queued
            if must_call_worker:
                self._call_worker()
        except BaseException:
            self.abort(INTERRUPTED)
            raise
        if not request.arrived:
            raise self._refused(request, is_open)
        if observer.share is not None:
            observer.share()
        return queued

    def _refused(self, request: Request, is_open: bool) -> Exception:
        """Count and log a refused call, and return its exception."""
        self.recorder.count("rejected")
        error: BatcherClosed | QueueFull
        if not is_open:
            error = BatcherClosed(
                f"{self.name} was shut down; `with {self.name}:`, or `async with`, opens it again"
            )
        else:
            error = QueueFull(
                f"{self.name} has no room for a call of {request.size}: {self._scheduler.waiting} "
                f"items wait, of at most {self.policy.max_queue_size} (max_queue_size)"
            )
            error.retry_after_s = self._time_of_queue()
        self.notices.add("refusal", f"a call was refused: {error}")
        return error

    def _time_of_queue(self) -> float:
        """Return the time in which the present queue will have run (s)."""
        with self._lock:
            return self._scheduler.time_left(self.policy.batch_size) / self.pool.size

    def abandon(self, request: Request) -> None:
        """Drop the waiting items of a request that no caller waits for any more."""
        self.cancel(request, True)

    def cancel(self, request: Request, even_begun: bool = False) -> bool:
        """Remove the waiting items of a request from the queue, so that they are never computed.

        Return False if the request has ended, if the cancellation is postponed or, unless
        `even_begun`, if any of its items was handed out in a batch.
        """
        if self._postpone(self.cancel, request, even_begun):
            return False
        wakers: Wakers = {}
        try:
            with self._lock:
                begun = request.dispatched > 0 and not self.cancels_running
                if request.waker is None or (begun and not even_begun):
                    return False
                request.error = CancelledError()
                take_wakers([request], wakers)
                self._scheduler.cancel(request)
                self._notify_admitted()
        except BaseException:
            self.abort(INTERRUPTED, wakers)
            raise
        if request.arrived:  # not if `submit` has refused the request
            self.recorder.count("cancelled")
        wake_all(wakers.values())
        return True

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
        wakers: Wakers = {}
        with self._lock:
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
            take_wakers(ended, wakers)
            self._notify_admitted()
        for _ in ended:
            self.notices.add("timeout", "a call has waited for longer than queue_timeout_ms")
        woken = wakers.values()
        # callbacks may block, and all batchers share the timer
        if any(isinstance(waker, Future) for waker in woken):
            try:
                daemon_thread(f"{self.name}-callbacks", wake_all, woken).start()
            except RuntimeError:  # no more threads
                wake_all(woken)
        else:
            wake_all(woken)

    def _notify_admitted(self) -> None:
        """Notify the callers of requests that were blocked and have entered the queue.

        The caller holds the lock. No worker needs to be called: all workers are busy, because no
        group is held while requests are blocked.
        """
        for request in self._scheduler.admitted:
            if isinstance(request.waker, Future):
                request.waker.notify_of_room()
        self._scheduler.admitted.clear()

    def close(self, cancel: bool) -> None:
        """Refuse further calls.

        Waiting calls run as soon as a worker is free. With `cancel` they end now.
        """
        if self._postpone(self.close, cancel):
            return
        wakers: Wakers = {}
        with self._lock:
            self._closed = self._scheduler.draining = True
            ended = [*self._scheduler] if cancel else []
            for request in ended:
                request.error = (
                    CancelledError()
                    if isinstance(request.waker, Future)
                    else BatcherClosed(f"{self.name} was shut down before this call ran")
                )
                self.recorder.count("cancelled")
                self._scheduler.cancel(request)
            take_wakers(ended, wakers)
            # workers before callers, because callbacks of futures may wait for these workers
            for parker in self._parked:
                parker.unpark(self)
            self._notify_admitted()
        wake_all(wakers.values())

    def shutdown(self, *, wait: bool, cancel: bool) -> None:
        """Close. With `wait`, return once every accepted call has ended."""
        self.close(cancel)
        if wait:
            self.drain()

    def open(self) -> None:
        """Accept calls again. Callers that wait in `drain` go on."""
        with self._lock:
            self._closed = self._scheduler.draining = False

    def adjust(self, *, draining: bool, batch_size: int) -> None:
        """Say whether batches leave that are not full, and how many items fill a batch."""
        with self._lock:
            self._scheduler.draining = draining or self._closed
            self._scheduler.resize(batch_size)
            if waiting := self._scheduler.waiting:
                self._alarm = AWAKE
        if waiting:
            self._call_worker()

    def drain(self, loop: object = None) -> None:
        """Wait until the closed runtime has ended every call and every worker, or is open again.

        If `loop`, the event loop that runs the calls, has stopped, end them with an error. Return
        at once if the code would wait for itself.
        """
        for seconds in self._pauses(loop):
            time.sleep(seconds)

    async def drain_async(self, loop: object = None) -> None:
        """Wait as `drain` does, without blocking the event loop."""
        for seconds in self._pauses(loop):
            await wait(async_waker(current_loop()), seconds)

    def _pauses(self, loop: object) -> Iterator[float]:
        """Yield the pauses of `drain` (s).

        Each pause is twice as long as the last one, up to `POLL_INTERVAL`.
        """
        seconds = FIRST_PAUSE
        while True:
            if loop is not None and is_over(loop):
                self.abort("the event loop that was to run this call has stopped")
            with self._lock:
                drained = not (self._workers or any(self.load()))
            if drained or not self._closed or not self.may_wait():
                return
            yield seconds
            seconds = min(2 * seconds, POLL_INTERVAL)

    def abort(self, why: str, wakers: Wakers | None = None) -> None:
        """End every call with `BatcherClosed`, also in running batches, and reset the queue.

        `wakers` has further calls, whose wakers were taken. The workers of the old state end. The
        next call starts a worker. `why` is the reason in the message.
        """
        lost = wakers or {}
        try:
            with self._lock:
                take_wakers(self._find_open(), lost)
                for parker in self._parked:
                    parker.unpark(self)
                self._reset()
            for request in lost:
                request.error = self._lost_call(why)
                self.recorder.count("lost")
                self.notices.add("loss", f"a call was lost: {why}")
            wake_all(lost.values())
        except BaseException:  # a signal handler has raised again
            self.abort(why, lost)
            raise

    def forget(self) -> None:
        """Begin with an empty queue in the child of a fork, where no thread of the parent runs."""
        self._lock = threading.RLock()
        self._reset()
        self.recorder.renew()

    def _lost_call(self, why: str) -> BatcherClosed:
        """Return the error of a call that `abort` ends."""
        return BatcherClosed(f"{self.name}: {why}")

    @abstractmethod
    def _call_worker(self) -> None:
        """Wake a worker that is parked, or start one if fewer run than may run.

        A worker that is awake looks for a batch anyway.
        """


_alive = WeakValueDictionary[int, CallQueue]()


def _after_fork() -> None:
    timer.renew()
    observer.renew()
    waits.renew()
    for runtime in alive():
        runtime.forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
