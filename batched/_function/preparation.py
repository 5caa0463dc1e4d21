"""Preparation of items: the callers' half of the work, before a call is queued.

A call of one item from a thread is prepared in that thread. Calls from event loops, list calls and
`map` are prepared in threads of the runtime, in the order of their arrival. A prepared call is
queued like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from .._collate.arguments import takes_instance
from .._core.scheduler import Request
from .._execution.exceptions import trim_traceback
from .._runtime.async_backend import current_loop, post
from .._runtime.call_queue import CallQueue
from .._runtime.event_loop import EventLoopRuntime
from .._runtime.settling import exception_for_caller
from .._runtime.thread import ThreadRuntime
from .._runtime.waits import is_running
from .._runtime.wakers import Future, wake_all
from ..errors import BatcherClosed
from .requests import MISSING, RequestParser, take_item


class Preparation:
    """Preparation of the items of one function."""

    threads = 0
    """Most threads that prepare; 0: each call is prepared where it is made."""

    def is_one(self, _: Any, /) -> bool:
        """Return whether a list that was passed is one item rather than several."""
        return False

    def split(
        self, _: str, __: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> tuple[Mapping[str, Any], tuple[Any, ...], dict[str, Any]]:
        """Return the settings of the preparation, and the arguments of the batch function.

        The arguments of this method: the name of the function, the item or `MISSING`, and all other
        arguments of the call.
        """
        return {}, args, kwargs

    def prepare(self, given: Any, settings: Mapping[str, Any], owner: object, /) -> Any:
        """Return the item for `given`. An exception reaches that caller alone."""
        raise NotImplementedError


class FunctionPreparation(Preparation):
    """Preparation by a function of one argument, or of an instance and one argument."""

    def __init__(self, prepare: Callable[..., Any], threads: int, *, of_features: bool) -> None:
        self._prepare = prepare
        self._binds = takes_instance(prepare)
        self._of_features = of_features
        self.threads = threads

    def is_one(self, _: Any, /) -> bool:
        return self._of_features  # a list may become the rows of one call

    def prepare(self, given: Any, _: Mapping[str, Any], owner: object, /) -> Any:
        return self._prepare(owner, given) if self._binds else self._prepare(given)


@dataclass(slots=True, eq=False)
class Unprepared:
    """Call that is not prepared yet, in the place of its items."""

    items: list[Any]  # as the caller passed them; each is replaced by the prepared item
    settings: Mapping[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parser: PreparedParser
    left: int  # items that are not prepared yet

    def prepare(self, position: int, owner: object) -> None:
        """Prepare the item at `position`."""
        prepare = self.parser.preparation.prepare
        self.items[position] = prepare(self.items[position], self.settings, owner)

    def prepare_here(self, request: Request) -> None:
        """Prepare all items in this thread, and make of `request` the prepared call."""
        for position in range(request.size):
            self.prepare(position, request.owner)
        self.complete(request)

    def complete(self, request: Request) -> None:
        """Make of `request` the call of the prepared items."""
        parsed = self.parser.parser.parse(
            self.items if request.listed else self.items[0],
            self.args,
            self.kwargs,
            request.owner,
            request.waker,
            not request.listed,
        )
        for name in ("items", "size", "group_key", "lengths", "order"):
            setattr(request, name, getattr(parsed, name))


class PreparedParser:
    """Parser of calls with prepared items. `parser` gets these items."""

    def __init__(
        self, name: str, parser: RequestParser, preparation: Preparation, *, defers: bool
    ) -> None:
        self.parser = parser
        self.preparation = preparation
        self._name = name  # of the batch function, for error messages
        self._defers = defers  # whether a `PreparingRuntime` prepares the calls

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
        """Return a call, prepared in this thread unless a runtime prepares it.

        Raises:
            TypeError: there is no item, or the preparation does not take the arguments.
            Exception: an exception of the preparation, or of the parser.
        """
        settings, args, kwargs = self.preparation.split(self._name, item, args, kwargs)
        if item is MISSING:
            item = take_item(self._name, self.parser.binder, kwargs)
        listed = (
            not single and isinstance(item, list) and not (item and self.preparation.is_one(item))
        )
        items = list(item) if listed else [item]
        call = Unprepared(items, settings, args, kwargs, self, left=len(items))
        request = Request(call, len(items), None, waker, listed, owner)
        if items and not self._defers:
            call.prepare_here(request)
        return request


class PreparingRuntime(CallQueue):
    """Runtime with threads that prepare calls before they enter its queue."""

    def __init__(self, preparation: Preparation, *arguments: Any) -> None:
        self._preparation = preparation
        self._closing = False  # whether calls are refused; calls in preparation run nevertheless
        super().__init__(*arguments)

    def _renew_lock(self) -> None:
        super()._renew_lock()
        # held while a call is passed on, so that it can end before or after that only; reentrant,
        # because a finalizer may call this runtime anywhere
        self._passing = threading.RLock()
        # calls in preparation, with whether their time in the queue will count
        self._calls: dict[Request, bool] = {}
        self._renew_preparers()

    def _renew_preparers(self) -> None:
        # the threads of an executor end with the executor, once they have done their work
        self._preparers = ThreadPoolExecutor(
            self._preparation.threads, thread_name_prefix=f"batched-{self.name}-prepare"
        )

    def submit(self, request: Request, *, from_event_loop: bool) -> bool:
        """Accept `request` as a runtime does. The caller of one item in a thread prepares it.

        Raises:
            Exception: an exception of that preparation, or of the runtime.
        """
        call = request.items
        if not isinstance(call, Unprepared):
            return super().submit(request, from_event_loop=from_event_loop)
        waits = not isinstance(request.waker, Future)
        if self._closing and not (self.exiting and is_running() and waits):
            self.recorder.count("rejected")
            raise BatcherClosed(
                f"{self.name} was shut down; `with {self.name}:`, or `async with`, opens it again"
            )
        if self.exiting or not (from_event_loop or request.listed):
            call.prepare_here(request)
            return super().submit(request, from_event_loop=from_event_loop)
        self._calls[request] = True
        loop = current_loop() if isinstance(self, EventLoopRuntime) else None
        share = max(1, request.size // (4 * self._preparation.threads))
        for first in range(0, request.size, share):
            positions = range(first, min(first + share, request.size))
            # a copy for each share: a context runs in one thread at a time
            run = copy_context().run
            self._preparers.submit(run, self._prepare, request, call, positions, loop)
        return True

    def _prepare(self, request: Request, call: Unprepared, positions: range, loop: object) -> None:
        """Prepare some items of a call. Pass the call on, on its `loop`, with the last of them."""
        try:
            for position in positions:
                if request not in self._calls:  # it was cancelled, or another item failed
                    return
                call.prepare(position, request.owner)
            with self._passing:
                call.left -= len(positions)
                if call.left:
                    return
            call.complete(request)
            if loop is None:
                self._pass_on(request, loop)
            else:
                post(loop, self._pass_on, request, loop)
        except BaseException as error:
            self._end(request, exception_for_caller(self.name, trim_traceback(error)))

    def _pass_on(self, request: Request, loop: object) -> None:
        """Queue a call that is prepared, unless it was cancelled."""
        try:
            with self._passing:
                counts = self._calls.get(request)
                if counts is None:
                    return
                super().submit(request, from_event_loop=loop is not None)
                if not counts:
                    super().count_wait(request, False)
                self._remove(request)
        except BaseException as error:
            self._end(request, error)

    def _end(self, request: Request, error: BaseException) -> None:
        """End a call with `error` if it is in preparation."""
        with self._passing:  # else a call that is being passed on could end twice
            if not self._remove(request):
                return
            waker, request.waker, request.error = request.waker, None, error
        wake_all([waker])

    def _remove(self, request: Request) -> bool:
        """Remove a call from the calls in preparation. Return False if it is none of them.

        The last of these calls closes the queue of a runtime that is closing.
        """
        if self._calls.pop(request, None) is None:
            return False
        if self._closing and not self._calls:
            super().close(False)
        return True

    def cancel(self, request: Request, even_begun: bool = False) -> bool:
        if self._postpone(self.cancel, request, even_begun):
            return False
        with self._passing:
            self._remove(request)
        return super().cancel(request, even_begun)

    def count_wait(self, request: Request, counts: bool) -> None:
        if self._postpone(self.count_wait, request, counts):
            return
        with self._passing:
            if request in self._calls:
                self._calls[request] = counts
        super().count_wait(request, counts)

    def pending(self, *, running_only: bool) -> bool:
        return (bool(self._calls) and not running_only) or super().pending(
            running_only=running_only
        )

    def close(self, cancel: bool) -> None:
        """Refuse further calls. Calls in preparation run, or end now with `cancel`."""
        if self._postpone(self.close, cancel):
            return
        self._closing = True
        calls = list(self._calls)
        if cancel:
            for request in calls:
                lost = BatcherClosed(f"{self.name} was shut down before this call ran")
                ends = CancelledError() if isinstance(request.waker, Future) else lost
                self._end(request, ends)
        if cancel or not calls:
            super().close(cancel)

    def open(self) -> None:
        self._closing = False
        super().open()

    def _drained(self) -> bool:
        return super()._drained() and not (self._closing and self._calls)

    def abort(self, why: str, *, forked: bool = False) -> None:
        calls = list(self._calls)
        self._calls.clear()
        for request in calls:
            request.error = BatcherClosed(f"{self.name}: {why}")
        self._wakeups.add(self, calls)
        self._wakeups.leave(self)  # the abort wakes the callers that were left
        super().abort(why, forked=forked)


class PreparingThreadRuntime(PreparingRuntime, ThreadRuntime):
    """Thread runtime of prepared calls."""

    def rest(self) -> None:
        super().rest()
        self._renew_preparers()


class PreparingEventLoopRuntime(PreparingRuntime, EventLoopRuntime):
    """Runtime of an event loop, for prepared calls."""
