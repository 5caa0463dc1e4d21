"""Wakers of callers: the only module that distinguishes a lock, a future and a task.

A waker is woken when its request has ended. The waker of a coroutine is a future of its event loop
and is woken on that loop; one message wakes all coroutines of a batch. Any thread can wake a lock
or a `Future`.
"""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import logging
import math
import sys
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from .._core.scheduler import Request
from .._execution.exceptions import SharedError
from .async_backend import current_loop, is_gone, post
from .waits import between_runs

if TYPE_CHECKING:
    import trio

U = TypeVar("U")

Lock = _thread.LockType
"""Type of `threading.Lock()`."""

logger = logging.getLogger("batched")


def log_failure(message: str, *args: object) -> None:
    """Log the exception that is being handled. Never raise, even if a filter or handler does."""
    with suppress(BaseException):
        logger.exception(message, *args)


POLL_INTERVAL = 0.1
"""Interval at which a thread that waits for an event loop checks that the loop exists (s)."""


def blocking_waker() -> Lock:
    """Return a locked lock, which the calling thread waits for by locking it again.

    Signal handlers may raise while the thread waits.
    """
    lock = threading.Lock()
    lock.acquire()
    return lock


class Future(concurrent.futures.Future[U]):
    """Answer to a submitted item; `cancel` takes a waiting item out of the queue.

    `result(timeout)` and `exception(timeout)` only stop waiting when the time (in seconds) is over;
    the item still runs. On any event loop, `await future` returns the result. A task that is
    cancelled there cancels the future.
    """

    # class attributes in place of an `__init__`: most futures keep most of these values
    loop: object = None
    """The event loop that runs the call, which must not be blocked; None if a thread runs it."""
    # the request, and the runtime that is to answer it; None before and after
    _call: tuple[Request, Any] | None = None
    _room: Lock | None = None  # wakes the submitting thread when the queue has room
    _wakers: Sequence[AsyncWaker] = ()  # wake the tasks that await this future

    def bind(self, request: Request, runtime: Any, loop: object, room: Lock | None) -> None:
        """Make this the future of `request`, answered by `runtime`, on `loop` if one is given."""
        self._call = request, runtime
        self.loop = loop
        self._room = room

    def notify_of_room(self) -> None:
        """Wake the submitting thread: the request has room in the queue, or needs no room."""
        if self._room is not None:
            wake_all([self._room])

    def wake(self) -> None:
        """Take the answer of the request, and wake all who wait for it."""
        self.notify_of_room()
        call = self._call
        if call is not None and not self.done():
            self._take_answer(call[0])
        self._call = None  # last: an exception that interrupts must not lose the answer
        if self._wakers:
            wake_all(self._wakers)

    def fail(self, error: BaseException) -> None:
        """End a call that was not accepted."""
        self.set_exception(error)
        self.wake()

    def _take_answer(self, request: Request) -> None:
        error, request.error = request.error, None
        try:  # done-callbacks run in here
            if error is None:
                self.set_result(request.result)
            elif issubclass(type(error), concurrent.futures.CancelledError):
                self._cancel()
            else:
                self.set_exception(error)
        except BaseException:
            log_failure("a callback of a future raised")
        finally:
            del error  # its traceback may hold this frame

    def _cancel(self) -> None:
        try:
            super().cancel()
        finally:  # done-callbacks run in there
            if self.cancelled():
                self.set_running_or_notify_cancel()

    def new_waker(self, loop: object) -> AsyncWaker:
        """Return a waker for a task on `loop`, the running loop. It is woken with this future."""
        waker = async_waker(loop)
        vars(self).setdefault("_wakers", []).append(waker)
        if self.done():
            wake_all([waker])
        return waker

    def cancel(self) -> bool:
        """Take the item out of the queue. Return False if the item is running or answered.

        A row of a function that works in steps leaves before the next step.
        """
        if (call := self._call) is not None:
            request, runtime = call
            runtime.cancel(request)  # wakes this future
        elif not self.done():  # still in preparation
            self._cancel()
            self.wake()
        return self.cancelled()

    def running(self) -> bool:
        """Return whether a batch with the item is running."""
        call = self._call
        return call is not None and call[0].dispatched > 0 and not self.done()

    def result(self, timeout: float | None = None) -> U:
        """Return the result, or raise the exception, once it is there."""
        if self._state == "FINISHED" and self._exception is None:  # as most are by then
            return self._result  # type: ignore[return-value]  # there is one
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
            return self._result  # type: ignore[return-value]  # there is one
        finally:
            error = None
            del self  # the raised exception holds this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception, or None for a result, once either is there."""
        self.check_wait(timeout)
        if self.loop is not None and not self.done():
            if current_loop() is self.loop:
                raise RuntimeError(
                    "the event loop that would wait for this future here is the one that answers "
                    "it; await it"
                )
            deadline = math.inf if timeout is None else time.perf_counter() + timeout
            while not self.done() and (left := deadline - time.perf_counter()) > 0:
                self.look_at_loop()
                concurrent.futures.wait([self], min(left, POLL_INTERVAL))
            timeout = 0
        error = super().exception(timeout)
        return error.restored() if type(error) is SharedError else error

    def __await__(self) -> Generator[Any, None, U]:
        return self._outcome().__await__()

    async def _outcome(self) -> U:
        self.check_wait(None)
        loop = current_loop()
        try:
            if not self.done():
                waker = self.new_waker(loop)
                interval = None if self.loop in (None, loop) else POLL_INTERVAL
                while not await wait(waker, interval):
                    self.look_at_loop()
        except BaseException:  # the awaiting task has given up
            self.cancel()
            raise
        try:
            return self.result()
        finally:
            del self  # the traceback holds this frame

    def check_wait(self, timeout: float | None) -> None:
        """Note a wait without a time limit. Raise RuntimeError if the wait might never end."""
        call = self._call
        if timeout is None and call is not None and not self.done():
            call[1].check_wait()

    def look_at_loop(self) -> None:
        """End the call if its loop was closed."""
        call = self._call
        if call is not None and is_gone(self.loop):
            call[1].abort("the event loop that was to run this call was closed")


class TrioWaker:
    """Waker of a task on a trio loop, with the methods of a future of asyncio."""

    __slots__ = ("_event", "_token")

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self._event: trio.Event = sys.modules["trio"].Event()

    def get_loop(self) -> object:
        return self._token

    def done(self) -> bool:
        return self._event.is_set()

    def set_result(self, _: None, /) -> None:
        self._event.set()

    def __await__(self) -> Generator[Any, None, None]:
        return self._event.wait().__await__()


AsyncWaker = asyncio.Future[None] | TrioWaker
"""A waker that a coroutine awaits on its own loop. It is woken there, once."""

Waker = Lock | Future[Any] | AsyncWaker
"""Waker of one caller. It is woken when the request ends, and may be woken again."""


def async_waker(loop: object) -> AsyncWaker:
    """Return a waker for the current task on `loop`, the running event loop.

    Raises:
        RuntimeError: no event loop is running.
    """
    if isinstance(loop, asyncio.AbstractEventLoop):
        return loop.create_future()
    if loop is None:
        raise RuntimeError("this call must be awaited under a running event loop (asyncio or trio)")
    return TrioWaker(loop)  # type: ignore[arg-type]  # the only other kind of loop


async def wait(waker: AsyncWaker, seconds: float | None) -> bool:
    """Wait until `waker` is woken, for at most `seconds`. Return whether it was woken."""
    if seconds is None:
        await waker
    elif asyncio.isfuture(waker):
        await asyncio.wait([waker], timeout=seconds)
    else:
        with sys.modules["trio"].move_on_after(seconds):
            await waker
    return waker.done()


def wake_all(wakers: Iterable[Waker]) -> None:
    """Wake each of `wakers`, with one message per event loop.

    Wakers of the loop that runs this code are woken at once. Callbacks of futures come last, and
    may take long.
    """
    here: object = ...  # the loop that runs this code, once it is needed
    away: dict[object, list[AsyncWaker]] = {}
    futures: list[Future[Any]] = []
    waker: Any  # type checkers do not follow the tests
    for waker in wakers:
        if type(waker) is Future:
            futures.append(waker)
        elif hasattr(waker, "get_loop"):
            if here is ...:
                here = current_loop()
            if (loop := waker.get_loop()) is not here:
                away.setdefault(loop, []).append(waker)
            elif not waker.done():
                waker.set_result(None)
        else:  # a lock; its class differs where gevent or a test replaces it
            try:
                waker.release()
            except RuntimeError:  # already woken
                pass
    for loop, sleepers in away.items():
        try:
            post(loop, _wake_each, loop, sleepers)
        except RuntimeError:  # the loop is closed, and its tasks are gone
            pass
    if futures:
        with between_runs():
            for future in futures:
                future.wake()


def _wake_each(loop: object, wakers: Sequence[AsyncWaker]) -> None:
    """Wake `wakers` on their `loop`, which runs this code."""
    try:
        for waker in wakers:
            if not waker.done():
                waker.set_result(None)
    except BaseException:  # a signal handler raised: wake the rest if the loop goes on
        post(loop, _wake_each, loop, wakers)
        raise
