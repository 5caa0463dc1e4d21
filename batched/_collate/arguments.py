"""Extra arguments of calls, and the keys by which calls with equal arguments share a batch.

1. Texts, bytes, bools, None, numbers, dates, times, UUIDs and paths are compared by type and value:
   `1`, `1.0` and `True` differ, and so do `0.0` and `-0.0`. Numbers of numpy are numbers.
2. Lists, tuples, named tuples, sets, frozensets, dicts and frozen dataclasses are compared by type
   and contents, in their order if there is one.
3. A bound method is compared by its instance and its function.
4. Every other object equals only itself. No code of its class runs.
5. An argument left out equals its default passed explicitly, except a list, dict or set, which the
   function may have changed.

Built-in containers are copied when a call arrives, and again for each batch, so that no caller sees
changes by another caller or by the function. Other objects are passed as they are.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from types import MethodType
from typing import Any, Final, Self

from .arrays import find_imported

_PLACEHOLDER: Final = object()
"""Placeholder of the instance, the items and the features when a signature is bound."""

CACHE_LIMIT: Final = 64
"""Limit of shapes of calls, each kept with the parameters of its arguments."""

Values = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

PLAIN: Final = {str, bytes, int, bool, type(None)}
VALUES: Final = {"datetime", "decimal", "fractions", "pathlib", "uuid"}
"""Modules of classes with a `repr` that has the whole value."""

SCALARS: Final = {float, *PLAIN}
MUTABLE: Final = {list, set, dict}


class Arguments(frozenset[tuple[Hashable, Hashable]]):
    """Extra arguments of a call, as the set of their parameters and keys.

    As a set of built-in objects it is hashed and compared without a call of Python. It keeps no
    argument alive that is compared by identity.
    """

    __slots__ = ("is_plain", "values")

    is_plain: bool
    values: Values

    def __new__(
        cls,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keys: Iterable[tuple[Hashable, Hashable]] = (),
    ) -> Self:
        """Take the arguments of a call, and copy containers."""
        self = super().__new__(cls, keys)
        self.is_plain = SCALARS.issuperset(map(type, (*args, *kwargs.values())))
        self.values = args, kwargs
        self.values = self.unpack()
        return self

    def unpack(self) -> Values:
        """Return the arguments for one batch, with new containers that the function may change."""
        args, kwargs = self.values
        if self.is_plain:
            return args, kwargs
        return _copy_containers(args), _copy_containers(kwargs)


class Binder:
    """Binder of the extra arguments of one function's calls to its signature."""

    def __init__(self, func: Callable[..., Any], name: str, *, leading: int) -> None:
        """Make a binder for `func`.

        Its first `leading` parameters (the instance, the items) are no extra arguments.

        Raises:
            TypeError: the function takes fewer parameters.
        """
        self._name = name  # of the batch function, for error messages
        self.hint = ""
        """Advice for a call with too many positional arguments, set by the parser of calls."""
        self._leading = (_PLACEHOLDER,) * leading
        self._signature = signature_of(func)
        try:
            self._signature.bind_partial(*self._leading)
        except TypeError:
            raise TypeError(f"{name} takes no argument for the list of items") from None
        parameters = list(self._signature.parameters.values())
        first = parameters[leading - 1] if 0 < leading <= len(parameters) else None
        self.items_name = (
            first.name if first and first.kind is first.POSITIONAL_OR_KEYWORD else None
        )
        """Keyword by which the items may be passed, if any."""
        self.items_annotation = inspect.formatannotation(first.annotation) if first else ""
        # keys of parameters that are left out
        self._defaults: dict[Hashable, Hashable] = {
            parameter.name: _Identity(parameter.default)
            if type(parameter.default) in MUTABLE
            else _freeze(parameter.default)
            for parameter in parameters
        }
        # by number of positional arguments, names of features, and keywords
        self._places: dict[Hashable, list[Hashable]] = {}
        self._nothing = Arguments((), {}, self._defaults.items())
        self.bare: Arguments | None = None
        """Arguments of a call without extra arguments; None if some are required."""
        with suppress(TypeError):
            self.bare = self.bind((), {})

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], features: tuple[str, ...] = ()
    ) -> Arguments:
        """Return the extra arguments of one call that also passes `features` by keyword.

        Raises:
            TypeError: the arguments do not fit the signature.
        """
        if not args and not kwargs and not features and self.bare is not None:
            return self.bare
        shape = (len(args), features, *kwargs)
        places = self._places.get(shape)
        if places is None:
            places = self._find_places(args, kwargs, features)
            if len(self._places) < CACHE_LIMIT:
                self._places[shape] = places
        if not places:
            return self._nothing
        given = map(_freeze, (*args, *kwargs.values()))
        key = {**self._defaults, **dict(zip(places, given, strict=True))}
        return Arguments(args, kwargs, key.items())

    def _find_places(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], features: tuple[str, ...]
    ) -> list[Hashable]:
        """Return the parameter of each argument, the same for all calls of this shape.

        An argument gathered by `*args` or `**kwargs` also has its position or keyword.
        """
        spread = dict.fromkeys(features, _PLACEHOLDER)
        # numbers and names stand for the arguments, so that bound arguments can be identified
        numbers, names = range(len(args)), {name: name for name in kwargs}
        try:
            if twice := spread.keys() & kwargs.keys():
                raise TypeError(
                    f"got {', '.join(sorted(twice))} both as a feature and as a further argument"
                )
            bound = self._signature.bind(*self._leading, *numbers, **spread, **names)
        except TypeError as error:
            hint = self.hint if "too many positional" in str(error) else ""
            raise TypeError(f"{self._name}: {error}{hint}") from None
        places: dict[Any, Hashable] = {}
        for name, given in bound.arguments.items():
            parameter = self._signature.parameters[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                places |= {number: (name, at) for at, number in enumerate(given)}
            elif parameter.kind is parameter.VAR_KEYWORD:
                places |= {keyword: (name, keyword) for keyword in given}
            else:
                places[given] = name
        return [places[given] for given in (*numbers, *names)]


def signature_of(func: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `func`; a builtin without a signature takes any arguments."""
    try:
        return inspect.signature(func)
    except (TypeError, ValueError):
        return inspect.signature(lambda *_, **__: None)


def takes_instance(func: Callable[..., Any]) -> bool:
    """Return whether `func` takes an instance before its argument."""
    names = list(signature_of(func).parameters)
    return len(names) > 1 and names[0] in ("self", "cls")


class _Identity:
    """Key of an object that equals only itself. An object that is gone equals none."""

    __slots__ = ("_find", "_id")

    def __init__(self, value: object) -> None:
        self._id = id(value)
        try:
            self._find: Callable[[], object] = weakref.ref(value)
        except TypeError:  # it has no weak references
            self._find = lambda: value

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _Identity)
            and self._id == other._id
            and self._find() is other._find() is not None
        )


def _freeze(value: Any) -> Hashable:
    """Return a key that equals another one by the rules of the module."""
    kind: Any = type(value)
    if kind in PLAIN:
        return kind, value
    if kind is float:
        return kind, value.hex()  # tells -0.0 from 0.0, and lets nan equal itself
    if kind in (list, tuple) or _is_namedtuple(kind):
        return kind, tuple(map(_freeze, value))
    if kind in (set, frozenset):
        return kind, frozenset(map(_freeze, value))
    if kind is dict:
        return kind, tuple((_freeze(key), _freeze(item)) for key, item in value.items())
    if (
        kind is complex
        or kind.__module__.partition(".")[0] in VALUES
        or issubclass(kind, find_imported("numpy", "number"))
    ):
        return kind, repr(value)
    if kind is MethodType:
        return _Identity(value.__self__), _Identity(value.__func__)
    if getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        fields = dataclasses.fields(kind)
        return kind, tuple([_freeze(getattr(value, field.name)) for field in fields])
    return _Identity(value)


def _copy_containers(value: Any) -> Any:
    """Return a copy of the built-in containers in `value`, on all levels.

    All other objects are passed as they are.
    """
    kind = type(value)
    if kind in (list, set, frozenset, tuple):
        return kind(map(_copy_containers, value))
    if kind is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    return kind._make(map(_copy_containers, value)) if _is_namedtuple(kind) else value


def _is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_make")
