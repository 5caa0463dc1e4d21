"""A batched method as its class has it."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:
    from typing import Self

S = TypeVar("S")
F = TypeVar("F")


class BatchedMethod(Generic[S, F]):
    """A batched method as its class has it: an instance's is bound and has its own batcher,
    `Class.method(instance, ...)` uses that.
    """

    __slots__ = ("__dict__", "__weakref__", "function")  # functools.wraps copies `__dict__`

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
    def __call__(self, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        return type(self.function)(self, instance)(*args, **kwargs)

    def __set_name__(self, owner: type, name: str) -> None:
        self.function.__set_name__(owner, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return attrgetter("of_class"), (self.function,)

    def __getattr__(self, name: str) -> Any:
        # what it is called, and whether it is a coroutine function
        if name.startswith("__"):
            return getattr(self.function, name)
        raise AttributeError(
            f"{name!r} belongs to the batched method of an instance, and this is {self!r}"
        )

    def __repr__(self) -> str:
        return f"<batched method of a class, {self.__qualname__}>"
