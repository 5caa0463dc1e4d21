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

import inspect
import sys
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
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

    __slots__ = ("given", "is_plain")

    given: tuple[tuple[Any, ...], dict[str, Any]]
    """Positional and keyword arguments."""
    is_plain: bool
    """Whether a batch may get them as they are."""

    def __new__(
        cls,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keys: Iterable[tuple[Any, Hashable]] = (),
    ) -> Self:
        """Take the arguments of a call."""
        self = super().__new__(cls, keys)
        self.is_plain = CONTAINERS.isdisjoint(map(type, (*args, *kwargs.values())))
        self.given = args, kwargs
        self.given = self.unpack()  # the caller may change containers meanwhile
        return self

    def differ_from(self, other: Arguments) -> list[str]:
        """Return the names of the parameters that have different values in `other`."""
        return sorted({place[0] for place, _ in self ^ other})

    def unpack(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments for one batch."""
        args, kwargs = self.given
        return (args, kwargs) if self.is_plain else (_copy(args), _copy(kwargs))


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
        by_keyword = [
            each.name
            for each in parameters[leading - 1 : leading]
            if each.kind is each.POSITIONAL_OR_KEYWORD
        ]
        self.items_name = by_keyword[0] if by_keyword else None
        """Keyword by which the items may be passed, if any."""
        self._defaults: dict[Any, Hashable] = {
            (each.name,): _freeze(each.default) for each in parameters
        }
        self.named = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        """Names of the parameters that may be passed by position or by keyword."""
        self._places = lru_cache(CACHE_LIMIT)(self._find_places)
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
        places = self._places(len(args), features, *kwargs)
        values = map(_freeze, (*args, *kwargs.values()))
        keys = {**self._defaults, **dict(zip(places, values, strict=True))}
        return Arguments(args, kwargs, keys.items())

    def _find_places(self, size: int, features: tuple[str, ...], *keywords: str) -> list[Any]:
        """Return the parameter of each argument; of `*args` and `**kwargs` also the place in it.

        There are `size` positional arguments.
        """
        given: list[Any] = [*range(size), *keywords]  # each stands for itself
        try:
            bound = self._signature.bind(
                *self._leading,
                *given[:size],
                **dict.fromkeys(features),
                **{name: name for name in keywords},
            )
        except TypeError as error:
            hint = self.hint if "too many positional" in str(error) else ""
            raise TypeError(f"{self._name}: {error}{hint}") from None
        places: dict[Any, tuple[Any, ...]] = {}
        for name, value in bound.arguments.items():
            if isinstance(value, (tuple, dict)):
                places |= {each: (name, each) for each in value}
            else:
                places[value] = (name,)
        return [places[each] for each in given]


def signature_of(func: Callable[..., Any], **options: Any) -> inspect.Signature:
    """Return the signature of `func`; a builtin without a signature takes any arguments.

    Annotations are text, which may name what is defined later. `options` are those of `inspect`.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        options["annotation_format"] = Format.STRING
    try:
        return inspect.signature(func, **options)
    except (TypeError, ValueError):
        return inspect.signature(lambda *_, **__: None)


def takes_instance(func: Callable[..., Any]) -> bool:
    """Return whether `func` takes an instance before its argument."""
    names = list(signature_of(func).parameters)
    return len(names) > 1 and names[0] in ("self", "cls")


def is_in_class(func: Callable[..., Any]) -> bool:
    """Return whether `func` was defined in the body of a class."""
    around = func.__qualname__.split(".")[-2:-1] if isinstance(func, FunctionType) else []
    return around not in ([], ["<locals>"])


def is_method(func: Callable[..., Any]) -> bool:
    """Return whether `func` was defined in the body of a class, with an instance to take."""
    return is_in_class(func) and takes_instance(func)


def _freeze(value: Any) -> Hashable:
    """Return a key that equals another one by the rules of the module.

    The key of an object that equals only itself is its id, so the object must be kept alive.
    """
    kind: Any = type(value)
    if kind in SCALARS:
        return kind, value
    if kind in CONTAINERS or issubclass(kind, tuple):
        gather = frozenset if kind is set or kind is frozenset else tuple
        return kind, gather(map(_freeze, value.items() if kind is dict else value))
    if kind is MethodType:
        return kind, id(value.__self__), id(value.__func__)
    if getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        return kind, *[_freeze(getattr(value, each.name)) for each in fields(kind)]
    scalars = float, complex, *find_imported("numpy", "generic"), *find_imported("torch", "device")
    if issubclass(kind, scalars) or kind.__module__.partition(".")[0] in VALUES:
        return kind, repr(value)
    return id, id(value)


def _copy(value: Any) -> Any:
    """Return a copy of `value`, and of the lists, sets and dicts in it."""
    kind = type(value)
    if kind is dict:
        return {key: _copy(item) for key, item in value.items()}
    return kind(map(_copy, value)) if kind in CONTAINERS else value
