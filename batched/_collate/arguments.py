"""Extra arguments of a call, and the key by which calls with the same ones share a batch.

Keys compare by content and carry types: `1`, `1.0` and `True` differ, so do `0.0` and `-0.0`; a
list, dict or set counts as what it holds, in its order if it has one. An argument left out equals
its default passed explicitly. Containers are copied when a call comes in, and for each batch:
neither a caller that changes its own nor a function that changes what it gets is seen by others.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any, Final

# stands for the instance, the items and the features when a signature is bound
_PLACE: Final = object()

LIGHT: Final = 256
"""Characters, bytes or entries of an argument up to which keys may keep it."""

REMEMBERED: Final = 64
"""Sets of feature names for which calls without extra arguments take the short way."""


class Arguments:
    """The extra arguments of a call. Calls with equal ones have the same object, as long as any of
    them waits or runs.
    """

    __slots__ = ("__weakref__", "_args", "_kwargs", "_light")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args = _fresh(args)
        self._kwargs = _fresh(kwargs)
        self._light: bool | None = None  # whether `key` may keep them; None until it is asked for

    @property
    def key(self) -> Hashable:
        """Equal for the same arguments, as long as they are used; keeps none alive but small plain
        values, which it always knows again.
        """
        if self._light is None:
            self._light = _is_light(self._args) and _is_light(self._kwargs)
        return self if self._light else weakref.ref(self)

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of one batch, whose containers the function may
        change.
        """
        if not self._args and not self._kwargs:
            return (), {}
        return _fresh(self._args), _fresh(self._kwargs)


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
        first = parameters[leading - 1] if 0 < leading <= len(parameters) else None
        self.items_name = (
            first.name if first and first.kind is first.POSITIONAL_OR_KEYWORD else None
        )
        """The keyword by which the items may be passed, if any."""
        self._gathered = next(
            (parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD),
            "",
        )
        self._defaults = {
            parameter.name: _default_key(parameter)
            for parameter in parameters
            if parameter.name != self._gathered
        }
        self._known: weakref.WeakValueDictionary[Hashable, Arguments] = (
            weakref.WeakValueDictionary()
        )
        # no extra arguments, by the names of features; found without a look at any
        self._bare: dict[tuple[str, ...], Arguments] = {}
        self.bare: Arguments | None = None
        """Those of a call that passes none; None if it must."""
        if not self._required(parameters[leading:]):
            self.bare = self._bare[()] = self._known[self._key((), {}, ())] = Arguments((), {})

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], features: tuple[str, ...] = ()
    ) -> Arguments:
        """The extra arguments of one call, in which `features` are passed by keyword too.

        Raises:
            TypeError: they do not fit the function's signature, or one of them has no content to
                compare (it is unhashable).
        """
        if not args and not kwargs:
            bare = self._bare.get(features)
            if bare is not None:
                return bare
        key = self._key(args, kwargs, features)
        arguments = Arguments(args, kwargs)
        try:
            arguments = self._known.setdefault(key, arguments)
        except Exception:  # of a comparison: what cannot be compared shares no batch
            return arguments
        if features and not args and not kwargs and len(self._bare) < REMEMBERED:
            self._bare[features] = arguments
        return arguments

    def _key(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], features: tuple[str, ...]
    ) -> Hashable:
        if self._signature is None:
            return self._frozen("arguments", [args, kwargs])
        places = dict.fromkeys(features, _PLACE)
        try:
            if twice := places.keys() & kwargs.keys():
                raise TypeError(
                    f"got {', '.join(sorted(twice))} both as a feature and as a further argument"
                )
            bound = self._signature.bind(*self._leading, *args, **places, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self._name}: {error}") from None
        gathered = bound.pop(self._gathered, {})  # which have no order
        given = {
            name: self._frozen(name, value) for name, value in bound.items() if value is not _PLACE
        }
        others = [
            (name, None, self._frozen(name, value))
            for name, value in gathered.items()
            if value is not _PLACE
        ]
        return frozenset([*{**self._defaults, **given}.items(), *others])

    def _frozen(self, name: str, value: Any) -> Hashable:
        try:
            key = _frozen(value)
            hash(key)
        except TypeError as error:
            raise TypeError(
                f"{self._name}: calls are grouped by the values of their extra arguments, and "
                f"{name}={value!r} cannot be compared: {error}"
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
        return any(
            p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            for p in parameters
        )


def _default_key(parameter: inspect.Parameter) -> Hashable:
    """The key of a parameter left out: that of its default, or, where that has none, a key of its
    own.
    """
    if parameter.kind is parameter.VAR_POSITIONAL:
        return _frozen(())
    try:
        key = _frozen(parameter.default)
        hash(key)
    except TypeError:
        return (inspect.Parameter, id(parameter.default))
    return key


def _frozen(value: Any) -> Hashable:
    """A hashable key that equals another one only if type and content do, as far as they can be
    told.
    """
    kind = type(value)
    if value is None or kind in (str, bytes, int, bool):
        return kind, value
    if kind in (list, tuple) or _is_named(value):
        return kind, tuple(map(_frozen, value))
    if kind in (set, frozenset):
        return kind, frozenset(map(_frozen, value))
    if kind is dict:
        return kind, tuple((_frozen(key), _frozen(item)) for key, item in value.items())
    if kind is float:
        return kind, value.hex()  # tells -0.0 from 0.0, and lets nan equal itself
    return kind, value, repr(value)  # equal is not alike: 0j and -0j, one moment in two time zones


def _fresh(value: Any) -> Any:
    """`value` with the built-in containers in it made anew, and everything else as it is."""
    kind = type(value)
    if kind in (list, set, frozenset, tuple):
        return kind(map(_fresh, value))
    if kind is dict:
        return {key: _fresh(item) for key, item in value.items()}
    return kind._make(map(_fresh, value)) if _is_named(value) else value


def _is_light(value: Any) -> bool:
    """Whether `value` is small and plain, all that it holds too."""
    kind = type(value)
    if kind in (str, bytes):
        return len(value) <= LIGHT
    if kind in (list, tuple, set, frozenset):
        return len(value) <= LIGHT and all(map(_is_light, value))
    if kind is dict:
        return len(value) <= LIGHT and all(map(_is_light, chain.from_iterable(value.items())))
    return value is None or kind in (int, float, bool, complex)


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_make")
