"""`dedupe`: equal items that wait or run are computed once, for all of their callers.

1. A call is divided into its items. Each item is shared with the calls that have an equal item and
   equal further arguments. The first of them queues the item, as a request of its own.
2. When the item has ended, each caller gets the result or the error: the first caller the object
   itself, each further caller a copy (`copy.deepcopy`).
3. An item leaves the queue once all of its callers have given up.
4. A call from within a run shares nothing: it might wait for an item of its own run.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError
from copy import deepcopy
from dataclasses import replace
from typing import Any

from .._core.scheduler import Request
from .._execution.exceptions import SharedError, trim_traceback
from .._runtime.call_queue import CallQueue
from .._runtime.settling import exception_for_caller
from .._runtime.waits import current_worker
from .._runtime.wakers import Future, wake_all
from .preparation import Unprepared


class _Member:
    """One call, and the shared items that it waits for."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.shares: list[_Share] = []
        self.results: list[Any] = [None] * request.size
        self.left = request.size  # items without a result


class _Share:
    """One item, and the places that it has in calls. It is the waker of its own request."""

    calls_back = True  # a caller's waker may

    def __init__(self, runtime: DedupingRuntime, key: Hashable, request: Request) -> None:
        self.runtime, self.key, self.request = runtime, key, request
        self.places: list[tuple[_Member, int]] = []

    def release(self) -> None:
        """Answer the callers: the item has ended. May be called again after an interruption."""
        runtime = self.runtime
        with runtime.sharing:
            if runtime.shares.get(self.key) is self:
                del runtime.shares[self.key]
        is_first = True
        while True:
            with runtime.sharing:
                if not self.places:
                    return
                member, place = self.places[0]
            runtime.settle(member, place, *self._outcome(is_first))
            is_first = False
            with runtime.sharing:  # only now: an exception may interrupt
                self.places = [each for each in self.places if each != (member, place)]

    def _outcome(self, is_first: bool) -> tuple[Any, BaseException | None]:
        """Return the result, and the error, for the next caller."""
        error = self.request.error
        if is_first:
            return self._result(), error
        if error is not None:
            if type(error) is not SharedError:
                error = exception_for_caller(self.runtime.name, error)
            return None, error
        try:
            return deepcopy(self._result()), None
        except BaseException as raised:
            return None, exception_for_caller(self.runtime.name, trim_traceback(raised))

    def _result(self) -> Any:
        result = self.request.result
        return result[0] if self.request.listed and result is not None else result


class DedupingRuntime(CallQueue):
    """Runtime that shares equal items between calls."""

    def __init__(self, key: Callable[[Any], Hashable], *arguments: Any) -> None:
        self._key = key
        self.shares: dict[Hashable, _Share] = {}  # items that wait or run
        self._members: dict[Request, _Member] = {}  # calls that wait
        super().__init__(*arguments)

    def _renew_lock(self) -> None:
        super()._renew_lock()
        # guards `shares` and `_members`, and is taken before the lock of the queue
        self.sharing = threading.RLock()

    def submit(self, request: Request, *, from_event_loop: bool) -> bool:
        """Accept `request` as a runtime does.

        No thread blocks while the queue is full: the call waits in line.

        Raises:
            TypeError: the key of an item, or a further argument, has no hash.
            Exception: an exception of the key function, or of the runtime.
        """
        if current_worker() is not None or self._is_busy():
            return super().submit(request, from_event_loop=from_event_loop)
        call = request.items
        items = call.items if isinstance(call, Unprepared) else call
        items = items if request.listed or isinstance(call, Unprepared) else [items]
        further: Any = request.group_key
        if isinstance(call, Unprepared):
            further = call.args, tuple(sorted(call.kwargs.items()))
        keys = [(self._key(item), further, id(request.owner)) for item in items]
        for item, key in zip(items, keys, strict=True):
            try:
                hash(key)
            except TypeError:
                raise TypeError(
                    f"{self.name} cannot compare {item!r:.80} with other items, because its key "
                    "or a further argument has no hash; let dedupe be a function that returns a "
                    "key with a hash, as a text or a tuple"
                ) from None
        member = _Member(request)
        with self.sharing:
            self._members[request] = member
            try:
                for place, key in enumerate(keys):
                    is_new = key not in self.shares
                    if is_new:
                        share = self.shares[key] = _Share(self, key, _one_of(request, place))
                        share.request.waker = share
                    share = self.shares[key]
                    share.places.append((member, place))
                    member.shares.append(share)
                    if is_new:  # last: the item may end within the call
                        super().submit(share.request, from_event_loop=from_event_loop)
                    if request not in self._members:
                        break  # the item has ended with an error
            except BaseException:
                self._drop(member)
                raise
        return True

    def settle(self, member: _Member, place: int, result: Any, error: BaseException | None) -> None:
        """Give a call the outcome of the item at `place`, and wake its caller with the last one."""
        request = member.request
        with self.sharing:
            if request not in self._members:  # it was cancelled, or another item failed
                return
            member.results[place] = result
            member.left -= 1
            if member.left and error is None:
                return
            self._drop(member)
            waker, request.waker = request.waker, None
            request.error = error
            request.result = _joined(request, member.results)
        wake_all([waker])

    def _drop(self, member: _Member) -> None:
        """Remove a call; its items leave the queue unless other calls wait for them."""
        self._members.pop(member.request, None)
        for share in member.shares:
            share.places = [place for place in share.places if place[0] is not member]
            if not share.places and self.shares.get(share.key) is share:
                del self.shares[share.key]
                super().cancel(share.request, True)

    def cancel(self, request: Request, even_begun: bool = False) -> bool:
        if self._is_busy():
            self._call_soon(functools.partial(self.cancel, request, even_begun))
            return False
        waker: Any = None
        with self.sharing:
            if (member := self._members.get(request)) is not None:
                if not even_begun and any(share.request.dispatched for share in member.shares):
                    return False
                self._drop(member)
                request.error = CancelledError()
                waker, request.waker = request.waker, None
        if member is None:
            return super().cancel(request, even_begun)
        wake_all([waker])
        return True

    def count_wait(self, request: Request, counts: bool) -> None:
        member = self._members.get(request)
        for each in [request] if member is None else [share.request for share in member.shares]:
            super().count_wait(each, counts)

    def abort(self, why: str, *, forked: bool = False) -> None:
        if forked:  # a thread of the parent may hold the locks of futures
            for request in list(self._members):
                if isinstance(request.waker, Future):
                    request.waker.renew_lock()
        super().abort(why, forked=forked)

    def _is_busy(self) -> bool:
        """Return whether this code interrupts the sharing: it is a finalizer or signal handler."""
        return bool(self.sharing._is_owned())  # type: ignore[attr-defined]  # of every RLock


def _one_of(request: Request, place: int) -> Request:
    """Return a request for one item of a call."""
    call = request.items
    if isinstance(call, Unprepared):
        call = replace(call, items=[call.items[place]], left=1)
        # as a list: it is prepared by a thread, so that no caller waits for another one here
        return Request(call, 1, None, None, True, request.owner)
    item = call[place] if request.listed else call
    lengths = None if request.lengths is None else [request.lengths[place]]
    return Request(item, 1, request.group_key, None, False, request.owner, lengths)


def _joined(request: Request, results: list[Any]) -> Any:
    """Return the result of a call, in the order of its caller."""
    if not request.listed:
        return results[0]
    if request.order is None:
        return results
    joined = [None] * len(results)
    for place, result in zip(request.order, results, strict=True):
        joined[place] = result
    return joined


@functools.cache
def deduping(kind: type[CallQueue]) -> Any:
    """Return the class of runtimes of a kind that share equal items."""
    return type(f"Deduping{kind.__name__}", (DedupingRuntime, kind), {})


def item_itself(item: Any) -> Hashable:
    """Return the key of an item for `dedupe=True`: 1, 1.0 and True are different items."""
    return type(item), item
