"""Types of outputs, of functions of tuples (`unpack`), and of their decorators.

The functions themselves are `Batched` and `AsyncBatched`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, TypeVarTuple, overload

from .batched import AsyncBatched, Batched, P, T, U

U_co = TypeVar("U_co", covariant=True)
V_co = TypeVar("V_co", covariant=True)
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
Q = ParamSpec("Q")
Ts = TypeVarTuple("Ts")

# See decorator.py. Parts are arguments here, so these calls do not fit the calls of the base class,
# and mypy ("misc") does not see that `*args: Any` takes them.
# mypy: disable-error-code="overload-overlap, override, assignment, misc"
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false


class Outputs(Protocol[U_co]):
    """Output of a batch function: a list, tuple, array or tensor with one entry per item."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> U_co: ...


MaybeAwaitable: TypeAlias = Awaitable[U] | U
"""What a function, or a coroutine function, returns."""


class Call(Protocol[T, U_co, V_co, P]):
    """A call with the parts of one tuple, or with a list of tuples."""

    @overload
    def __call__(self, items: list[T], /, *args: P.args, **kwargs: P.kwargs) -> V_co: ...
    @overload
    def __call__(self: Call[tuple[*Ts], U_co, V_co, P], *parts: *Ts, **kwargs: Any) -> U_co: ...


AsyncCall: TypeAlias = Call[T, Coroutine[Any, Any, U], Coroutine[Any, Any, list[U]], P]


class Unpacked(Batched[T, U, P]):
    """A function of tuples, for threads."""

    __call__: Call[T, U, list[U], P]
    acall: AsyncCall[T, U, P]


class AsyncUnpacked(AsyncBatched[T, U, P]):
    """A function of tuples, for coroutines."""

    __call__: AsyncCall[T, U, P]
    acall: AsyncCall[T, U, P]


# functions of two, three or four lists, and methods
Two: TypeAlias = (
    Callable[Concatenate[list[A], list[B], Q], U]
    | Callable[Concatenate[Any, list[A], list[B], Q], U]
)
Three: TypeAlias = (
    Callable[Concatenate[list[A], list[B], list[C], Q], U]
    | Callable[Concatenate[Any, list[A], list[B], list[C], Q], U]
)
Four: TypeAlias = (
    Callable[Concatenate[list[A], list[B], list[C], list[D], Q], U]
    | Callable[Concatenate[Any, list[A], list[B], list[C], list[D], Q], U]
)


class Unpacking(Protocol):
    """Type of a decorator with `unpack`."""

    @overload
    def __call__(
        self, func: Four[A, B, C, D, Q, Outputs[U]], /
    ) -> Unpacked[tuple[A, B, C, D], U, Q]: ...
    @overload
    def __call__(
        self, func: Three[A, B, C, Q, Outputs[U]], /
    ) -> Unpacked[tuple[A, B, C], U, Q]: ...
    @overload
    def __call__(self, func: Two[A, B, Q, Outputs[U]], /) -> Unpacked[tuple[A, B], U, Q]: ...


class AsyncUnpacking(Protocol):
    """Type of an `aio` decorator with `unpack`."""

    @overload
    def __call__(
        self, func: Four[A, B, C, D, Q, MaybeAwaitable[Outputs[U]]], /
    ) -> AsyncUnpacked[tuple[A, B, C, D], U, Q]: ...
    @overload
    def __call__(
        self, func: Three[A, B, C, Q, MaybeAwaitable[Outputs[U]]], /
    ) -> AsyncUnpacked[tuple[A, B, C], U, Q]: ...
    @overload
    def __call__(
        self, func: Two[A, B, Q, MaybeAwaitable[Outputs[U]]], /
    ) -> AsyncUnpacked[tuple[A, B], U, Q]: ...
