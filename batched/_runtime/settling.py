"""Settling of requests: the outcomes of a batch become results, and exceptions for callers."""

from __future__ import annotations

import concurrent.futures
import copy
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

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
                request.error = raised
        if request.error is not None:
            failed.append(request)
    if failed:
        sharers = Counter([id(request.error) for request in failed])
        for request in failed:
            assert request.error is not None
            alone = sharers[id(request.error)] == 1
            request.error = exception_for_caller(name, request.error, alone=alone)
    return len(failed)


# Raised into a caller these would pass for a cancellation or for the end of an iteration; so would,
# or worse, an error that is no Exception.
_MISLEADING = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)

_OF_THE_RAISING = {
    "__cause__",
    "__context__",
    "__dict__",
    "__suppress_context__",
    "__traceback__",
    "__weakref__",
}


def exception_for_caller(name: str, error: BaseException, *, alone: bool) -> BaseException:
    """The exception for one caller of the batch function `name`: `error` itself if it is `alone`,
    else a copy caused by it.

    Callers share `error` where no copy would be faithful, and get a `BatchFunctionError` caused by
    it where raising its type would mean something else to them.
    """
    # what a coroutine makes of it
    if type(error) is RuntimeError and isinstance(error.__cause__, StopIteration):
        error = error.__cause__
    if isinstance(error, _MISLEADING) or not isinstance(error, Exception):
        wrapped = BatchFunctionError(f"{name} raised {_describe(error)}")
        wrapped.__cause__ = error
        return wrapped
    if alone:
        return error
    twin = _copy(error)
    if twin is None:
        return error
    twin.__cause__ = error
    return twin


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # of its __str__
        return type(error).__name__


def _copy(error: Exception) -> Exception | None:
    """A copy that nothing tells from `error`, or None: `copy.copy` reruns `__init__`, which need
    not restore what was there.
    """
    try:
        twin = copy.copy(error)
        state, same = _state(error), _state(twin)
        if type(twin) is type(error) and str(twin) == str(error) and state.keys() == same.keys():
            return twin if all(_is_same(state[name], same[name]) for name in state) else None
    except BaseException:  # user code: __reduce__, __init__, __str__, properties
        pass
    return None


def _state(error: Exception) -> dict[str, Any]:
    """Everything that `error` carries, by name."""
    slots: dict[str, Any] = {
        name: getattr(error, name, None)
        for kind in type(error).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, (GetSetDescriptorType, MemberDescriptorType))
        and name not in _OF_THE_RAISING
    }
    arguments = {f"args[{index}]": each for index, each in enumerate(slots.pop("args"))}
    return {**slots, **arguments, **vars(error)}


def _is_same(one: object, other: object) -> bool:
    plain = type(one) is type(other) and isinstance(one, (int, float, str, bytes))
    return one is other or (plain and one == other)
