"""What callers do to a runtime: queue a call, give it up, wait for it, close and open; with the state that workers share, declared here.

`Runtime` adds what workers do.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from .._core.linger import NEVER
from .._core.policy import BatchPolicy
from .._core.scheduler import Batch, Request, Scheduler
from ..errors import BatcherClosed, QueueFull, QueueTimeout
from ..stats import Recorder
from .clock import clock
from .loops import current_loop
from .shift import Badge, Wait, wait_for
from .wakers import Future, Waker, wake_all

AWAKE: Final = -math.inf
"""The alarm while a free worker is awake."""


class Reception(ABC):
    """Takes calls for one scheduler, and gives them up; knows of workers only that they can be called."""

    def __init__(self, policy: BatchPolicy, recorder: Recorder, name: str) -> None:
        self.policy = policy
        self.recorder = recorder
        self.name = name  # of the batch function, for messages and thread names
        self.badge = Badge(name, policy.max_concurrent_batches)  # what runs carry instead of a reference to this
        self._lock = threading.Lock()  # guards what follows; never held while user code runs or callers are woken
        self._closed = False  # no more calls are taken
        self._reset()

    def _reset(self) -> None:
        self._scheduler = Scheduler(self.policy)
        self.badge.running = self._scheduler.running
        self._alarm = NEVER  # when a free worker looks for a batch (s): AWAKE, a deadline, or NEVER
        self._expiry = NEVER  # when the clock looks for calls that have waited too long (s)
        self._workers = 0  # started and not ended
        self._resting: list[Any] = []  # what rings each worker that rests
        self._answering: dict[object, tuple[list[Request], list[Any]]] = {}  # requests that have ended, and wakers not yet woken
        self._until_drained: list[Waker] = []  # those who wait for the end of all accepted calls

    @property
    def queue_size(self) -> int:
        """Items that wait."""
        return self._scheduler.waiting

    @property
    def blocked(self) -> int:
        """Calls that wait for room in the queue."""
        return self._scheduler.in_line

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

    def submit(self, request: Request) -> bool:
        """Accepts `request`, whose waker will be woken once; False if it waits for room in the queue first.

        Raises:
            BatcherClosed: after `close`.
            QueueFull: there is no room, and no waiting for it.
        """
        call = torn = False
        expiry = NEVER  # for which the clock has to be set
        may_expire = self.policy.queue_timeout is not None
        try:
            if may_expire:
                clock.start()
            with self._lock:
                if self._closed or (self.policy.on_full == "raise" and not self._scheduler.admits(request)):
                    raise self._refused()
                torn = True
                now = request.arrived = time.monotonic()
                self.recorder.accepted()
                call = self._scheduler.submit(request, now) < self._alarm and self._scheduler.has_room
                if call:
                    self._alarm = AWAKE
                if may_expire and (self._expiry == NEVER or self._expiry < now):  # not set, or a signal broke in on setting it
                    expiry = self._expiry = self._scheduler.next_expiry()
                queued = request.queues is not None
                torn = False
        except BaseException:
            if torn:  # a signal handler raised, or the stack is full: the queue may be half changed
                self.forsake("a signal or a full stack broke in on a call that was being queued")
            raise
        finally:  # also if a signal handler raises just here: everyone relies on that worker, and on the clock, now
            if expiry < NEVER:
                clock.call_at(expiry, self.expire)
            if call:
                try:
                    self._call_worker()
                except BaseException:
                    self._alarm = NEVER  # so that the next call tries again
                    raise
        return queued

    def _refused(self) -> Exception:
        """What a caller is told who cannot be served."""
        self.recorder.rejected()
        if self._closed:
            return BatcherClosed(f"{self.name} was shut down; `with {self.name}:`, or `async with`, opens it again")
        return QueueFull(
            f"{self.name} has {self._scheduler.waiting} items waiting, of at most {self.policy.max_queue_size} (max_queue_size)"
        )

    def wait_for(self, request: Request | None, *, room: bool = False, done: Callable[[], bool] | None = None) -> Wait | None:
        """Notes that this code is about to wait for `request`, or for the end of all, or only for `room`; None outside any batch.

        Raises:
            RuntimeError: it would wait for itself, and so for ever.
        """
        return wait_for(self.badge, request, room=room, done=done)

    def waiting_for(self, request: Request | None, *, room: bool = False) -> AbstractContextManager[None] | None:
        """As `wait_for`, for a `with` statement around the wait; None if it would wait for itself."""
        try:
            return self.wait_for(request, room=room) or nullcontext()
        except RuntimeError:
            return None

    def cancel(self, request: Request) -> bool:
        """Takes a request out of the queue, never to be computed; False if any of it runs or has run, or it has ended."""
        with self._changing():
            if request.taken or request.waker is None:
                return False
            self._scheduler.cancel(request)
            request.error = CancelledError()
            key, wakers = self._begin_to_answer([request])
        try:
            self.recorder.cancelled()
            self._let_in()
        finally:
            self._wake(key, wakers)
        return True

    def abandon(self, request: Request) -> None:
        """Drops what is left of a request that nobody waits for any more."""
        with self._changing():
            if request.waker is None:
                return
            self._scheduler.cancel(request)
            request.waker = None
        if request.arrived:  # else it was never accepted
            self.recorder.cancelled()
        self._let_in()

    def expire(self) -> None:
        """Ends the calls that have waited too long."""
        with self._changing():
            ended = self._scheduler.expire(time.monotonic())
            expiry = self._expiry = self._scheduler.next_expiry()
            key, wakers = self._begin_to_answer(ended)
        if expiry < NEVER:
            clock.call_at(expiry, self.expire)
        self._let_in()
        for request in ended:
            request.error = QueueTimeout(f"{self.name}: the call had waited for {self.policy.queue_timeout_ms} ms (queue_timeout_ms)")
            self.recorder.timed_out()
        if any(isinstance(waker, Future) for waker in wakers):  # whose callbacks may block, and the clock is everybody's
            try:
                threading.Thread(target=self._wake, args=(key, wakers), name=f"batched-{self.name}-callbacks", daemon=True).start()
                return
            except RuntimeError:  # no more threads
                pass
        self._wake(key, wakers)

    def _let_in(self) -> None:
        """Tells the callers that have got room in the queue; to be asked after whatever made room.

        No worker needs to be called: while anybody stands in line, nothing is held back, so that all of them work.
        """
        if not self._scheduler.entered:
            return
        with self._lock:
            entered, self._scheduler.entered = self._scheduler.entered, []
        for request in entered:
            future = request.waker
            if isinstance(future, Future):
                future.enters()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Holds the lock. What breaks in on the queue, a signal or a full stack, ends all calls, for it may be half changed."""
        torn = False
        try:
            with self._lock:
                torn = True
                yield
                torn = False
        except BaseException:
            if torn:
                self.forsake("a signal or a full stack broke in on a change of the queue")
            raise

    def _begin_to_answer(self, ended: list[Request]) -> tuple[object, list[Any]]:
        """The wakers of `ended`, to be woken once, now that nobody else can, and the key under which they are noted until then."""
        key, wakers = object(), end(ended)
        self._answering[key] = ended, wakers
        return key, wakers

    def _wake(self, key: object, wakers: list[Any]) -> None:
        """Wakes those who were noted under `key`."""
        try:
            wake_all(wakers, current_loop())
        finally:
            self._answering.pop(key, None)

    def close(self, cancel: bool) -> None:
        """Takes no more calls; what waits is run without being held back or, with `cancel`, ends now."""
        ended: list[Request] = []
        with self._changing():
            self._closed = True
            self._scheduler.close()
            if cancel:
                ended = list(self._scheduler)
                for request in ended:
                    self._scheduler.cancel(request)
                self._scheduler.entered.clear()
            resting, self._resting = self._resting, []
            key, wakers = self._begin_to_answer(ended)
            drained = self._drained()
        for request, waker in zip(ended, wakers, strict=True):
            request.error = (
                CancelledError() if isinstance(waker, Future) else BatcherClosed(f"{self.name} was shut down before this call ran")
            )
            self.recorder.cancelled()
        for bell in resting:  # before the wakers: callbacks of futures may wait for what these workers do
            self._ring(bell)
        self._wake(key, wakers)
        wake_all(drained, current_loop())

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
            orphans = list(zip(ended, end(ended), strict=True))
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

    def _drained(self) -> list[Waker]:
        """Those to be told that nothing is left to do, if so."""
        if not self._closed or self._workers or self._scheduler.waiting or self._scheduler.running:
            return []
        if any(isinstance(key, Batch) for key in list(self._answering)):  # in threads that work ahead of a worker
            return []
        wakers, self._until_drained = self._until_drained, []
        return wakers

    @property
    def within(self) -> bool:
        """Whether waiting for the end of all calls would be waiting for itself here."""
        waiting = self.waiting_for(None)
        with waiting or nullcontext():
            return waiting is None

    @abstractmethod
    def _call_worker(self) -> None:
        """Wakes a worker that rests, or starts one; all others are about to look for a batch anyway."""

    @abstractmethod
    def _ring(self, bell: Any) -> None:
        """Wakes the worker that rests on `bell`."""


def end(requests: list[Request]) -> list[Any]:
    """The wakers of `requests`, to be woken once, now that nobody else can."""
    wakers = [request.waker for request in requests]
    for request in requests:
        request.waker = None
    return wakers
