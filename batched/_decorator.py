"""The decorators, and their types: what a function must look like, and what becomes of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from ._batched import AsyncBatched, Batched, BatchedMethod
from ._batcher import MISSING, BatchFunction, Options, Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
S = TypeVar("S")
Row_co = TypeVar("Row_co", covariant=True)


class Rows(Protocol[Row_co]):
    """What a batch function returns: a list, tuple, array or tensor with one entry per item."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row_co: ...


class _Decorator:
    """The state of a decorator: its settings."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def _updated(self, more: tuple[object, ...], settings: Settings) -> Options:
        if more:
            raise TypeError(f"settings are passed by keyword, got {', '.join(map(repr, more))}")
        return self._options.updated(settings)

    def _face(self, face: Callable[[BatchFunction], Any], func: object, options: Options, *, coroutines: bool) -> Any:
        if isinstance(func, (Batched, AsyncBatched, BatchedMethod)):
            raise TypeError(f"{func!r} is batched already; for other settings use its with_options")
        return face(BatchFunction.of(func, options, coroutines=coroutines))


# A function whose first two parameters are lists is a function as well as a method; checkers take the first overload that
# fits, the function. The overloads with `...` are for functions with `**kwargs`, of which mypy can keep no parameters.
# mypy: disable-error-code="overload-overlap"


class Dynamically(_Decorator):
    """Makes a function that takes a list callable for one item at a time, from any thread: calls that come together run together.

    `@dynamically` or, with settings, `@dynamically(batch_size=64, ...)`; on functions and methods, above `@classmethod`,
    above or below `@staticmethod`. The function must return one result per item, in order: a list, tuple, array or tensor.

    Settings:
        batch_size: most items in one batch; 32.
        timeout_ms: longest an item is held to wait for others, in milliseconds; 5.0.
        small_batch_threshold: calls of at most this many items go first; 8.
        flush: when a batch that is not full leaves: "auto" or "eager" (as soon as a worker is free), "window" (when its
            oldest item is `timeout_ms` old); "auto".
        max_concurrent_batches: batches running at once, each in a thread of its own; 1.
        name: for messages and thread names; the function's qualified name.

    Raises:
        TypeError, ValueError: at decoration, for a setting or a function that cannot work.
    """

    @overload
    def __call__(self, func: Callable[Concatenate[list[T], P], Rows[U]], /) -> Batched[T, U, P]: ...
    @overload
    def __call__(self, func: Callable[Concatenate[S, list[T], P], Rows[U]], /) -> BatchedMethod[S, Batched[T, U, P]]: ...
    @overload
    def __call__(self, func: classmethod[S, Concatenate[list[T], P], Rows[U]], /) -> Batched[T, U, P]: ...
    @overload
    def __call__(self, func: Callable[Concatenate[list[T], ...], Rows[U]], /) -> Batched[T, U, ...]: ...
    @overload
    def __call__(self, /, **settings: Unpack[Settings]) -> Dynamically: ...
    def __call__(self, func: Any = MISSING, /, *more: Any, **settings: Unpack[Settings]) -> Any:
        options = self._updated(more, settings)
        return Dynamically(options) if func is MISSING else self._face(Batched, func, options, coroutines=False)


class AsyncDynamically(_Decorator):
    """As `batched.dynamically`, with the same settings, for functions that coroutines await: `await fn(item)`.

    A coroutine function runs on the event loop of its callers (asyncio, uvloop or trio), in one queue per loop. A plain
    function runs in a thread of its own, so that the loop never blocks, and serves any number of loops.
    """

    @overload
    def __call__(self, func: Callable[Concatenate[list[T], P], Awaitable[Rows[U]]], /) -> AsyncBatched[T, U, P]: ...
    @overload
    def __call__(self, func: Callable[Concatenate[list[T], P], Rows[U]], /) -> AsyncBatched[T, U, P]: ...
    @overload
    def __call__(self, func: Callable[Concatenate[S, list[T], P], Awaitable[Rows[U]]], /) -> BatchedMethod[S, AsyncBatched[T, U, P]]: ...
    @overload
    def __call__(self, func: Callable[Concatenate[S, list[T], P], Rows[U]], /) -> BatchedMethod[S, AsyncBatched[T, U, P]]: ...
    @overload
    def __call__(self, func: classmethod[S, Concatenate[list[T], P], Awaitable[Rows[U]]], /) -> AsyncBatched[T, U, P]: ...
    @overload
    def __call__(self, func: classmethod[S, Concatenate[list[T], P], Rows[U]], /) -> AsyncBatched[T, U, P]: ...
    @overload
    def __call__(self, func: Callable[Concatenate[list[T], ...], Awaitable[Rows[U]]], /) -> AsyncBatched[T, U, ...]: ...
    @overload
    def __call__(self, func: Callable[Concatenate[list[T], ...], Rows[U]], /) -> AsyncBatched[T, U, ...]: ...
    @overload
    def __call__(self, /, **settings: Unpack[Settings]) -> AsyncDynamically: ...
    def __call__(self, func: Any = MISSING, /, *more: Any, **settings: Unpack[Settings]) -> Any:
        options = self._updated(more, settings)
        return AsyncDynamically(options) if func is MISSING else self._face(AsyncBatched, func, options, coroutines=True)


dynamically = Dynamically(Options())
async_dynamically = AsyncDynamically(Options())
