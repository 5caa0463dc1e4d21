"""What each caller is told when a batch fails."""

from __future__ import annotations

import concurrent.futures
import copy
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from ..errors import BatchFunctionError

# Raised into a caller these would pass for a cancellation or for the end of an iteration; so would,
# or worse, what is no Exception.
_MISLEADING = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)

_OF_THE_RAISING = {
    "__cause__",
    "__context__",
    "__dict__",
    "__suppress_context__",
    "__traceback__",
    "__weakref__",
}


def told(name: str, error: BaseException, *, alone: bool) -> BaseException:
    """The exception for one caller of the batch function `name`: `error` itself if it is `alone`,
    else a copy caused by it.

    Callers share `error` where no copy would be faithful, and get a `BatchFunctionError` caused by
    it where raising its type would mean something else to them.
    """
    # what a coroutine makes of it
    if type(error) is RuntimeError and isinstance(error.__cause__, StopIteration):
        error = error.__cause__
    if isinstance(error, _MISLEADING) or not isinstance(error, Exception):
        wrapped = BatchFunctionError(f"{name} raised {_described(error)}")
        wrapped.__cause__ = error
        return wrapped
    if alone:
        return error
    twin = _copy(error)
    if twin is None:
        return error
    twin.__cause__ = error
    return twin


def _described(error: BaseException) -> str:
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
        if (
            type(twin) is type(error)
            and str(twin) == str(error)
            and _alike(_state(twin), _state(error))
        ):
            return twin
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
    arguments = {f"args[{index}]": argument for index, argument in enumerate(slots.pop("args"))}
    return {**slots, **arguments, **vars(error)}


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        _same(value, other[name]) for name, value in one.items()
    )


def _same(one: object, other: object) -> bool:
    return one is other or (
        type(one) is type(other) and isinstance(one, (int, float, str, bytes)) and one == other
    )
