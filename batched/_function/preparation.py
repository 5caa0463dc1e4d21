"""Preparation of items: the callers' half of the work, before a call is queued.

A call of one item from a thread is prepared in that thread. Calls from event loops, list calls and
`map` are prepared in threads of the batcher, in the order of their arrival. A prepared call is
parsed and queued like any other.
"""

from __future__ import annotations

import contextvars
import inspect
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

from .._core.scheduler import Request
from .._execution.exceptions import trim_traceback
from .._runtime.async_backend import current_loop, post
from .._runtime.event_loop import EventLoopRuntime, EventLoops
from .._runtime.settling import exception_for_caller
from .._runtime.thread import ThreadRuntime
from .._runtime.wakers import Future, Waker, async_waker, blocking_waker, wake_all
from ..errors import BatcherClosed
from .requests import MISSING, RequestParser, take_item


class Preparation(ABC):
    """Preparation of the items of one function."""

    threads = 0
    """Most threads that prepare; 0: each call is prepared where it is made."""

    @abstractmethod
    def is_one(self, given: Any, /) -> bool:
        """Return whether the list `given` is one item rather than several."""

    @abstractmethod
    def split(
        self, name: str, item: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> tuple[Mapping[str, Any], tuple[Any, ...], dict[str, Any]]:
        """Return the settings of the preparation, and the arguments of the batch function."""

    @abstractmethod
    def prepare(self, given: Any, settings: Mapping[str, Any], owner: object, /) -> Any:
        """Return the item for `given`. An exception reaches that caller alone."""

    def abandon(self, item: Any, /) -> None:  # noqa: B027 -- few items can stop
        """Note that no caller waits for `item`, which has begun to run."""


class FunctionPreparation(Preparation):
    """Preparation by a function of one argument, or of an instance and one argument."""

    def __init__(self, prepare: Callable[..., Any], threads: int, *, of_features: bool) -> None:
        self._prepare = prepare
        self._binds = takes_instance(prepare)
        self._of_features = of_features
        self.threads = threads

    def is_one(self, _: Any, /) -> bool:
        return self._of_features  # a list may become the rows of one call

    def split(
        self, _: str, __: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> tuple[Mapping[str, Any], tuple[Any, ...], dict[str, Any]]:
        return {}, args, kwargs

    def prepare(self, given: Any, _: Mapping[str, Any], owner: object, /) -> Any:
        return self._prepare(owner, given) if self._binds else self._prepare(given)


def takes_instance(prepare: Callable[..., Any]) -> bool:
    """Return whether `prepare` takes an instance before its argument."""
    try:
        first, *more = inspect.signature(prepare).parameters
    except (TypeError, ValueError):  # builtins need not have a signature
        return False
    return bool(more) and first in ("self", "cls")


class _Unprepared:
    """Arguments of a call that is not prepared yet."""

    __slots__ = ("args", "given", "kwargs", "owner", "settings")

    def __init__(self, given: Any, owner: object, *arguments: Any) -> None:
        self.given = given  # one item, or a list of them
        self.owner = owner
        self.settings, self.args, self.kwargs = arguments


class PreparedParser:
    """Parser of calls that are prepared: `parser` gets the prepared items."""

    def __init__(self, name: str, parser: RequestParser, preparation: Preparation) -> None:
        self.preparation = preparation
        self._name = name  # of the batch function, for error messages
        self._parser = parser

    def parse(
        self,
        item: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        owner: object,
        waker: Any,
        single: bool,
        /,
    ) -> Request:
        """Prepare a call in this thread, and return it.

        Raises:
            Exception: an exception of the preparation, or of the parser.
        """
        request = self.defer(item, args, kwargs, owner, waker, single)
        if request.size:
            self.complete(request, [self.prepare(request, each) for each in range(request.size)])
        return request

    def defer(
        self,
        item: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        owner: object,
        waker: Any,
        single: bool,
        /,
    ) -> Request:
        """Return a call, to be prepared.

        Raises:
            TypeError: there is no item, or the preparation does not take the arguments.
        """
        preparation = self.preparation
        settings, args, kwargs = preparation.split(self._name, item, args, kwargs)
        if item is MISSING:
            item = take_item(self._name, self._parser.binder, kwargs)
        listed = not single and isinstance(item, list) and not (item and preparation.is_one(item))
        call = _Unprepared(list(item) if listed else item, owner, settings, args, kwargs)
        return Request(call, len(item) if listed else 1, None, waker, listed, owner)

    def prepare(self, request: Request, position: int) -> Any:
        """Return the prepared item at `position` of a call."""
        call: _Unprepared = request.items
        given = call.given[position] if request.listed else call.given
        return self.preparation.prepare(given, call.settings, call.owner)

    def complete(self, request: Request, prepared: list[Any]) -> None:
        """Make of `request` the call of the prepared items."""
        call: _Unprepared = request.items
        parsed = self._parser.parse(
            prepared if request.listed else prepared[0],
            call.args,
            call.kwargs,
            call.owner,
            request.waker,
            not request.listed,
        )
        for name in ("items", "size", "group_key", "lengths", "order"):
            setattr(request, name, getattr(parsed, name))


class _Preparing:
    """A call whose items are being prepared in threads."""

    __slots__ = ("counts", "items", "left", "loop", "request", "runtime")

    def __init__(self, request: Request, runtime: Any, loop: object) -> None:
        self.request = request
        self.runtime = runtime  # gets the call
        self.loop = loop  # on which the runtime takes calls; None: on any thread
        self.items: list[Any] = [None] * request.size
        self.left = request.size  # items that are not prepared yet
        self.counts = True  # whether `queue_timeout_ms` counts from the arrival in the queue


class PreparingRuntime:
    """Threads that prepare calls before `runtime` gets them."""

    def __init__(
        self, runtime: ThreadRuntime | EventLoops, parser: PreparedParser, name: str
    ) -> None:
        self._runtime = runtime
        self._parser = parser
        self._name = name  # name of the batch function
        self._closed = False
        self.parse = parser.defer
        self._reset()
        _alive.add(self)

    def _reset(self) -> None:
        # guards the state below; reentrant, because a finalizer may call this runtime anywhere
        self._lock = threading.RLock()
        self._calls: dict[Request, _Preparing] = {}  # calls that are being prepared
        self._idle: list[Waker] = []  # wakers to wake once no call is being prepared
        self._threads = ThreadPoolExecutor(
            self._parser.preparation.threads, thread_name_prefix=f"batched-{self._name}-prepare"
        )

    def here(self, loop: object) -> _Caller:
        """Return the runtime for a caller on `loop`."""
        return _Caller(self, self._runtime.here(loop), loop)

    def load(self) -> tuple[int, int, int]:
        """Return the load of the queue, which has no calls that are being prepared."""
        return self._runtime.load()

    def open(self) -> None:
        """Accept calls again."""
        self._closed = False
        self._runtime.open()

    def shutdown(self, *, wait: bool, cancel: bool) -> None:
        """Close the runtime, after it has got the calls that are being prepared."""
        here = current_loop()
        if (
            wait
            and not cancel
            and here is not None
            and any(call.loop is here for call in list(self._calls.values()))
        ):
            raise RuntimeError(
                "waiting here would block the event loop that has to finish the calls of "
                f"{self._name}; use `await aclose()`, `async with`, or shutdown(wait=False)"
            )
        idle = blocking_waker()
        if self._close(idle, cancel) and wait:
            idle.acquire()
        if wait or not self._calls:  # else the last of the calls closes the runtime
            self._runtime.shutdown(wait=wait, cancel=cancel)

    async def aclose(self, *, cancel: bool) -> None:
        """Close the runtime, after it has got the calls that are being prepared."""
        idle = async_waker(current_loop())
        if self._close(idle, cancel):
            await idle
        await self._runtime.aclose(cancel=cancel)

    def _close(self, idle: Waker, cancel: bool) -> bool:
        """Refuse calls, and end the calls that are being prepared if `cancel`.

        Return whether `idle` will be woken, once no call is being prepared.
        """
        with self._lock:
            self._closed = True
            waits = bool(self._calls) and not cancel
            if waits:
                self._idle.append(idle)
            ended = list(self._calls) if cancel else []
        for request in ended:
            lost = BatcherClosed(f"{self._name} was shut down before this call ran")
            self.withdraw(request, CancelledError() if isinstance(request.waker, Future) else lost)
        return waits

    def prepare(self, request: Request, runtime: Any, loop: object) -> None:
        """Prepare `request` in threads, and pass it to `runtime`."""
        call = _Preparing(request, runtime, loop)
        with self._lock:
            self._check_open()
            self._calls[request] = call
        share = max(1, request.size // (4 * self._parser.preparation.threads))
        for first in range(0, request.size, share):
            positions = range(first, min(first + share, request.size))
            # of its own: a context runs in one thread at a time
            context = contextvars.copy_context()
            self._threads.submit(context.run, self._prepare, call, positions)

    def complete(self, request: Request) -> None:
        """Prepare a call of one item in this thread."""
        self._check_open()
        self._parser.complete(request, [self._parser.prepare(request, 0)])

    def _check_open(self) -> None:
        if self._closed:
            raise BatcherClosed(
                f"{self._name} was shut down; `with {self._name}:`, or `async with`, opens it again"
            )

    def _prepare(self, call: _Preparing, positions: range) -> None:
        request = call.request
        try:
            for position in positions:
                if request not in self._calls:  # it was withdrawn, or another item failed
                    return
                call.items[position] = self._parser.prepare(request, position)
            with self._lock:
                call.left -= len(positions)
                if call.left or request not in self._calls:
                    return
            self._parser.complete(request, call.items)
            if call.loop is None:
                self._pass_on(call)
            else:
                post(call.loop, self._pass_on, call)
        except BaseException as error:
            self.withdraw(request, exception_for_caller(self._name, trim_traceback(error)))

    def _pass_on(self, call: _Preparing) -> None:
        """Pass a prepared call to its runtime, unless its caller has gone."""
        request = call.request
        try:
            with self._lock:  # else `cancel` could come between the two
                if request not in self._calls:
                    return
                call.runtime.submit(request, from_event_loop=call.loop is not None)
                if not call.counts:
                    call.runtime.count_wait(request, False)
                idle = self._remove(request)
        except BaseException as error:
            self.withdraw(request, error)
        else:
            wake_all(idle)

    def withdraw(self, request: Request, error: BaseException | None) -> bool:
        """End a call that is being prepared. Return False if it was passed on, or has ended.

        With an error of None no caller is left to be answered.
        """
        with self._lock:
            if request not in self._calls:
                return False
            idle = self._remove(request)
            waker, request.waker, request.error = request.waker, None, error
        wake_all(idle if error is None else [*idle, waker])
        return True

    def count_wait(self, request: Request, counts: bool) -> bool:
        """Note whether the time of a call counts. Return False if it is not being prepared."""
        with self._lock:
            call = self._calls.get(request)
            if call is not None:
                call.counts = counts
        return call is not None

    def abandon(self, request: Request) -> bool:
        """Drop a call that is being prepared, as `withdraw` does."""
        items = request.items
        if request.dispatched and not isinstance(items, _Unprepared):
            for item in items if request.listed else [items]:
                self._parser.preparation.abandon(item)
        return self.withdraw(request, None)

    def _remove(self, request: Request) -> list[Waker]:
        """Forget `request`, under the lock. Return the wakers to wake, as no other call is left."""
        del self._calls[request]
        if self._calls:
            return []
        if self._closed and not self._idle:
            self._runtime.shutdown(wait=False, cancel=False)
        idle, self._idle = self._idle, []
        return idle

    def after_fork(self) -> None:
        """End the calls that are being prepared, in a forked process, which has no threads."""
        calls = self._calls
        self._reset()
        for request in calls:
            if isinstance(request.waker, Future):
                request.waker.renew_lock()
            waker, request.waker = request.waker, None
            request.error = BatcherClosed(
                f"{self._name}: the process was forked; calls made before run in the parent only"
            )
            wake_all([waker])


class _Caller:
    """Runtime of one caller: threads for preparation, then `runtime`."""

    __slots__ = ("_loop", "_preparing", "_runtime")

    def __init__(self, preparing: PreparingRuntime, runtime: Any, loop: object) -> None:
        self._preparing = preparing
        self._runtime = runtime
        self._loop = loop

    def submit(self, request: Request, *, from_event_loop: bool) -> bool:
        """Accept `request`, as the runtime does.

        With `from_event_loop` the call does not wait for its preparation.

        Raises:
            Exception: an exception of the preparation in this thread, or of the runtime.
        """
        if not from_event_loop and not request.listed:
            self._preparing.complete(request)
            queued: bool = self._runtime.submit(request, from_event_loop=False)
            return queued
        own = isinstance(self._runtime, EventLoopRuntime)
        self._preparing.prepare(request, self._runtime, self._loop if own else None)
        return True

    def cancel(self, request: Request) -> bool:
        """Remove a request, so that it is never computed. Return False if it is too late."""
        return self._preparing.withdraw(request, CancelledError()) or self._runtime.cancel(request)

    def abandon(self, request: Request) -> None:
        """Drop a request that no caller waits for any more."""
        if not self._preparing.abandon(request):
            self._runtime.abandon(request)

    def count_wait(self, request: Request, counts: bool) -> None:
        """Count the time that `request` waits, as the runtime does."""
        if not self._preparing.count_wait(request, counts):
            self._runtime.count_wait(request, counts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


_alive: WeakSet[PreparingRuntime] = WeakSet()


def _after_fork() -> None:
    for runtime in list(_alive):
        runtime.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
