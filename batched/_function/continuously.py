"""The decorators of functions that work in steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
)

from .._core.policy import BatchPolicy
from .._steps.rows import Rows
from .continuous import AsyncContinuous, Continuous
from .decorator import decorate, typed_as
from .method import BatchedMethod
from .requests import MISSING
from .settings import Options, Steps, StepSettings

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")
S = TypeVar("S")
A = TypeVar("A")

if TYPE_CHECKING:
    from typing import Unpack

    from .decorator import Prepare

    OfRows: TypeAlias = (
        Callable[Concatenate[Rows[T, U, V], P], None]
        | classmethod[Any, Concatenate[Rows[T, U, V], P], None]
    )
    """A function of rows, or a class method."""
    MaybeAwaitable: TypeAlias = Awaitable[None] | None

_OPTIONS = Options(BatchPolicy(flush="eager"), steps=Steps(), on_oom="split")

# See decorator.py.
# mypy: disable-error-code="overload-overlap"


class Continuously:
    """Type of a decorator."""

    @overload
    def continuously(self, /, **settings: Unpack[StepSettings]) -> Continuously: ...
    @overload
    def continuously(
        self, /, *, prepare: Prepare[A], **settings: Unpack[StepSettings]
    ) -> PreparedContinuously[A]: ...
    @overload
    def continuously(self, func: OfRows[T, U, V, P], /) -> Continuous[T, U, V, P]: ...
    @overload
    def continuously(
        self, func: Callable[Concatenate[S, Rows[T, U, V], P], None], /
    ) -> BatchedMethod[S, Continuous[T, U, V, P]]: ...
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
    def continuously(self, /, **settings: Unpack[StepSettings]) -> AsyncContinuously: ...
    @overload
    def continuously(
        self, /, *, prepare: Prepare[A], **settings: Unpack[StepSettings]
    ) -> AsyncPreparedContinuously[A]: ...
    @overload
    def continuously(
        self, func: Callable[Concatenate[Rows[T, U, V], P], MaybeAwaitable], /
    ) -> AsyncContinuous[T, U, V, P]: ...
    @overload
    def continuously(
        self, func: Callable[Concatenate[S, Rows[T, U, V], P], MaybeAwaitable], /
    ) -> BatchedMethod[S, AsyncContinuous[T, U, V, P]]: ...
    def continuously(self, *_: Any, **__: Any) -> Any:
        """Batch a function that works in steps, for callers that await it.

        All settings of `batched.continuously` are accepted: batch_size=32, small_batch_threshold=8,
        prepare=None, prepare_threads=8, length=None, max_batch_tokens=None, max_queue_size=None,
        on_full="wait", queue_timeout_ms=None, max_concurrent_batches=1, on_oom="split",
        on_batch=None, name=None, max_pieces=64.
        """

    __call__ = continuously


class PreparedContinuously(Protocol[A]):
    """Type of a decorator with `prepare`, whose argument callers pass instead of items."""

    @overload
    def __call__(self, func: OfRows[Any, U, V, P], /) -> Continuous[A, U, V, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, Rows[Any, U, V], P], None], /
    ) -> BatchedMethod[S, Continuous[A, U, V, P]]: ...


class AsyncPreparedContinuously(Protocol[A]):
    """Type as `PreparedContinuously`, for functions that are awaited."""

    @overload
    def __call__(
        self, func: Callable[Concatenate[Rows[Any, U, V], P], MaybeAwaitable], /
    ) -> AsyncContinuous[A, U, V, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, Rows[Any, U, V], P], MaybeAwaitable], /
    ) -> BatchedMethod[S, AsyncContinuous[A, U, V, P]]: ...


@typed_as(Continuously().continuously, _OPTIONS)
def continuously(func: Any = MISSING, /, **settings: Any) -> Any:
    return decorate(continuously, Continuous, _OPTIONS, func, settings)


@typed_as(AsyncContinuously().continuously, _OPTIONS)
def async_continuously(func: Any = MISSING, /, **settings: Any) -> Any:
    return decorate(async_continuously, AsyncContinuous, _OPTIONS, func, settings)
