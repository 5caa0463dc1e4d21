"""Copies of exceptions, made without running code of their classes.

Properties, comparisons and constructors of these classes may fail or have side effects. A raised
exception collects the frames of the raising thread, so each caller of a failed batch gets a copy.
"""

from __future__ import annotations

import copy
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final

_STATE: Final[dict[str, Any]] = dict(vars(BaseException))
"""Descriptors of `BaseException`: they read and write its state, even if a subclass overrides them.
"""

TRACEBACK: Final = _STATE["__traceback__"]
CAUSE: Final = _STATE["__cause__"]
CONTEXT: Final = _STATE["__context__"]

_STATE_OF_A_RAISE: Final = (TRACEBACK, CONTEXT, CAUSE, _STATE["__suppress_context__"])
"""State that raising an exception changes. The last member follows the cause, because setting the
cause sets it, too.
"""

_DICT: Final = _STATE["__dict__"]

_HEAP_TYPE: Final = 1 << 9
"""Flag of classes that are not built into the interpreter, Py_TPFLAGS_HEAPTYPE."""

_UNSET: Final = object()


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


def copy_exception(
    error: BaseException, copies: dict[int, BaseException] | None = None
) -> BaseException:
    """Return a copy of `error`, made without its `__init__`, or `error` if it cannot be copied.

    The copy has the class, state and attributes of `error`. The exceptions of a group, the cause
    and the context are copied, too, each once: `copies` has the copies so far, by identity of the
    original.
    """
    copies = {} if copies is None else copies
    try:
        known = copies.get(id(error))
        return _copy(error, copies) if known is None else known
    except BaseException:  # raised by a compiled class with its own state, or by a metaclass
        return error


def _copy(error: BaseException, copies: dict[int, BaseException]) -> BaseException:
    kind = type(error)
    built_in: Any = kind
    while built_in.__flags__ & _HEAP_TYPE:
        built_in = built_in.__base__
    make: Any = built_in.__new__
    args: tuple[Any, ...] = ()
    if built_in is BaseExceptionGroup:  # callers may raise its parts, too
        group = dict[str, Any](vars(built_in))
        parts = group["exceptions"].__get__(error)
        args = group["message"].__get__(error), [copy_exception(part, copies) for part in parts]
    twin: BaseException = make(kind, *args)
    copies[id(error)] = twin
    members = [
        member
        for each in kind.__mro__
        if each is not BaseExceptionGroup
        for member in vars(each).values()
        if type(member) in (GetSetDescriptorType, MemberDescriptorType)
        and member.__name__ not in ("__dict__", "__weakref__")
    ]
    for member in (*members, *_STATE_OF_A_RAISE):
        value = _read(member, error)
        if member in (CAUSE, CONTEXT) and value is not None:
            value = copy_exception(value, copies)
        if value is not _read(member, twin):
            member.__set__(twin, value)
    attributes = dict(_DICT.__get__(error))
    if "__notes__" in attributes:
        attributes["__notes__"] = copy.copy(attributes["__notes__"])
    _DICT.__get__(twin).update(attributes)
    return twin


def _read(member: Any, error: BaseException) -> Any:
    try:
        return member.__get__(error)
    except AttributeError:
        return _UNSET
