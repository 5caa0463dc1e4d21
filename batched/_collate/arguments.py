"""Extra arguments of calls, and the key by which calls with equal arguments share a batch.

Keys compare by content and carry types: `1`, `1.0` and `True` differ, so do `0.0` and `-0.0`. A
list, dict or set is compared by its contents, in their order if there is one. Objects of the user's
own classes are compared by `==` and their hash. Objects without an equality that answers yes or no
(functions, models, tensors) are compared by identity. An argument left out equals its default
passed explicitly, except a list, dict or set, which the function may have changed.

Containers are copied when a call arrives, and again for each batch, so that no caller sees changes
by another caller or by the function. Other objects are passed as they are: a change to one of them
affects all waiting calls with equal arguments.
"""

from __future__ import annotations

import enum
import inspect
import reprlib
import sys
import types
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Final

# stands for the instance, the items and the features when a signature is bound
_PLACEHOLDER: Final = object()

MAX_KEPT: Final = 256
"""Largest number of characters, bytes or entries of an argument that `Arguments.key` may keep."""

CACHE_LIMIT: Final = 64
"""Limit of shapes of calls, and of sets of feature names, with bindings that are kept."""

Values = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

Binding = tuple[list[Hashable], list[tuple[int, str]]]
"""Places of the arguments of all calls of one shape.

The first part is the key of the defaults, with room for passed arguments. The second part has place
and name of each passed argument, positional arguments first.
"""

_IMMUTABLE_TYPE: Final = 1 << 8
"""Flag of classes that are written in C, Py_TPFLAGS_IMMUTABLETYPE."""

PLAIN: Final = {str, bytes, int, bool, type(None)}
CONTAINERS: Final = (list, tuple, set, frozenset, dict)


class Arguments:
    """Extra arguments of a call.

    Calls with equal arguments share one object as long as any of these calls waits or runs.
    """

    __slots__ = ("__weakref__", "_args", "_kwargs", "_small", "constants")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args = args
        self._kwargs = kwargs
        self._small: bool | None = None  # whether `key` may keep them; None: not yet known
        self.constants: Values | None = (args, kwargs)
        """The arguments if none is a container, which a function could change; otherwise None."""
        for value in (*args, *kwargs.values()):
            if issubclass(type(value), CONTAINERS):
                self._args = _copy_containers(args)
                self._kwargs = _copy_containers(kwargs)
                self.constants = None
                break

    @property
    def key(self) -> Hashable:
        """Key of these arguments: the same object as long as they are used.

        Keys of small and plain arguments are equal at all times. Keys of all other arguments do not
        keep them alive.
        """
        if self._small is None:
            self._small = _is_small(self._args) and _is_small(self._kwargs)
        return self if self._small else weakref.ref(self)

    def unpack(self) -> Values:
        """Return the arguments for one batch, with new containers that the function may change."""
        return self.constants or (_copy_containers(self._args), _copy_containers(self._kwargs))


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
        self.items_annotation = inspect.formatannotation(first.annotation) if first else ""
        self._var_keyword = next(
            (parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD),
            "",
        )
        self._var_positional = next(
            (
                parameter.name
                for parameter in parameters
                if parameter.kind is parameter.VAR_POSITIONAL
            ),
            "",
        )
        self._defaults = {
            parameter.name: _default_key(parameter)
            for parameter in parameters
            if parameter.name not in (self._var_positional, self._var_keyword)
        }
        self._known: dict[Hashable, weakref.ref[Arguments]] = {}
        # by number of positional arguments, names of features, and keywords
        self._bindings: dict[Hashable, Binding] = {}
        # of calls without extra arguments, by the names of their features
        self._bare: dict[tuple[str, ...], Arguments] = {}
        self.bare: Arguments | None = None
        """Arguments of a call without extra arguments; None if some are required."""
        with suppress(TypeError):
            self.bare = self.bind((), {})

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], features: tuple[str, ...] = ()
    ) -> Arguments:
        """Return the extra arguments of one call that also passes `features` by keyword.

        Raises:
            TypeError: the arguments do not fit the signature, or one of them is unhashable.
        """
        bare = not args and not kwargs
        if bare and features in self._bare:
            return self._bare[features]
        key, known = self._key(args, kwargs, features), self._known
        try:
            reference = known.get(key)
            arguments = None if reference is None else reference()
            if arguments is None:
                arguments = Arguments(args, kwargs)
                # `pop` is called with the reference as its default
                known[key] = weakref.ref(arguments, partial(known.pop, key))
        except Exception:  # of a comparison: calls that cannot be compared share no batch
            return Arguments(args, kwargs)
        if bare and len(self._bare) < CACHE_LIMIT:
            self._bare[features] = arguments
        return arguments

    def _key(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], features: tuple[str, ...]
    ) -> Hashable:
        defaults: list[Hashable]
        given: tuple[Any, ...] = (*args, *kwargs.values())
        if self._signature is None:
            defaults = [None]
            places, given = [(0, "arguments")], ([args, kwargs],)
        else:
            shape = (len(args), features, *kwargs)
            defaults, places = self._bindings.get(shape) or self._bind(args, kwargs, features)
        key = defaults.copy()
        value, place = None, (0, "")
        try:
            for value, place in zip(given, places, strict=True):
                key[place[0]] = _freeze(value)
            return tuple(key)
        except TypeError as error:
            raise TypeError(
                f"{self._name}: calls are grouped by the values of their extra arguments, and "
                f"{place[1]}={reprlib.repr(value)} cannot be compared: {error}"
            ) from None

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], features: tuple[str, ...]
    ) -> Binding:
        """Return the binding of all calls of the shape of this one, which is the first."""
        assert self._signature is not None
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
        gathered = bound.arguments.pop(self._var_keyword, {})  # in no order
        surplus = bound.arguments.pop(self._var_positional, ())
        order = list(self._defaults)
        places = {
            given: (order.index(name), name)
            for name, given in bound.arguments.items()
            if given is not _PLACEHOLDER
        }
        more = [
            *((number, self._var_positional) for number in surplus if number is not _PLACEHOLDER),
            *((name, name) for name in sorted(gathered) if name not in features),
        ]
        for place, (given, name) in enumerate(more, len(order) + 1):
            places[given] = place, name
        key = [*self._defaults.values(), tuple(given for given, _ in more), *more]
        binding = key, [places[given] for given in (*numbers, *names)]
        if len(self._bindings) < CACHE_LIMIT:
            self._bindings[len(args), features, *kwargs] = binding
        return binding


def _default_key(parameter: inspect.Parameter) -> Hashable:
    """Return the key of a parameter left out.

    It is the key of its default or, if the default cannot be compared, a key of its own.
    """
    try:
        # a default that the function may have changed equals no passed argument
        if type(parameter.default) not in (list, dict, set):
            return _freeze(parameter.default)
    except TypeError:
        pass
    return (inspect.Parameter, id(parameter.default))


def _freeze(value: Any) -> Hashable:
    """Return a key that equals another one only if type and content are equal.

    It is valid as long as `value` exists.

    Raises:
        TypeError: `value` has an equality, and no hash.
    """
    kind: Any = type(value)
    if kind in PLAIN:
        return kind, value
    if kind.__eq__ is object.__eq__:
        return kind, id(value)
    if kind in (list, tuple) or _is_namedtuple(kind):
        return kind, tuple(map(_freeze, value))
    if kind in (set, frozenset):
        return kind, frozenset(map(_freeze, value))
    if kind is dict:
        return kind, tuple((_freeze(key), _freeze(item)) for key, item in value.items())
    if kind is float:
        return kind, value.hex()  # tells -0.0 from 0.0, and lets nan equal itself
    if kind is types.MethodType:
        return kind, id(value.__self__), id(value.__func__)
    if kind.__hash__ is not None and hasattr(kind, "__dlpack__"):  # a tensor: compares elements
        return kind, id(value)
    hash(value)
    # two equal numbers or dates may differ: 0j and -0j, one moment in two time zones
    return kind, value, repr(value) if kind.__flags__ & _IMMUTABLE_TYPE else None


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


def _is_small(value: Any) -> bool:
    """Return whether `value` and all its contents are small and plain."""
    kind = type(value)
    if kind in (str, bytes):
        return len(value) <= MAX_KEPT
    if kind in (list, tuple, set, frozenset):
        return len(value) <= MAX_KEPT and all(map(_is_small, value))
    if kind is dict:
        return len(value) <= MAX_KEPT and all(map(_is_small, chain.from_iterable(value.items())))
    if issubclass(kind, (enum.Enum, type)):
        return True
    if not kind.__flags__ & _IMMUTABLE_TYPE or hasattr(kind, "__dlpack__"):
        return False
    return sys.getsizeof(value, MAX_KEPT + 1) <= MAX_KEPT  # numbers, dates, dtypes


def _is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_make")
