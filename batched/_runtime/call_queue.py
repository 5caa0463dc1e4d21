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
from . import observer
from .async_backend import current_loop, is_over
from .notices import Notices
from .recorder import Recorder
from .settling import take_wakers
from .summary import Ending
from .timer_thread import daemon_thread, timer
from .waits import Pool, check_wait, current_worker
from .wakers import POLL_INTERVAL, Future, async_waker, wait, wake_all

AWAKE: Final = -math.inf
"""Value of `CallQueue._alarm` while a free worker is awake and about to look for a batch."""
INTERRUPTED: Final = "a signal handler has raised while the queue was changed"
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
        # guards the state that `_reset` declares; never held while user code runs or callers are
        # woken; an RLock, because `_is_owned` says whether this thread holds it
        self._lock: Any = threading.RLock()
        # calls that `abort` ends, and their wakers; kept here in case it is interrupted
        self._lost: dict[Request, Any] = {}
        self._reset()
        _alive[id(self)] = self

    def _reset(self) -> None:
        self._scheduler = Scheduler(self.policy, self.tick)
        # moment at which a free worker looks for a batch (s): AWAKE, a deadline, or NEVER
        self._alarm = NEVER
        self._expiry = NEVER  # moment at which the timer calls `expire` (s)
        self._workers = 0  # workers that have started and not ended
        self._parked: list[Any] = []  # one parker for each worker that waits for work

    def _postpone(self, method: Callable[..., object], *args: Any) -> bool:
        """Call `method` a moment later if this thread holds the lock. Return whether it does."""
        if not self._lock._is_owned():
            return False
        timer.start()
        # in a new thread, because callbacks of futures may block
        later = daemon_thread(f"{self.name}-later", method, *args)
        timer.call_soon(later.start)
        return True

    def check_wait(self) -> None:
        """Note that this code is about to wait for a call.

        Raises:
            RuntimeError: the code might wait for itself, and so for ever.
        """
        check_wait(self.pool)

    def may_wait(self) -> bool:
        """Return whether this code may wait for a call."""
        try:
            self.check_wait()
        except RuntimeError:
            return False
        return True

    def count(self, ending: Ending) -> None:
        """Count a call that ended without a batch."""
        self.recorder.count(ending)

    def load(self) -> tuple[int, int, int]:
        """Return the numbers of waiting items, of blocked calls, and of running items."""
        scheduler = self._scheduler
        return scheduler.waiting, len(scheduler.blocked), scheduler.in_flight

    def open_calls(self) -> int:
        """Return the number of accepted calls without an answer."""
        with self._lock:
            running = [piece[0] for batch in self._scheduler.running for piece in batch.slices]
            found = {*self._scheduler, *running}
        return sum(request.waker is not None for request in found)

    def pending(self, *, running_only: bool) -> bool:
        """Return whether accepted calls are unanswered.

        With `running_only`, consider only items that were handed out in a batch.
        """
        return bool(self._scheduler.running) or (self._scheduler.waiting > 0 and not running_only)

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
        may_expire = policy.queue_timeout_ms is not None
        must_call_worker = False
        try:
            if may_expire:
                timer.start()
            with self._lock:
                scheduler = self._scheduler
                is_open = not self._closed or (
                    self.exiting and current_worker() and not isinstance(request.waker, Future)
                )
                if not is_open or (policy.on_full == "raise" and not scheduler.admits(request)):
                    raise self._refused(request)
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
                        self._parked[-1].unpark(self)  # the worker takes its parker off the list
                    else:
                        must_call_worker = True
                if may_expire:
                    self._set_timer(now)
                queued = request.queued
            if must_call_worker:
                self._call_worker()
        except (QueueFull, BatcherClosed) as error:
            why = "the function was shut down"
            if isinstance(error, QueueFull):
                why = f"the queue is full (max_queue_size={policy.max_queue_size})"
            self.notices.add("refusal", f"a call was refused: {why}")
            raise
        except BaseException:
            self.abort(INTERRUPTED)
            raise
        if observer.share is not None:
            observer.share()
        return queued

    def _refused(self, request: Request) -> Exception:
        """Count a refused call, and return its exception."""
        self.count("rejected")
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
        wakers: list[Any] = []
        try:
            with self._lock:
                begun = request.dispatched > 0 and not (self.cancels_running or request.separate)
                if request.waker is None or (begun and not even_begun):
                    return False
                request.error = CancelledError()
                wakers = take_wakers([request])
                self._scheduler.cancel(request)
        except BaseException:
            if wakers:
                self._lost[request] = wakers[0]
            self.abort(INTERRUPTED)
            raise
        if not request.dispatched:
            request.items = None  # frees the items while other objects may keep the request
        if request.arrived:  # not if `submit` has refused the request
            self.count("cancelled")
        self._notify_admitted()
        wake_all(wakers)
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
                self.count("timed_out")
            calls_back = any(getattr(request.waker, "calls_back", False) for request in ended)
            wakers = take_wakers(ended)
        for request in ended:
            request.items = None  # as in `cancel`
            self.notices.add("timeout", "a call has waited for longer than queue_timeout_ms")
        self._notify_admitted()
        if calls_back:  # callbacks may block, and all batchers share the timer
            try:
                daemon_thread(f"{self.name}-callbacks", wake_all, wakers).start()
            except RuntimeError:  # no more threads
                wake_all(wakers)
        else:
            wake_all(wakers)

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
        with self._lock:
            self._closed = True
            self._scheduler.draining = True
            ended = list(self._scheduler) if cancel else []
            for request in ended:
                request.error = (
                    CancelledError()
                    if isinstance(request.waker, Future)
                    else BatcherClosed(f"{self.name} was shut down before this call ran")
                )
                self.count("cancelled")
                self._scheduler.cancel(request)
            wakers = take_wakers(ended)
            parked = list(self._parked)
        # workers before callers, because callbacks of futures may wait for these workers
        for parker in parked:
            parker.unpark(self)
        self._notify_admitted()
        wake_all(wakers)

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
        with self._lock:
            self._closed = False
            self._scheduler.draining = False

    def drain(self, loop: object = None) -> bool:
        """Wait until the closed runtime has ended every call and every worker, or is open again.

        If `loop`, the event loop that runs the calls, has stopped, end them with an error. Return
        False at once if the code would wait for itself.
        """
        self._abort_if_over(loop)
        if not self.may_wait():
            return False
        for seconds in self._pauses(loop):
            time.sleep(seconds)
        return True

    async def drain_async(self, loop: object = None) -> None:
        """Wait as `drain` does, without blocking the event loop."""
        self._abort_if_over(loop)
        if self.may_wait():
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

    def abort(self, why: str) -> None:
        """End every call with `BatcherClosed`, also in running batches, and reset the queue.

        The workers of the old state end. The next call starts a worker. `why` is the reason in the
        message.
        """
        try:
            with self._lock:
                scheduler = self._scheduler
                running = [request for batch in scheduler.running for request, _, _ in batch.slices]
                lost = [each for each in (*scheduler, *running) if each.waker is not None]
                self._lost |= {request: request.waker for request in lost}
                take_wakers(lost)
                for parker in self._parked:
                    parker.unpark(self)
                self._reset()
                self._scheduler.draining = self._closed
            ended = dict(self._lost)
            for request in ended:
                request.error = self._lost_call(why)
                self.count("lost")
                self.notices.add("loss", f"a call was lost: {why}")
            wake_all(ended.values())
            for request in ended:
                self._lost.pop(request, None)
        except BaseException:  # a signal handler has raised again
            self.abort(why)
            raise

    def forget(self) -> None:
        """Begin with an empty queue in the child of a fork, where no thread of the parent runs."""
        self._lock = threading.RLock()
        self._lost.clear()
        self._reset()
        self._scheduler.draining = self._closed
        self.recorder.renew()

    def _lost_call(self, why: str) -> BatcherClosed:
        """Return the error of a call that `abort` ends."""
        return BatcherClosed(f"{self.name}: {why}")

    def _drained(self) -> bool:
        """Return whether the runtime is open, or has ended every call and every worker."""
        with self._lock:
            scheduler = self._scheduler
            return not (self._closed and (self._workers or scheduler.waiting or scheduler.running))

    @abstractmethod
    def _call_worker(self) -> None:
        """Wake a worker that is parked, or start one if fewer run than may run.

        A worker that is awake looks for a batch anyway.
        """


def _after_fork() -> None:
    timer.renew()
    for runtime in alive():
        runtime.forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
