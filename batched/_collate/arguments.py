"""Extra arguments of calls: calls with equal ones may share a batch.

1. Numbers (also of numpy), texts, bytes, bools, None, dates, UUIDs, paths, dtypes and devices of
   torch are equal by type and value: `1`, `1.0` and `True` differ, and so do `0.0` and `-0.0`.
2. Lists, tuples, sets, dicts and frozen dataclasses are equal by type and contents.
3. Any other object equals only itself; a bound method, itself of the same object.
4. It does not matter whether an argument is passed by position, by keyword, or left out for its
   default.

A batch gets the arguments of its first call, as they were when the call was made: lists, sets and
dicts are copied.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any, Final, Self

from .arrays import find_imported

CACHE_LIMIT: Final = 1024
"""Most shapes of calls whose parameters are remembered."""
SCALARS: Final = {str, bytes, int, bool, type(None)}
VALUES: Final = {"datetime", "decimal", "fractions", "pathlib", "uuid"}
"""Modules of classes whose `repr` has the whole value."""
CONTAINERS: Final = {list, tuple, set, frozenset, dict}


class Arguments(frozenset[tuple[Any, Hashable]]):
    """Extra arguments of a call, as the set of their parameters and keys.

    As a set it is hashed and compared without a call of Python.
    """

    __slots__ = ("args", "is_plain", "kwargs")

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_plain: bool
    """Whether a batch may get `args` and `kwargs` as they are."""

    def __new__(
        cls,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        keys: Iterable[tuple[Any, Hashable]] = (),
    ) -> Self:
        """Take the arguments of a call."""
        self = super().__new__(cls, keys)
        self.args, self.kwargs = args, kwargs or {}
        self.is_plain = CONTAINERS.isdisjoint(map(type, (*args, *self.kwargs.values())))
        self.args, self.kwargs = self.unpack()  # the caller may change containers meanwhile
        return self

    def differ_from(self, other: Arguments) -> list[str]:
        """Return the names of the parameters that have different values in `other`."""
        return sorted({place if isinstance(place, str) else place[0] for place, _ in self ^ other})

    def unpack(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments for one batch."""
        if self.is_plain:
            return self.args, self.kwargs
        return _copy(self.args), _copy(self.kwargs)


class Binder:
    """Binds the extra arguments of one function's calls to its parameters.

    The first `leading` parameters (the instance, the items) are no extra arguments.

    Raises:
        TypeError: the function takes fewer parameters.
    """

    def __init__(self, func: Callable[..., Any], name: str, *, leading: int) -> None:
        self._name = name  # of the batch function, for error messages
        self.hint = ""
        """Advice for a call with too many positional arguments, set by the parser of calls."""
        self._leading = (None,) * leading
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
        self._defaults: dict[Hashable, Hashable] = {
            each.name: _freeze(each.default) for each in parameters
        }
        # parameters of the arguments, by number of positional ones, features and keywords
        self._places: dict[tuple[Any, ...], list[Hashable]] = {}
        self._bare: Arguments | None = None  # of a call without extra arguments
        with suppress(TypeError):
            self._bare = self.bind((), {})

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], features: tuple[str, ...] = ()
    ) -> Arguments:
        """Return the extra arguments of one call that also passes `features` by keyword.

        Raises:
            TypeError: the arguments do not fit the signature.
        """
        if self._bare is not None and not args and not kwargs and not features:
            return self._bare
        shape = (len(args), features, *kwargs)
        places = self._places.get(shape)
        if places is None:
            places = self._find_places(args, kwargs, features)
            if len(self._places) < CACHE_LIMIT:
                self._places[shape] = places
        values = map(_freeze, (*args, *kwargs.values()))
        keys = {**self._defaults, **dict(zip(places, values, strict=True))}
        return Arguments(args, kwargs, keys.items())

    def _find_places(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], features: tuple[str, ...]
    ) -> list[Hashable]:
        """Return the parameter of each argument; of `*args` and `**kwargs` also the place in it."""
        numbers = range(len(args))  # stand for the arguments
        try:
            if twice := set(features) & kwargs.keys():
                raise TypeError(
                    f"got {', '.join(sorted(twice))} both as a feature and as a further argument"
                )
            given: dict[str, Any] = {**dict.fromkeys(features), **{name: name for name in kwargs}}
            bound = self._signature.bind(*self._leading, *numbers, **given)
        except TypeError as error:
            hint = self.hint if "too many positional" in str(error) else ""
            raise TypeError(f"{self._name}: {error}{hint}") from None
        places: dict[Any, Hashable] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                places |= {number: (name, at) for at, number in enumerate(value)}
            elif kind is inspect.Parameter.VAR_KEYWORD:
                places |= {keyword: (name, keyword) for keyword in value}
            else:
                places[value] = name
        return [places[each] for each in (*numbers, *kwargs)]


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


def is_method(func: Callable[..., Any]) -> bool:
    """Return whether `func` was defined in the body of a class, with an instance to take."""
    place = getattr(func, "__qualname__", "").rpartition(".")[0]
    in_class = isinstance(func, FunctionType) and place and not place.endswith("<locals>")
    return bool(in_class) and takes_instance(func)


def _freeze(value: Any) -> Hashable:
    """Return a key that equals another one by the rules of the module.

    The key of an object that equals only itself is its id, so the object must be kept alive.
    """
    kind: Any = type(value)
    if kind in SCALARS:
        return kind, value
    if kind is dict:
        return kind, tuple((_freeze(key), _freeze(item)) for key, item in value.items())
    if kind is list or issubclass(kind, tuple):
        return kind, tuple(map(_freeze, value))
    if kind is set or kind is frozenset:
        return kind, frozenset(map(_freeze, value))
    if kind is MethodType:
        return kind, id(value.__self__), id(value.__func__)
    if getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        return kind, tuple(_freeze(getattr(value, each.name)) for each in dataclasses.fields(kind))
    of_numpy, of_torch = find_imported("numpy", "generic"), find_imported("torch", "device")
    classes = (float, complex, *of_numpy, *of_torch)
    if kind.__module__.partition(".")[0] in VALUES or issubclass(kind, classes):
        return kind, repr(value)
    return id, id(value)


def _copy(value: Any) -> Any:
    """Return a copy of `value`, and of the lists, sets and dicts in it."""
    kind = type(value)
    if kind is dict:
        return {key: _copy(item) for key, item in value.items()}
    return kind(map(_copy, value)) if kind in CONTAINERS else value
