"""Settling of requests: outcomes of a batch become results, or exceptions for callers."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NoReturn

from .._core.scheduler import Request, Scheduler
from .._execution.attempts import Outcomes
from .._execution.exceptions import SharedError, copy_exception, trim_traceback
from ..errors import BatchFunctionError

Wakers = dict[Request, Any]
"""Wakers of requests that end now."""

Part = tuple[Request, int, list[Any]]
"""Items with outcomes of their own that have ended: see `Request.on_part`."""


Settled = tuple[list[Request], list[Request], list[Part]]
"""The requests that end with a batch; those among them that `complete` must see; and parts.

One of the second kind that has several parts has no result yet. A failed one has the error of the
function, not a copy for its caller.
"""


def settle(scheduler: Scheduler, outcomes: Outcomes) -> Settled:
    """Add outcomes to their requests, under the lock."""
    settled: Settled = [], [], []
    ended, open_ended, parts = settled
    # collators return one result for each slice
    for (request, start, stop), result in zip(*outcomes[:2]):  # noqa: B905  each batch pays for it
        if request.waker is None or request.error is not None:
            continue  # its caller has gone, or another part of it failed
        whole = stop - start == request.size
        failed = issubclass(type(result), BaseException)  # `__class__` may be user code
        request.answered += stop - start
        if whole and not failed and request.on_part is None:  # the usual case
            request.result = result
            ended.append(request)
            continue
        if request.on_part is not None:
            each = result if request.listed and not failed else [result] * (stop - start)
            parts.append((request, start, each))
        elif failed:
            request.error = result
            scheduler.cancel(request)
        else:
            request.parts = request.parts or []
            request.parts.append((start, result))
        if request.answered == request.size or request.error is not None:
            ended.append(request)
            open_ended.append(request)
    return settled


def take_wakers(ended: Iterable[Request], wakers: Wakers) -> None:
    """Move the wakers of requests to `wakers`, under the lock.

    No other thread can end these requests from now on.
    """
    for request in ended:
        wakers[request] = request.waker
        request.waker = None


def complete(open_ended: list[Request], join: Callable[..., Any], name: str) -> int:
    """Join the parts of requests, and create an exception for the caller of each failed call.

    Return the number of failed calls. `join` makes the result of a request from its parts, in
    order. `name` is the name of the batch function. No lock is needed.
    """
    failed = 0
    for request in open_ended:
        if request.parts is not None and request.error is None:
            try:
                request.parts.sort(key=itemgetter(0))
                request.result = join(request, [part for _, part in request.parts])
            except BaseException as raised:
                request.error = trim_traceback(raised)
        if request.error is not None:
            request.error = exception_for_caller(name, request.error)
            failed += 1
    return failed


# Callers would mistake these for a cancellation or for the end of an iteration. An error that is
# not an `Exception` might end the caller's program.
_MISLEADING = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)


def exception_for_caller(name: str, error: BaseException) -> BaseException:
    """Return the exception for one caller of the batch function `name`.

    The exception is a copy of `error` or, if `error` cannot be copied, a `SharedError`. A lone
    caller gets a copy, too: the function may keep `error`, and raise or return it again. If callers
    would mistake the type of `error`, they get a `BatchFunctionError` caused by a copy.
    """
    twin = copy_exception(error)
    if issubclass(type(error), _MISLEADING) or not issubclass(type(error), Exception):
        wrapped = BatchFunctionError(f"{name} raised {_describe(error)}")
        wrapped.__cause__ = twin
        return wrapped
    return SharedError(error) if twin is error else twin


def raise_error(request: Request) -> NoReturn:
    """Raise the error of `request`. Called once, by the caller who was woken."""
    error, request.error = request.error, None
    assert error is not None
    try:
        raise error if type(error) is not SharedError else error.restored()
    finally:
        del error  # the traceback of `error` holds this frame


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # raised by the class of `error`
        return object.__repr__(error)
