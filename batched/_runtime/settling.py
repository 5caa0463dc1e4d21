"""Settling of requests: the outcomes of a batch become results, and exceptions for callers."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from .._core.exceptions import SharedError, copy_exception, trim_traceback
from .._core.scheduler import Request, Scheduler
from .._execution.attempts import Outcomes
from ..errors import BatchFunctionError

Join = Callable[[Request, list[Any]], Any]
"""The result of a request that came in parts, of these parts in order."""


_POSITION = itemgetter(0)


def settle(scheduler: Scheduler, outcomes: Outcomes) -> list[Request]:
    """Adds outcomes to their requests, and returns those that have ended; under the lock.

    A request that came in parts has no result yet, and one that failed the error of the function:
    see `complete`.
    """
    ended: list[Request] = []
    slices, results, _ = outcomes
    for (request, start, stop), result in zip(slices, results, strict=True):
        if request.waker is None or request.error is not None:
            continue  # its caller has gone, or another part of it failed
        if issubclass(type(result), BaseException):  # its `__class__` may be code of the user's
            request.error = result
            scheduler.cancel(request)
        elif stop - start == request.size:
            request.answered = request.size
            request.result = result
        else:
            if request.parts is None:
                request.parts = []
            request.parts.append((start, result))
            request.answered += stop - start
            if request.answered < request.size:
                continue
        ended.append(request)
    return ended


def complete(ended: list[Request], join: Join, name: str) -> int:
    """Joins the parts of requests that have ended, makes an exception for each caller whose call
    failed, and returns how many did; without a lock. `name` is the batch function's.
    """
    failed: list[Request] = []
    for request in ended:
        if request.parts is not None and request.error is None:
            try:
                request.parts.sort(key=_POSITION)
                request.result = join(request, [part for _, part in request.parts])
            except BaseException as raised:
                request.error = trim_traceback(raised)
        if request.error is not None:
            failed.append(request)
    if failed:
        for request in failed:
            assert request.error is not None
            request.error = exception_for_caller(name, request.error)
    return len(failed)


# Raised into a caller these would pass for a cancellation or for the end of an iteration; so would,
# or worse, an error that is no Exception.
_MISLEADING = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)


def exception_for_caller(name: str, error: BaseException) -> BaseException:
    """The exception for one caller of the batch function `name`: one that nothing tells from
    `error`, or a `SharedError`. Whoever is alone gets one of its own, too: the function may keep
    `error`, and raise or return it again.

    Where raising its type would mean something else to callers, they get a `BatchFunctionError`
    caused by it.
    """
    # what a coroutine makes of it
    if type(error) is RuntimeError and issubclass(type(error.__cause__), StopIteration):
        error = error.__cause__  # type: ignore[assignment]  # by the line above
    if issubclass(type(error), _MISLEADING) or not issubclass(type(error), Exception):
        wrapped = BatchFunctionError(f"{name} raised {_describe(error)}")
        wrapped.__cause__ = copy_exception(error)
        return wrapped
    twin = copy_exception(error)
    return twin if twin is not error else SharedError(error)


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # of its class
        return object.__repr__(error)
