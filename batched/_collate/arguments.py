"""Extra arguments of calls, and the key by which calls with equal ones share a batch.

Keys compare by content and carry types: `1`, `1.0` and `True` differ, so do `0.0` and `-0.0`; a
list, dict or set counts as what it holds, in its order if it has one. An argument left out equals
its default passed explicitly. Containers are copied when a call comes in, and again for each
batch, so that nobody sees what another caller or the function writes to them.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import chain
from operator import is_
from typing import Any, Final

# stands for the instance, the items and the features when a signature is bound
_PLACEHOLDER: Final = object()

MAX_KEPT: Final = 256
"""Largest number of characters, bytes or entries of an argument that `Arguments.key` may keep."""

CACHE_LIMIT: Final = 64
"""Most sets of feature names for which calls without extra arguments are bound without a look."""

Values = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class Arguments:
    """Extra arguments of a call. Calls with equal ones share one object, as long as any of them
    waits or runs.
    """

    __slots__ = ("__weakref__", "_args", "_kwargs", "_small", "constants")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args = _copy_containers(args)
        self._kwargs = _copy_containers(kwargs)
        self._small: bool | None = None  # whether `key` may keep them; None until it is asked for
        given, copied = (*args, *kwargs.values()), (*self._args, *self._kwargs.values())
        self.constants: Values | None = (
            (self._args, self._kwargs) if all(map(is_, given, copied)) else None
        )
        """The arguments, if no container is among them that a function could change; else None."""

    @property
    def key(self) -> Hashable:
        """Key of these arguments: the same object as long as they are used. Of those that are small
        and plain it is equal at all times; others it does not keep alive.
        """
        if self._small is None:
            self._small = _is_small(self._args) and _is_small(self._kwargs)
        return self if self._small else weakref.ref(self)

    def unpack(self) -> Values:
        """The arguments for one batch, with containers of its own that the function may change."""
        return self.constants or (_copy_containers(self._args), _copy_containers(self._kwargs))


class Binder:
    """Binder of the extra arguments of one function's calls to its signature."""

    def __init__(self, func: Callable[..., Any], name: str, *, leading: int) -> None:
        """Binder for `func`, whose first `leading` parameters (the instance, the items) are no
        extra arguments.

        Raises:
            TypeError: the function does not take so many.
        """
        self._name = name  # of the batch function, for error messages
        self._leading = (_PLACEHOLDER,) * leading
        try:
            self._signature: inspect.Signature | None = inspect.signature(func)
        except (TypeError, ValueError):  # builtins need not have one
            self._signature = None
        parameters = list(self._signature.parameters.values()) if self._signature else []
        try:
            if self._signature:
                self._signature.bind_partial(*self._leading)
        except TypeError:
            raise TypeError(f"{name} takes no argument for the list of items") from None
        first = parameters[leading - 1] if 0 < leading <= len(parameters) else None
        self.items_name = (
            first.name if first and first.kind is first.POSITIONAL_OR_KEYWORD else None
        )
        """Keyword by which the items may be passed, if any."""
        self._var_keyword = next(
            (parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD),
            "",
        )
        self._defaults = {
            parameter.name: _default_key(parameter)
            for parameter in parameters
            if parameter.name != self._var_keyword
        }
        self._known: weakref.WeakValueDictionary[Hashable, Arguments] = (
            weakref.WeakValueDictionary()
        )
        # of calls without extra arguments, by the names of their features
        self._bare: dict[tuple[str, ...], Arguments] = {}
        self.bare: Arguments | None = None
        """Arguments of a call without extra ones; None if some are required."""
        with suppress(TypeError):
            self.bare = self.bind((), {})

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], features: tuple[str, ...] = ()
    ) -> Arguments:
        """Extra arguments of one call, in which the function gets `features` by keyword too.

        Raises:
            TypeError: they do not fit the function's signature, or one of them has no content to
                compare (it is unhashable).
        """
        bare = not args and not kwargs
        if bare and features in self._bare:
            return self._bare[features]
        key = self._key(args, kwargs, features)
        arguments = Arguments(args, kwargs)
        try:
            arguments = self._known.setdefault(key, arguments)
        except Exception:  # of a comparison: what cannot be compared shares no batch
            return arguments
        if bare and len(self._bare) < CACHE_LIMIT:
            self._bare[features] = arguments
        return arguments

    def _key(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], features: tuple[str, ...]
    ) -> Hashable:
        if self._signature is None:
            return self._freeze("arguments", [args, kwargs])
        places = dict.fromkeys(features, _PLACEHOLDER)
        try:
            if twice := places.keys() & kwargs.keys():
                raise TypeError(
                    f"got {', '.join(sorted(twice))} both as a feature and as a further argument"
                )
            bound = self._signature.bind(*self._leading, *args, **places, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self._name}: {error}") from None
        var_keyword = bound.pop(self._var_keyword, {})  # which have no order
        given = {
            name: self._freeze(name, value)
            for name, value in bound.items()
            if value is not _PLACEHOLDER
        }
        others = [
            (name, None, self._freeze(name, value))
            for name, value in var_keyword.items()
            if value is not _PLACEHOLDER
        ]
        return frozenset([*{**self._defaults, **given}.items(), *others])

    def _freeze(self, name: str, value: Any) -> Hashable:
        try:
            return _freeze_hashable(value)
        except TypeError as error:
            raise TypeError(
                f"{self._name}: calls are grouped by the values of their extra arguments, and "
                f"{name}={value!r} cannot be compared: {error}"
            ) from None


def _default_key(parameter: inspect.Parameter) -> Hashable:
    """Key of a parameter left out: that of its default or, if that cannot be hashed, one for this
    default alone.
    """
    try:
        return _freeze_hashable(
            () if parameter.kind is parameter.VAR_POSITIONAL else parameter.default
        )
    except TypeError:
        return (inspect.Parameter, id(parameter.default))


def _freeze_hashable(value: Any) -> Hashable:
    """Key of `value`, or a TypeError if it cannot be hashed."""
    key = _freeze(value)
    hash(key)
    return key


def _freeze(value: Any) -> Hashable:
    """Key that equals another one only if type and content do, as far as they can be told."""
    kind = type(value)
    if value is None or kind in (str, bytes, int, bool):
        return kind, value
    if kind in (list, tuple) or _is_namedtuple(value):
        return kind, tuple(map(_freeze, value))
    if kind in (set, frozenset):
        return kind, frozenset(map(_freeze, value))
    if kind is dict:
        return kind, tuple((_freeze(key), _freeze(item)) for key, item in value.items())
    if kind is float:
        return kind, value.hex()  # tells -0.0 from 0.0, and lets nan equal itself
    return kind, value, repr(value)  # equal is not alike: 0j and -0j, one moment in two time zones


def _copy_containers(value: Any) -> Any:
    """Copy of the built-in containers of `value`, all levels of them, with everything else as it
    is.
    """
    kind = type(value)
    if kind in (list, set, frozenset, tuple):
        return kind(map(_copy_containers, value))
    if kind is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    return kind._make(map(_copy_containers, value)) if _is_namedtuple(value) else value


def _is_small(value: Any) -> bool:
    """True if `value` is small and plain, all that it holds too."""
    kind = type(value)
    if kind in (str, bytes):
        return len(value) <= MAX_KEPT
    if kind in (list, tuple, set, frozenset):
        return len(value) <= MAX_KEPT and all(map(_is_small, value))
    if kind is dict:
        return len(value) <= MAX_KEPT and all(map(_is_small, chain.from_iterable(value.items())))
    return value is None or kind in (int, float, bool, complex)


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_make")
