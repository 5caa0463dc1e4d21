"""Extra arguments of a call, and the key by which calls with the same ones share a batch.

Keys compare by content and carry types: `1`, `1.0` and `True` differ, so do `0.0` and `-0.0`; a list, dict or set counts as what
it holds. An argument left out equals its default passed explicitly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from numbers import Number
from typing import Any, Final

_PLACE: Final = object()  # stands for the instance and the items when a signature is bound


class Arguments:
    """The extra arguments of a call; equal, as a group key, to those of every call that may share its batch."""

    __slots__ = ("_hash", "_key", "args", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable) -> None:
        self.args = args
        self.kwargs = kwargs
        self._key = key
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Arguments):
            return self is other
        try:
            return self._key == other._key
        except Exception:  # of the arguments' own comparison: what cannot be compared does not share a batch
            return False


class Binder:
    """Turns the extra arguments of calls of one function into `Arguments`."""

    def __init__(self, func: Callable[..., Any], name: str, *, leading: int) -> None:
        """`leading` parameters (the instance, the items) come before the extra ones.

        Raises:
            TypeError: the function does not take them.
        """
        self._name = name
        self._leading = (_PLACE,) * leading
        try:
            self._signature: inspect.Signature | None = inspect.signature(func)
        except (TypeError, ValueError):  # builtins need not have one
            self._signature = None
        parameters = list(self._signature.parameters.values()) if self._signature else []
        if self._signature and not self._binds(self._leading):
            raise TypeError(f"{name} takes no argument for the list of items")
        first = parameters[leading - 1] if len(parameters) >= leading else None
        self.items_name = first.name if first and first.kind is first.POSITIONAL_OR_KEYWORD else None
        """The keyword by which the items may be passed, if any."""
        self._defaults = {parameter.name: _default_key(parameter) for parameter in parameters}
        self._none = None if self._required(parameters[leading:]) else Arguments((), {}, self._key((), {}))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The extra arguments of one call.

        Raises:
            TypeError: they do not fit the function's signature, or one of them has no content to compare (it is unhashable).
        """
        if not args and not kwargs and self._none is not None:
            return self._none
        return Arguments(args, kwargs, self._key(args, kwargs))

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        if self._signature is None:
            return self._frozen("arguments", [args, kwargs])
        try:
            bound = self._signature.bind(*self._leading, *args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self._name}: {error}") from None
        given = {name: self._frozen(name, value) for name, value in bound.items() if value is not _PLACE}
        return frozenset({**self._defaults, **given}.items())

    def _frozen(self, name: str, value: Any) -> Hashable:
        try:
            key = _frozen(value)
            hash(key)
        except TypeError as error:
            raise TypeError(
                f"{self._name}: calls are grouped by the values of their extra arguments, and {name}={value!r} cannot be compared: {error}"
            ) from None
        return key

    def _binds(self, args: tuple[object, ...]) -> bool:
        assert self._signature is not None
        try:
            self._signature.bind_partial(*args)
        except TypeError:
            return False
        return True

    @staticmethod
    def _required(parameters: list[inspect.Parameter]) -> bool:
        return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _default_key(parameter: inspect.Parameter) -> Hashable:
    """The key of a parameter left out: that of its default, or, where that has none, a key of its own."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return _frozen(())
    if parameter.kind is parameter.VAR_KEYWORD:
        return _frozen({})
    try:
        key = _frozen(parameter.default)
        hash(key)
    except TypeError:
        return (inspect.Parameter, id(parameter.default))
    return key


def _frozen(value: Any) -> Hashable:
    """A hashable key that equals another one if and only if type and content do."""
    kind = type(value)
    if isinstance(value, (list, tuple)):
        return kind, tuple(map(_frozen, value))
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(map(_frozen, value))
    if isinstance(value, dict):
        return kind, frozenset((_frozen(key), _frozen(item)) for key, item in value.items())
    for real in (float, complex):
        if isinstance(value, real):
            return kind, real.__repr__(value)  # tells -0.0 from 0.0, and lets nan equal itself
    if isinstance(value, Number) and kind.__module__ in ("decimal", "numpy"):  # whose repr says all there is
        return kind, repr(value)
    return kind, value
