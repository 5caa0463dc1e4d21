"""A batched method as its class has it."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from ._requests import MISSING

if TYPE_CHECKING:
    from typing import Self

S = TypeVar("S")
F = TypeVar("F")


class BatchedMethod(Generic[S, F]):
    """A batched method as its class has it: an instance's is bound and has its own batcher,
    `Class.method(instance, ...)` uses that.
    """

    def __init__(self, function: Any) -> None:
        self.function = function  # the batched function that binds
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self.__wrapped__ = function.__wrapped__
        self.__annotations__ = function.__annotations__

    @overload
    def __get__(
        self: BatchedMethod[type[Any], F], instance: object, owner: type | None = None
    ) -> F: ...  # what mypy makes of class methods
    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: S, owner: type | None = None) -> F: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Self | F:
        bound: F = self.function.__get__(instance, owner)
        return bound

    # With `instance: S`, pyright would find that a method does not match that of a protocol: it
    # compares what the class has.
    def __call__(self, instance: Any = MISSING, /, *args: Any, **kwargs: Any) -> Any:
        if instance is MISSING:
            raise TypeError(
                f"{self.__qualname__} is a method: call it on an instance, or pass one first"
            )
        return type(self.function)(self, instance)(*args, **kwargs)

    def __reduce__(self) -> str:
        return importable_name(self, self.function._held_as) or self.__qualname__

    def __getattr__(self, name: str) -> Any:
        # what it is called, and whether it is a coroutine function
        if name.startswith("__") and "function" in self.__dict__:
            return getattr(self.function, name)
        raise AttributeError(
            f"{name!r} belongs to the batched method of an instance, and this is {self!r}"
        )

    def __repr__(self) -> str:
        return f"<batched method of a class, {self.__qualname__}>"


def importable_name(thing: Any, held_as: str) -> str | None:
    """The dotted name by which `thing` is found in its module: that of the function, that of the
    class attribute that it is `held_as`, or one that it was assigned to; None if there is none.
    """
    module = sys.modules.get(thing.__module__)
    assigned = [name for name, value in vars(module).items() if value is thing] if module else []
    own: str = thing.__qualname__
    for name in (own, held_as, *assigned):
        try:
            if attrgetter(name)(module) is thing:
                return name
        except AttributeError:
            pass
    return None
