"""Decorated functions that work in steps, and their decorators.

Their calls join and leave a run one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    overload,
)

from .._core.policy import BatchPolicy
from .._steps.rows import Rows
from .._steps.stream import Pieces, Stream
from .batched import AsyncBatched, Batched, BatchedCallable, P, T, U
from .decorator import A, R, S, make_decorator
from .decorator import P as Q
from .method import BatchedMethod
from .requests import MISSING
from .settings import Options, Steps

V = TypeVar("V")

if TYPE_CHECKING:
    from .decorator import Function, Method, Prepare
    from .settings import StepSettings
    from .unpacked import MaybeAwaitable

    AnyRows: TypeAlias = (
        Callable[Concatenate[Rows[Any, U, V], Q], R]
        | Callable[Concatenate[Any, Rows[Any, U, V], Q], R]
    )
    """A function of rows whose items `prepare` returns, or a method."""

_OPTIONS = Options(BatchPolicy(flush="eager"), steps=Steps(), on_oom="split")

# See decorator.py.
# mypy: disable-error-code="overload-overlap"


class _Streaming(BatchedCallable[T, U, P], Generic[T, U, V, P]):
    """The calls that threads and coroutines share."""

    def stream(self, item: T = MISSING, /, *args: P.args, **kwargs: P.kwargs) -> Stream[V, U]:
        """Return the pieces that the function emits for `item`, which is always one item.

        The call begins now. The stream is read by `for`, or by `async for` on any event loop.

        Raises:
            BatcherClosed: the batcher was shut down.
            QueueFull: there is no room for the item, with `on_full="raise"`.
        """
        steps = self._function.options.steps
        assert steps is not None
        pieces = Pieces(steps.max_pieces)
        return Stream(pieces, self._submit(item, args, kwargs, pieces=pieces))

    if TYPE_CHECKING:

        def with_options(self, **settings: Unpack[StepSettings]) -> Self: ...  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]


class Continuous(_Streaming[T, U, V, P], Batched[T, U, P]):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A function that works in steps, which threads call and wait for."""


class AsyncContinuous(_Streaming[T, U, V, P], AsyncBatched[T, U, P]):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A function that works in steps, which coroutines await."""


class Continuously:
    """Type of a decorator."""

    @overload
    def continuously(self, **settings: Unpack[StepSettings]) -> Self: ...
    @overload
    def continuously(
        self, *, prepare: Prepare[A], **settings: Unpack[StepSettings]
    ) -> Callable[[AnyRows[U, V, Q, None]], Continuous[A, U, V, Q]]: ...
    @overload
    def continuously(self, func: Function[Rows[T, U, V], Q, None], /) -> Continuous[T, U, V, Q]: ...
    @overload
    def continuously(
        self, func: Method[S, Rows[T, U, V], Q, None], /
    ) -> BatchedMethod[S, Continuous[T, U, V, Q]]: ...
    def continuously(self, *_: Any, **__: Any) -> Any:
        """Batch a function that works in steps: calls join and leave between its steps.

        Models that write token by token, solvers and simulations need different numbers of steps
        for different items. A batch that is formed once ends with its slowest item. Here each
        caller is answered as soon as its own item is done, and calls that wait take the free
        places.

        The function gets `batched.Rows` and runs until `rows` is false::

            while rows:
                for row in rows.join(): ...     # add row.item to the state
                ...                             # one step; row.emit(piece), row.finish(result)
                ...                             # remove the places that rows.leave() returns

        Callers call it for one item, as any batched function; `fn.stream(item)` returns the pieces.
        An error that the function raises reaches the callers of all live rows; `row.fail(error)`
        fails one row. All rows of one call of the function have equal extra arguments.

        These settings are the same as for `batched.dynamically`: `small_batch_threshold`,
        `max_queue_size`, `on_full`, `queue_timeout_ms`, `prepare`, `prepare_threads`, `length`,
        `on_batch` and `name`.

        Args:
            batch_size: most live rows; 32.
            max_batch_tokens: largest product of the live rows and their greatest length; None.
            max_concurrent_batches: calls of the function that run at once, each in its own thread
                and with rows of its own; 1.
            on_oom: treatment of rows if a step runs out of memory. "split": they run again from
                their start, fewer at once; if its reader has got pieces, a row gets the error.
                "raise": all rows get the error; "split".
            max_pieces: most pieces of text that wait for the reader of a stream; 64.

        Raises:
            TypeError, ValueError: at decoration, for a setting or a function that cannot work.
        """

    __call__ = continuously


class AsyncContinuously:
    """Type of a decorator."""

    @overload
    def continuously(self, **settings: Unpack[StepSettings]) -> Self: ...
    @overload
    def continuously(
        self, *, prepare: Prepare[A], **settings: Unpack[StepSettings]
    ) -> Callable[[AnyRows[U, V, Q, MaybeAwaitable[None]]], AsyncContinuous[A, U, V, Q]]: ...
    @overload
    def continuously(
        self, func: Function[Rows[T, U, V], Q, MaybeAwaitable[None]], /
    ) -> AsyncContinuous[T, U, V, Q]: ...
    @overload
    def continuously(
        self, func: Method[S, Rows[T, U, V], Q, MaybeAwaitable[None]], /
    ) -> BatchedMethod[S, AsyncContinuous[T, U, V, Q]]: ...
    def continuously(self, *_: Any, **__: Any) -> Any:
        """Batch a function that works in steps, for callers that await it.

        All settings of `batched.continuously` are accepted: batch_size=32, small_batch_threshold=8,
        prepare=None, prepare_threads=8, length=None, max_batch_tokens=None, max_queue_size=None,
        on_full="wait", queue_timeout_ms=None, max_concurrent_batches=1, on_oom="split",
        on_batch=None, name=None, max_pieces=64.
        """

    __call__ = continuously


continuously = make_decorator("batched", Continuous, Continuously().continuously, _OPTIONS)
async_continuously = make_decorator(
    "batched.aio", AsyncContinuous, AsyncContinuously().continuously, _OPTIONS
)
