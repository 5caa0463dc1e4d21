"""Exceptions of the user's, handled without running code of their classes: properties, comparisons
and constructors may fail, too, or do what they please.
"""

from __future__ import annotations

import copy
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final

_STATE: Final[dict[str, Any]] = dict(vars(BaseException))
"""Descriptors of what every exception has: they read and write it whatever subclasses define."""

TRACEBACK: Final = _STATE["__traceback__"]
CAUSE: Final = _STATE["__cause__"]
CONTEXT: Final = _STATE["__context__"]

_OF_A_RAISE: Final = (TRACEBACK, CONTEXT, CAUSE, _STATE["__suppress_context__"])
"""What raising an exception, or raising it again, may change; the last one after the cause, which
sets it.
"""

_DICT: Final = _STATE["__dict__"]

_GROUP: Final[dict[str, Any]] = dict(vars(BaseExceptionGroup))

_HEAP_TYPE: Final = 1 << 9
"""Flag of classes that no interpreter was built with, Py_TPFLAGS_HEAPTYPE."""

_UNSET: Final = object()


def trim_traceback(error: BaseException) -> BaseException:
    """`error`, which was just caught, with a traceback that begins in the user's code."""
    TRACEBACK.__set__(error, TRACEBACK.__get__(error).tb_next)
    return error


class SharedError(Exception):
    """An error that cannot be copied, in the place of it: whoever is to raise it asks for it as it
    was before anybody did.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._state = [(member, member.__get__(error)) for member in _OF_A_RAISE]

    def restored(self) -> BaseException:
        """The error, without what other callers have added to it."""
        for member, value in self._state:
            member.__set__(self._error, value)
        return self._error


def copy_exception(
    error: BaseException, copies: dict[int, BaseException] | None = None
) -> BaseException:
    """An exception that nothing tells from `error`, made without its `__init__`; `error` itself if
    there can be no other. So are its parts, its cause and its context, each of them once: `copies`
    has those that were made, by identity.
    """
    copies = {} if copies is None else copies
    try:
        known = copies.get(id(error))
        return _copy(error, copies) if known is None else known
    except BaseException:  # of a compiled class, or of a metaclass
        return error


def _copy(error: BaseException, copies: dict[int, BaseException]) -> BaseException:
    kind = type(error)
    base: Any = kind
    while base.__flags__ & _HEAP_TYPE:
        base = base.__base__
    make: Any = base.__new__
    args: tuple[Any, ...] = ()
    if base is BaseExceptionGroup:  # callers may raise what is in it
        parts = _GROUP["exceptions"].__get__(error)
        args = _GROUP["message"].__get__(error), [copy_exception(part, copies) for part in parts]
    members = [_STATE["args"]]
    try:
        twin: BaseException = make(kind, *args)
    except TypeError:  # a compiled class with a state of its own, as pydantic's
        if kind.__reduce__ is BaseException.__reduce__:
            raise
        twin = copy.copy(error)
    else:
        members = [
            member
            for each in kind.__mro__
            if each is not BaseExceptionGroup
            for member in vars(each).values()
            if type(member) in (GetSetDescriptorType, MemberDescriptorType)
            and member.__name__ not in ("__dict__", "__weakref__")
        ]
    copies[id(error)] = twin
    for member in (*members, *_OF_A_RAISE):
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
