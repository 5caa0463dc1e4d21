"""Types of outputs, of functions of tuples (`unpack`), and of their decorators.

The functions themselves are `Batched` and `AsyncBatched`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, TypeVarTuple, overload

from .batched import AsyncBatched, Batched, P
from .method import BatchedMethod

T = TypeVar("T")
U = TypeVar("U")
S = TypeVar("S")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
Q = ParamSpec("Q")
Ts = TypeVarTuple("Ts")
Row_co = TypeVar("Row_co", covariant=True)

# See decorator.py. Parts are arguments here, so these calls do not fit the calls of the base class,
# and mypy ("misc") does not see that `*args: Any` takes them.
# mypy: disable-error-code="overload-overlap, override, assignment, misc"
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false


class Outputs(Protocol[Row_co]):
    """Output of a batch function: a list, tuple, array or tensor with one entry per item."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row_co: ...


MaybeAwaitableOutputs: TypeAlias = Awaitable[Outputs[U]] | Outputs[U]
"""Outputs, or an awaitable of outputs."""


class Unpacked(Batched[T, U, P]):
    """A function of tuples, for threads."""

    @overload
    def __call__(self, items: list[T], /, *args: P.args, **kwargs: P.kwargs) -> list[U]: ...
    @overload
    def __call__(self: Unpacked[tuple[*Ts], U, P], *parts: *Ts, **kwargs: Any) -> U: ...
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    async def acall(self, items: list[T], /, *args: P.args, **kwargs: P.kwargs) -> list[U]: ...
    @overload
    async def acall(self: Unpacked[tuple[*Ts], U, P], *parts: *Ts, **kwargs: Any) -> U: ...
    async def acall(self: Any, *args: Any, **kwargs: Any) -> Any: ...


class AsyncUnpacked(AsyncBatched[T, U, P]):
    """A function of tuples, for coroutines."""

    @overload
    async def acall(self, items: list[T], /, *args: P.args, **kwargs: P.kwargs) -> list[U]: ...
    @overload
    async def acall(self: AsyncUnpacked[tuple[*Ts], U, P], *parts: *Ts, **kwargs: Any) -> U: ...
    async def acall(self: Any, *args: Any, **kwargs: Any) -> Any: ...

    __call__ = acall


class Unpacking(Protocol):
    """Type of a decorator with `unpack`."""

    @overload
    def __call__(
        self, func: Callable[Concatenate[list[A], list[B], list[C], list[D], Q], Outputs[U]], /
    ) -> Unpacked[tuple[A, B, C, D], U, Q]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[list[A], list[B], list[C], Q], Outputs[U]], /
    ) -> Unpacked[tuple[A, B, C], U, Q]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[list[A], list[B], Q], Outputs[U]], /
    ) -> Unpacked[tuple[A, B], U, Q]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, list[A], list[B], list[C], list[D], Q], Outputs[U]], /
    ) -> BatchedMethod[S, Unpacked[tuple[A, B, C, D], U, Q]]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, list[A], list[B], list[C], Q], Outputs[U]], /
    ) -> BatchedMethod[S, Unpacked[tuple[A, B, C], U, Q]]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, list[A], list[B], Q], Outputs[U]], /
    ) -> BatchedMethod[S, Unpacked[tuple[A, B], U, Q]]: ...


class AsyncUnpacking(Protocol):
    """Type of an `aio` decorator with `unpack`."""

    @overload
    def __call__(
        self,
        func: Callable[
            Concatenate[list[A], list[B], list[C], list[D], Q], MaybeAwaitableOutputs[U]
        ],
        /,
    ) -> AsyncUnpacked[tuple[A, B, C, D], U, Q]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[list[A], list[B], list[C], Q], MaybeAwaitableOutputs[U]], /
    ) -> AsyncUnpacked[tuple[A, B, C], U, Q]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[list[A], list[B], Q], MaybeAwaitableOutputs[U]], /
    ) -> AsyncUnpacked[tuple[A, B], U, Q]: ...
    @overload
    def __call__(
        self,
        func: Callable[
            Concatenate[S, list[A], list[B], list[C], list[D], Q], MaybeAwaitableOutputs[U]
        ],
        /,
    ) -> BatchedMethod[S, AsyncUnpacked[tuple[A, B, C, D], U, Q]]: ...
    @overload
    def __call__(
        self,
        func: Callable[Concatenate[S, list[A], list[B], list[C], Q], MaybeAwaitableOutputs[U]],
        /,
    ) -> BatchedMethod[S, AsyncUnpacked[tuple[A, B, C], U, Q]]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, list[A], list[B], Q], MaybeAwaitableOutputs[U]], /
    ) -> BatchedMethod[S, AsyncUnpacked[tuple[A, B], U, Q]]: ...
