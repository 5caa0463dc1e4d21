"""Copies of exceptions.

A raised exception collects the frames of the raising thread, so each caller of a failed batch gets
a copy, or one exception in turn if its class cannot be copied.
"""

from __future__ import annotations

from types import MemberDescriptorType
from typing import Any, Final

_STATE: Final[dict[str, Any]] = dict(vars(BaseException))
"""Descriptors of `BaseException`: they read and write its state, even if a subclass overrides them.
"""

TRACEBACK: Final = _STATE["__traceback__"]
_STATE_OF_A_RAISE: Final = [
    _STATE[name] for name in ("__traceback__", "__context__", "__cause__", "__suppress_context__")
]
"""State that raising an exception changes. The last member follows the cause, because setting the
cause sets it, too.
"""


def trim_traceback(error: BaseException) -> BaseException:
    """Return `error`, which was just caught, with a traceback that begins in the user's code."""
    TRACEBACK.__set__(error, TRACEBACK.__get__(error).tb_next)
    return error


class SharedError(Exception):
    """Substitute for an error that cannot be copied.

    Each caller raises `restored()`: the error in its state before any caller raised it.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._state = [(member, member.__get__(error)) for member in _STATE_OF_A_RAISE]

    def restored(self) -> BaseException:
        """Return the error, without the changes that raising it elsewhere has made."""
        for member, value in self._state:
            member.__set__(self._error, value)
        return self._error


def copy_exception(error: BaseException) -> BaseException:
    """Return an exception of the same class and state, or `error` itself if none can be made.

    No `__init__` of a user's class runs. Cause, context and the parts of a group are shared.
    """
    kind = type(error)
    try:
        twin = kind.__new__(kind, *_STATE["args"].__get__(error))
        state = _STATE["__dict__"].__get__(twin)
        state |= _STATE["__dict__"].__get__(error)
        if "__notes__" in state:
            state["__notes__"] = [*state["__notes__"]]
        for each in kind.__mro__:
            for member in vars(each).values():
                if type(member) is MemberDescriptorType:
                    try:
                        value = member.__get__(error)
                    except AttributeError:  # a slot is unset
                        continue
                    if value is None and each.__module__ == "builtins":
                        continue
                    try:
                        member.__set__(twin, value)
                    except AttributeError:  # a member is read-only
                        if member.__get__(twin) != value:
                            return error
    except BaseException:  # raised by code of the class
        return error
    for member in (_STATE["args"], *_STATE_OF_A_RAISE):
        member.__set__(twin, member.__get__(error))
    return twin
