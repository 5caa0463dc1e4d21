"""`fn.map`: results in order, computed a bounded way ahead of the one that is asked for.

Items that were sent ahead wait for those before them. What `queue_timeout_ms` limits is the wait
for others, so the time of an item counts from when all before it are answered.
"""

from __future__ import annotations

import collections
import concurrent.futures
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
)
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

from .._core.scheduler import Request
from .._runtime.async_backend import current_loop
from .._runtime.runtime import Runtime
from .._runtime.settling import answer_of
from .._runtime.wakers import AsyncWaker, Future, async_waker, wait
from ..errors import BatcherClosed

T = TypeVar("T")

Submitted = tuple[Request, AsyncWaker, Runtime | None]
"""A call, what wakes who waits for it, and who runs it; None if nobody does, for it has failed
already.
"""


def mapped(
    submit: Callable[[T], Future[Any]],
    items: Iterable[T],
    room: int,
    deadline: float | None,
    return_exceptions: bool,
    may_expire: bool,
) -> Generator[Any, None, None]:
    """The results for `items`, of which at most `room` are submitted and not yet answered."""
    source = iter(items)
    ahead: collections.deque[Future[Any]] = collections.deque()
    # what the source raised; due after the results of what it gave before
    broken: Exception | None = None
    more = True
    try:
        while True:
            while more and len(ahead) < room:
                try:
                    item = next(source)
                except StopIteration:
                    more = False
                except Exception as error:
                    broken, more = error, False
                else:
                    ahead.append(_submitted(submit, item))
                    if may_expire:
                        ahead[-1].count_wait(False)
                    if ahead[0].done():
                        break
            if not ahead:
                break
            if may_expire:
                ahead[0].count_wait(True)
            try:
                failure = ahead[0].exception(_left(deadline))
            except concurrent.futures.CancelledError:
                failure = BatcherClosed("map: the batcher was shut down before this item ran")
            except concurrent.futures.TimeoutError:  # the builtin one only since Python 3.11
                raise _late() from None
            if failure is not None and not return_exceptions:
                raise failure
            future = ahead.popleft()
            yield future.result() if failure is None else failure
        if broken is not None:
            raise broken
    finally:
        while ahead:
            ahead.pop().cancel()
        failure = broken = None  # what is raised holds this frame


async def async_mapped(
    submit: Callable[[T], Submitted],
    items: Iterable[T] | AsyncIterable[T],
    room: int,
    deadline: float | None,
    return_exceptions: bool,
    may_expire: bool,
) -> AsyncGenerator[Any, None]:
    """As `mapped`, from a coroutine."""
    source = aiter(items) if isinstance(items, AsyncIterable) else _Asynchronous(items)
    ahead: collections.deque[Submitted] = collections.deque()
    broken: Exception | None = None
    more = True
    try:
        while True:
            while more and len(ahead) < room:
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    more = False
                except Exception as error:
                    broken, more = error, False
                else:
                    request, waker, runtime = _submitted_here(submit, item)
                    ahead.append((request, waker, runtime))
                    if may_expire and runtime is not None:
                        runtime.count_wait(request, False)
                    if ahead[0][1].done():
                        break
            if not ahead:
                break
            request, waker, runtime = ahead[0]
            if may_expire and runtime is not None:
                runtime.count_wait(request, True)
            noted = (
                None
                if runtime is None or deadline is not None or waker.done()
                else runtime.wait_for(request)
            )
            with noted or nullcontext():
                if not await wait(waker, _left(deadline)):
                    raise _late()
            ahead.popleft()
            try:
                result = answer_of(request)
            except Exception as error:
                if not return_exceptions:
                    raise
                result = error
            yield result
        if broken is not None:
            raise broken
    finally:
        for request, _, server in ahead:
            if server is not None:
                server.abandon(request)
        broken = None  # it holds this frame


def _submitted(submit: Callable[[T], Future[Any]], item: T) -> Future[Any]:
    """The answer for `item`, which is its error in its turn, if it cannot be taken for an item."""
    try:
        return submit(item)
    except BatcherClosed:
        raise
    except Exception as error:
        refused: Future[Any] = Future()
        refused.set_exception(error)
        return refused


def _submitted_here(submit: Callable[[T], Submitted], item: T) -> Submitted:
    """As `_submitted`, for a coroutine."""
    try:
        return submit(item)
    except BatcherClosed:
        raise
    except Exception as error:
        refused = Request(item, 1, None, waker=None)
        refused.error = error
        waker = async_waker(current_loop())
        waker.set_result(None)
        return refused, waker, None


class _Asynchronous(Generic[T]):
    """A plain iterable as an asynchronous iterator, with nothing to close."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)

    async def __anext__(self) -> T:
        try:
            return next(self._items)
        except StopIteration:
            raise StopAsyncIteration from None

    def __aiter__(self) -> AsyncIterator[T]:
        return self


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.perf_counter(), 0.0)


def _late() -> TimeoutError:
    return TimeoutError(
        "map: a result was not there within `timeout`, which is in seconds, for all results "
        "together, from the call of map on"
    )
