"""A batched method as its class has it."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Generic, Self, TypeVar, overload

S_co = TypeVar("S_co", covariant=True)
F_co = TypeVar("F_co", covariant=True)


class BatchedMethod(Generic[S_co, F_co]):
    """A batched method as its class has it: unbound.

    Access on an instance binds it, and gives the instance a batcher of its own.
    `Class.method(instance, ...)` calls the method of that instance.
    """

    __slots__ = ("__dict__", "__weakref__", "function")  # functools.wraps copies `__dict__`

    def __init__(self, function: Any) -> None:
        self.function = function  # the batched function that binds
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    @overload
    def __get__(
        self: BatchedMethod[type[Any], F_co], instance: object, owner: type | None = None
    ) -> F_co: ...  # the type that mypy gives a class method
    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> F_co: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Self | F_co:
        bound: F_co = self.function.__get__(instance, owner)
        return bound

    # With `instance: S_co`, a method would not match that of a protocol for pyright, which compares
    # the attributes of the class.
    def __call__(self, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        return type(self.function)(self, instance)(*args, **kwargs)

    def __set_name__(self, owner: type, name: str) -> None:
        self.function.__set_name__(owner, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return attrgetter("of_class"), (self.function,)

    def __getattr__(self, name: str) -> Any:
        # for example its name, and the flags of a coroutine function
        if name.startswith("__"):
            return getattr(self.function, name)
        raise AttributeError(f"{self!r} has no {name!r}; the method of an instance has")

    def __repr__(self) -> str:
        return f"<batched method of a class, {self.__qualname__}>"
