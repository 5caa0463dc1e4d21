"""The decorators, and their types: what a function must look like, and what becomes of it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    get_type_hints,
    overload,
)

from ._batched import AsyncBatched, Batched
from ._batched_inference import AsyncBatchedInference, BatchedInference
from ._batcher import BatchFunction, InferenceSettings, Options, Settings
from ._collate.settings import FeatureSettings
from ._core.policy import BatchPolicy
from ._method import BatchedMethod
from ._requests import MISSING

if TYPE_CHECKING:
    from typing import Unpack

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
S = TypeVar("S")
Row_co = TypeVar("Row_co", covariant=True)

_FEATURES = Options(features=FeatureSettings(), on_oom="split")


class Rows(Protocol[Row_co]):
    """Output of a batch function: a list, tuple, array or tensor with one entry per item."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row_co: ...


MaybeAwaitableRows: TypeAlias = Awaitable[Rows[U]] | Rows[U]
"""Rows that a batch function returns, or that awaiting its coroutine gives."""


class _Decorator:
    """A decorator with its settings."""

    _name: ClassVar[str]
    _face: ClassVar[type[Any]]
    """The class of what it makes of a function."""
    _defaults: ClassVar[Options]

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or self._defaults

    def _apply(self, func: object, more: tuple[object, ...], settings: Mapping[str, Any]) -> Any:
        """The decorated function or, without one, the decorator with `settings`."""
        if more:
            raise TypeError(f"settings are passed by keyword, got {', '.join(map(repr, more))}")
        options = self._options.updated(settings)
        if func is MISSING:
            return type(self)(options)
        if isinstance(func, (Batched, AsyncBatched, BatchedMethod)):
            raise TypeError(f"{func!r} is batched already; for other settings use its with_options")
        coroutines = issubclass(self._face, AsyncBatched)
        function = BatchFunction.of(func, options, coroutines=coroutines)
        decorated = self._face(function)
        # a decorator above a method calls it with the instance first
        return decorated.of_class if function.kind == "method" else decorated

    @property
    def __signature__(self) -> inspect.Signature:
        """The settings by keyword, each with its type and its value if it is not passed."""
        types = {
            name: kind
            for part in (BatchPolicy, FeatureSettings, Options)
            for name, kind in get_type_hints(part).items()
        }
        func = inspect.Parameter("func", inspect.Parameter.POSITIONAL_ONLY, default=MISSING)
        settings = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=types[name]
            )
            for name, value in self._options.settings().items()
        ]
        return inspect.Signature([func, *settings])

    def __repr__(self) -> str:
        return f"<{self._name}>"


# A function whose first two parameters are lists is a function as well as a method; checkers take
# the first overload that fits, the function. The overloads with `...` are for functions with
# `**kwargs`, of which mypy can keep no parameters.
# mypy: disable-error-code="overload-overlap"


class Dynamically(_Decorator):
    """Makes a function that takes a list callable for one item at a time, from any thread: calls
    that come together run together.

    `@dynamically` or, with settings, `@dynamically(batch_size=64, ...)`; on functions and methods,
    above `@classmethod`, above or below `@staticmethod`. The function must return one result per
    item, in order: a list, tuple, array or tensor.

    Settings:
        batch_size: most items in one batch; 32.
        timeout_ms: longest an item is held to wait for others, in milliseconds; 5.0.
        small_batch_threshold: calls of at most this many items go first; 8.
        flush: when a batch that is not full leaves: "auto" (when everyone is there or waiting no
            longer pays, as it learns from what it sees), "eager" (as soon as a worker is free),
            "window" (when its oldest item is `timeout_ms` old); "auto".
        length: how long an item is, a function of it; of more items than fit, those of like length
            run together; None.
        max_batch_tokens: most items times the longest of them in one batch; without `length`, that
            is `len`; None.
        max_queue_size: most items waiting in the queue; a larger call enters when it is empty;
            None.
        on_full: what a caller gets when the queue is full: "wait", its turn, first come, first
            served, or "raise", `QueueFull`; "wait".
        queue_timeout_ms: a call of which nothing has begun to run after this many milliseconds ends
            with `QueueTimeout`; None.
        max_concurrent_batches: batches running at once, each in a thread of its own; 1.
        prefetch: batches formed and collated while others run, to be ready when the function
            returns; 0.
        on_oom: "split" runs a batch that ran out of memory again in smaller ones; "raise".
        isolate_errors: a batch that failed is run again in halves, until the items that fail stand
            alone (13 calls of the function for one in 64), and the others get their results; False.
        on_batch: an observer, called with a `BatchRecord` of every batch after its callers were
            answered; None.
        name: for messages and thread names; the function's qualified name.

    Raises:
        TypeError, ValueError: at decoration, for a setting or a function that cannot work.
    """

    _name = "batched.dynamically"
    _face = Batched
    _defaults = Options()

    @overload
    def __call__(self, func: Callable[Concatenate[list[T], P], Rows[U]], /) -> Batched[T, U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, list[T], P], Rows[U]], /
    ) -> BatchedMethod[S, Batched[T, U, P]]: ...
    @overload
    def __call__(
        self, func: classmethod[S, Concatenate[list[T], P], Rows[U]], /
    ) -> Batched[T, U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[list[T], ...], Rows[U]], /
    ) -> Batched[T, U, ...]: ...
    @overload
    def __call__(self, /, **settings: Unpack[Settings]) -> Dynamically: ...
    def __call__(self, func: Any = MISSING, /, *more: Any, **settings: Unpack[Settings]) -> Any:
        return self._apply(func, more, settings)


class AsyncDynamically(_Decorator):
    """As `batched.dynamically`, with the same settings, for functions that coroutines await: `await
    fn(item)`.

    A coroutine function runs on the event loop of its callers (asyncio, uvloop or trio), in one
    queue per loop. A plain function runs in a thread of its own, so that the loop never blocks, and
    serves any number of loops.
    """

    _name = "batched.aio.dynamically"
    _face = AsyncBatched
    _defaults = Options()

    @overload
    def __call__(
        self, func: Callable[Concatenate[list[T], P], MaybeAwaitableRows[U]], /
    ) -> AsyncBatched[T, U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, list[T], P], MaybeAwaitableRows[U]], /
    ) -> BatchedMethod[S, AsyncBatched[T, U, P]]: ...
    @overload
    def __call__(
        self, func: classmethod[S, Concatenate[list[T], P], MaybeAwaitableRows[U]], /
    ) -> AsyncBatched[T, U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[list[T], ...], MaybeAwaitableRows[U]], /
    ) -> AsyncBatched[T, U, ...]: ...
    @overload
    def __call__(self, /, **settings: Unpack[Settings]) -> AsyncDynamically: ...
    def __call__(self, func: Any = MISSING, /, *more: Any, **settings: Unpack[Settings]) -> Any:
        return self._apply(func, more, settings)


class InferenceDynamically(_Decorator):
    """Makes a function of padded features callable for any number of rows, from any thread: calls
    that come together run together.

    The function takes a dict of arrays or tensors, features with one row per item, and returns
    arrays or tensors with one row per item, in a tuple, list, dict, dataclass or `ModelOutput` if
    there are several. A caller passes a mapping of features, or features by keyword, and gets what
    the function would have returned for them alone: same structure, same rows, as long as its own
    were.

    Settings, besides those of `batched.dynamically`:
        pad_token: what fills short rows, by name of the feature; 0 for those not named.
            `pad_tokens` is another spelling.
        padding_side: the side on which rows are filled, "right" or "left"; "right".
        pad_to_multiple_of: rows of token ids and masks, what is as long as they are, and all rows
            that are padded, get a length that is a multiple of this; 1.
        unpad: how outputs are cut to the lengths of the caller's rows: "auto", by what is learned
            of them; False, not at all; or as declared, `{"last_hidden_state": {1: "input_ids"}}`,
            where "" is the whole output; "auto".
        spread_kwargs: call `func(**features)` instead of `func(features)`; False.
        device: where the function gets its features, as tensors; None, where the callers' are.
        output_device: where callers get their results; None, where the function leaves them.
        length: as in `batched.dynamically`, of one row as a dict; by default the length of its
            token ids, or else the longest.
        on_oom: "split", or "raise" for no second attempt; "split".

    Raises:
        TypeError, ValueError: at decoration, for a setting or a function that cannot work.
    """

    _name = "batched.inference.dynamically"
    _face = BatchedInference
    _defaults = _FEATURES

    @overload
    def __call__(
        self, func: Callable[Concatenate[dict[str, Any], P], U], /
    ) -> BatchedInference[U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, dict[str, Any], P], U], /
    ) -> BatchedMethod[S, BatchedInference[U, P]]: ...
    @overload
    def __call__(
        self, func: classmethod[S, Concatenate[dict[str, Any], P], U], /
    ) -> BatchedInference[U, P]: ...
    @overload
    def __call__(
        self, /, *, spread_kwargs: Literal[True], **settings: Unpack[InferenceSettings]
    ) -> SpreadDynamically: ...
    @overload
    def __call__(
        self, /, *, spread_kwargs: Literal[False] = False, **settings: Unpack[InferenceSettings]
    ) -> InferenceDynamically: ...
    def __call__(self, func: Any = MISSING, /, *more: Any, **settings: Any) -> Any:
        return self._apply(func, more, settings)


class AsyncInferenceDynamically(_Decorator):
    """As `batched.inference.dynamically`, with the same settings, for functions that coroutines
    await: `await fn(features)`.
    """

    _name = "batched.aio.inference.dynamically"
    _face = AsyncBatchedInference
    _defaults = _FEATURES

    @overload
    def __call__(
        self, func: Callable[Concatenate[dict[str, Any], P], Awaitable[U]], /
    ) -> AsyncBatchedInference[U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[dict[str, Any], P], U], /
    ) -> AsyncBatchedInference[U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, dict[str, Any], P], Awaitable[U]], /
    ) -> BatchedMethod[S, AsyncBatchedInference[U, P]]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, dict[str, Any], P], U], /
    ) -> BatchedMethod[S, AsyncBatchedInference[U, P]]: ...
    @overload
    def __call__(
        self, func: classmethod[S, Concatenate[dict[str, Any], P], Awaitable[U]], /
    ) -> AsyncBatchedInference[U, P]: ...
    @overload
    def __call__(
        self, func: classmethod[S, Concatenate[dict[str, Any], P], U], /
    ) -> AsyncBatchedInference[U, P]: ...
    @overload
    def __call__(
        self, /, *, spread_kwargs: Literal[True], **settings: Unpack[InferenceSettings]
    ) -> AsyncSpreadDynamically: ...
    @overload
    def __call__(
        self, /, *, spread_kwargs: Literal[False] = False, **settings: Unpack[InferenceSettings]
    ) -> AsyncInferenceDynamically: ...
    def __call__(self, func: Any = MISSING, /, *more: Any, **settings: Any) -> Any:
        return self._apply(func, more, settings)


class SpreadDynamically(Protocol):
    """What type checkers see of a decorator for functions that take features by keyword, whose
    further parameters they cannot tell.
    """

    @overload
    def __call__(self, func: Callable[..., U], /) -> BatchedInference[U, ...]: ...
    @overload
    def __call__(self, func: classmethod[Any, ..., U], /) -> BatchedInference[U, ...]: ...


class AsyncSpreadDynamically(Protocol):
    """As `SpreadDynamically`, for functions that coroutines await."""

    @overload
    def __call__(self, func: Callable[..., Awaitable[U]], /) -> AsyncBatchedInference[U, ...]: ...
    @overload
    def __call__(self, func: Callable[..., U], /) -> AsyncBatchedInference[U, ...]: ...
    @overload
    def __call__(
        self, func: classmethod[Any, ..., Awaitable[U]], /
    ) -> AsyncBatchedInference[U, ...]: ...
    @overload
    def __call__(self, func: classmethod[Any, ..., U], /) -> AsyncBatchedInference[U, ...]: ...


dynamically = Dynamically()
async_dynamically = AsyncDynamically()
inference_dynamically = InferenceDynamically()
async_inference_dynamically = AsyncInferenceDynamically()
