"""The decorators, with the types of the functions they take and return."""

from __future__ import annotations

import inspect
import sys
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

from .._collate.features.settings import FeatureSettings
from .._runtime.thread import ThreadRuntime
from .batched import AsyncBatched, Batched, BatchedCallable
from .function import BatchFunction
from .inference import AsyncBatchedInference, BatchedInference
from .method import BatchedMethod
from .requests import MISSING
from .settings import InferenceSettings, Options, Settings, StepSettings

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
S = TypeVar("S")
A = TypeVar("A")
Row_co = TypeVar("Row_co", covariant=True)

if TYPE_CHECKING:
    from typing import Unpack

    # `classmethod` has no parameters at run time
    OfFeatures: TypeAlias = (
        Callable[Concatenate[dict[str, Any], P], U]
        | classmethod[Any, Concatenate[dict[str, Any], P], U]
    )
    """A function of features, or a class method."""
    OfItems: TypeAlias = (
        Callable[Concatenate[list[T], P], U] | classmethod[Any, Concatenate[list[T], P], U]
    )
    """A function of a list, or a class method."""
    Prepare: TypeAlias = Callable[[A], Any] | Callable[[Any, A], Any]
    """A `prepare` of one argument, or of an instance and one argument."""
    OfKeywords: TypeAlias = Callable[..., U] | classmethod[Any, ..., U]
    """A function of features by keyword, or a class method."""

_FEATURES = Options(features=FeatureSettings(), on_oom="split")


class Outputs(Protocol[Row_co]):
    """Output of a batch function: a list, tuple, array or tensor with one entry per item."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row_co: ...


MaybeAwaitableOutputs: TypeAlias = Awaitable[Outputs[U]] | Outputs[U]
"""Outputs, or an awaitable of outputs."""


class Decorator:
    """A decorator with its settings."""

    _face: ClassVar[type[Any]]
    """Class of the decorated function."""
    _defaults: ClassVar[Options]

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or self._defaults

    def _apply(self, func: object, settings: Mapping[str, Any]) -> Any:
        """Return the decorated function or, without a function, the decorator with `settings`."""
        options = self._options.updated(settings)
        if func is MISSING:
            return type(self)(options)
        if isinstance(func, BatchedCallable | BatchedMethod):
            raise TypeError(f"{func!r} is batched already; for other settings use its with_options")
        coroutines = issubclass(self._face, AsyncBatched)
        function = BatchFunction.of(func, options, coroutines=coroutines)
        decorated = self._face(function)
        if decorated.__module__ == "__main__":  # a notebook's `Out` may keep the replaced function
            replaced = vars(sys.modules["__main__"]).get(decorated.__qualname__)
            runtime = getattr(getattr(replaced, "_batcher", None), "runtime", None)
            if isinstance(runtime, ThreadRuntime):
                runtime.rest()
        # a decorator above a method calls it with the instance first
        return decorated.of_class if function.kind == "method" else decorated

    @property
    def __signature__(self) -> inspect.Signature:
        """Settings by keyword, each with its type and default."""
        types = get_type_hints(InferenceSettings) | get_type_hints(StepSettings)
        types |= {"prepare": Callable[[Any], Any] | None, "spread_kwargs": bool}
        func = inspect.Parameter("func", inspect.Parameter.POSITIONAL_ONLY, default=MISSING)
        settings = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=types[name]
            )
            for name, value in self._options.settings().items()
        ]
        return inspect.Signature([func, *settings])


# A function whose first two parameters are lists matches the overloads of functions and of methods;
# checkers take the first, of functions. The overloads with `...` are for functions with `**kwargs`,
# because mypy cannot keep their parameters.
# mypy: disable-error-code="overload-overlap"


class Dynamically(Decorator):
    """Decorator that makes a function of a list callable for one item, from any thread.

    Calls that arrive together run together.

    `@dynamically` or, with settings, `@dynamically(batch_size=64, ...)`; on functions and methods,
    above `@classmethod`, above or below `@staticmethod`. The function must return one result per
    item, in order: a list, tuple, array or tensor.

    Args:
        batch_size: most items in one batch; 32.
        timeout_ms: longest time for which an item is held, so that more items can join its batch,
            in milliseconds; 5.0.
        small_batch_threshold: largest size of a small call; small calls go first; 8.
        flush: rule for a batch that is not full. "auto": the batch leaves once no more callers are
            expected or waiting no longer pays, learned from earlier batches. "eager": it leaves as
            soon as a worker is free. "window": it leaves `timeout_ms` after its oldest item;
            "auto".
        prepare: the callers' half of the work, a function that returns the item for the argument of
            a call, for instance its tokens. It runs before the call is queued: in the thread of the
            caller, or in a thread of the batcher for calls from event loops, list calls and `map`.
            Its errors reach that caller alone. If the first of several parameters is `self`, it
            gets the instance, too; None.
        prepare_threads: most threads of the batcher that call `prepare`; 8.
        length: function that returns the length of an item. If more items wait than fit, items of
            like length run together; None.
        max_batch_tokens: largest product of the items of a batch and their greatest length. Without
            `length`, the length is `len`; None.
        max_queue_size: most items in the queue. A larger call enters an empty queue; None.
        on_full: treatment of a call while the queue is full. "wait": calls enter in the order of
            their arrival. "raise": the call raises `QueueFull`; "wait".
        queue_timeout_ms: longest time until a call begins to run, in milliseconds. A later call
            ends with `QueueTimeout`; None.
        max_concurrent_batches: batches that run at once, each in its own thread; 1.
        prefetch: batches that are collated while other batches run; 0.
        on_oom: treatment of a batch that runs out of memory. "split": smaller batches run. "raise":
            its callers get the error; "raise".
        isolate_errors: whether the halves of a failed batch run again, until the failing items
            stand alone (13 calls of the function for one item in 64). The other items get their
            results; False.
        dedupe: whether equal items that wait or run at the same time are computed once. Each caller
            has a copy of the result (`copy.deepcopy`), and an error reaches all of them. Items need
            a hash; or a function that returns the key of an item; False.
        on_batch: observer that gets a `BatchRecord` of every batch, after its callers are answered;
            None.
        name: name in messages and of threads; the function's qualified name.

    Raises:
        TypeError, ValueError: at decoration, for a setting or a function that cannot work.
    """

    _face = Batched
    _defaults = Options()

    @overload
    def __call__(self, func: OfItems[T, P, Outputs[U]], /) -> Batched[T, U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, list[T], P], Outputs[U]], /
    ) -> BatchedMethod[S, Batched[T, U, P]]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[list[T], ...], Outputs[U]], /
    ) -> Batched[T, U, ...]: ...
    @overload
    def __call__(self, /, **settings: Unpack[Settings]) -> Dynamically: ...
    @overload
    def __call__(
        self, /, *, prepare: Prepare[A], **settings: Unpack[Settings]
    ) -> PreparedDynamically[A]: ...
    def __call__(self, func: Any = MISSING, /, **settings: Any) -> Any:
        return self._apply(func, settings)


class AsyncDynamically(Decorator):
    """Decorator as `batched.dynamically`, with the same settings, for functions that are awaited.

    A coroutine function runs on the event loop of its callers (asyncio, uvloop or trio), in one
    queue per loop. A plain function runs in a thread of its own, so that the loop never blocks, and
    serves any number of loops.
    """

    _face = AsyncBatched
    _defaults = Options()

    @overload
    def __call__(
        self, func: OfItems[T, P, MaybeAwaitableOutputs[U]], /
    ) -> AsyncBatched[T, U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, list[T], P], MaybeAwaitableOutputs[U]], /
    ) -> BatchedMethod[S, AsyncBatched[T, U, P]]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[list[T], ...], MaybeAwaitableOutputs[U]], /
    ) -> AsyncBatched[T, U, ...]: ...
    @overload
    def __call__(self, /, **settings: Unpack[Settings]) -> AsyncDynamically: ...
    @overload
    def __call__(
        self, /, *, prepare: Prepare[A], **settings: Unpack[Settings]
    ) -> AsyncPreparedDynamically[A]: ...
    def __call__(self, func: Any = MISSING, /, **settings: Any) -> Any:
        return self._apply(func, settings)


class InferenceDynamically(Decorator):
    """Decorator that makes a function of padded features callable for some rows, from any thread.

    Calls that arrive together run together.

    The function takes a dict of arrays or tensors, features with one row per item, and returns
    arrays or tensors with one row per item, in a tuple, list, dict, dataclass or `ModelOutput` if
    there are several. A caller passes a mapping of features, or features by keyword, and gets what
    the function would have returned for them alone: same structure, same rows, same lengths.

    All settings of `batched.dynamically` are accepted, and some more.

    Args:
        pad_token: value that fills short rows, by name of the feature; 0 for all other features.
            `pad_tokens` is another spelling.
        padding_side: side on which rows are filled, "right" or "left"; "right".
        pad_to_multiple_of: divisor of the length of token ids, of masks, of features as long as
            these, and of all padded rows; 1.
        unpad: rule by which outputs are cut to the lengths of a caller's rows. "auto": as learned
            from earlier outputs. False: outputs are not cut. Or a declaration,
            `{"last_hidden_state": {1: "input_ids"}}`, where "" is the whole output; "auto".
        spread_kwargs: whether to call `func(**features)` instead of `func(features)`; False.
        device: device on which the function gets its features, as tensors; None, the device of the
            callers.
        output_device: device on which callers get their results; None, the device of the outputs.
        length: as in `batched.dynamically`, for one row as a dict; by default the length of its
            token ids, or else the greatest length.
        on_oom: as in `batched.dynamically`; "split".

    Raises:
        TypeError, ValueError: at decoration, for a setting or a function that cannot work.
    """

    _face = BatchedInference
    _defaults = _FEATURES

    @overload
    def __call__(self, func: OfFeatures[P, U], /) -> BatchedInference[U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, dict[str, Any], P], U], /
    ) -> BatchedMethod[S, BatchedInference[U, P]]: ...
    @overload
    def __call__(
        self, /, *, prepare: Prepare[A], **settings: Unpack[InferenceSettings]
    ) -> PreparedInference[A]: ...
    @overload
    def __call__(
        self, /, *, spread_kwargs: Literal[True], **settings: Unpack[InferenceSettings]
    ) -> SpreadDynamically: ...
    @overload
    def __call__(
        self, /, *, spread_kwargs: Literal[False] = False, **settings: Unpack[InferenceSettings]
    ) -> InferenceDynamically: ...
    def __call__(self, func: Any = MISSING, /, **settings: Any) -> Any:
        return self._apply(func, settings)


class AsyncInferenceDynamically(Decorator):
    """Decorator as `batched.inference.dynamically`, for functions that are awaited."""

    _face = AsyncBatchedInference
    _defaults = _FEATURES

    @overload
    def __call__(self, func: OfFeatures[P, Awaitable[U]], /) -> AsyncBatchedInference[U, P]: ...
    @overload
    def __call__(self, func: OfFeatures[P, U], /) -> AsyncBatchedInference[U, P]: ...
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
        self, /, *, prepare: Prepare[A], **settings: Unpack[InferenceSettings]
    ) -> AsyncPreparedInference[A]: ...
    @overload
    def __call__(
        self, /, *, spread_kwargs: Literal[True], **settings: Unpack[InferenceSettings]
    ) -> AsyncSpreadDynamically: ...
    @overload
    def __call__(
        self, /, *, spread_kwargs: Literal[False] = False, **settings: Unpack[InferenceSettings]
    ) -> AsyncInferenceDynamically: ...
    def __call__(self, func: Any = MISSING, /, **settings: Any) -> Any:
        return self._apply(func, settings)


class PreparedDynamically(Protocol[A]):
    """Type of a decorator with `prepare`, whose argument callers pass instead of items."""

    @overload
    def __call__(self, func: OfItems[Any, P, Outputs[U]], /) -> Batched[A, U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, list[Any], P], Outputs[U]], /
    ) -> BatchedMethod[S, Batched[A, U, P]]: ...


class AsyncPreparedDynamically(Protocol[A]):
    """Type as `PreparedDynamically`, for functions that are awaited."""

    @overload
    def __call__(
        self, func: OfItems[Any, P, MaybeAwaitableOutputs[U]], /
    ) -> AsyncBatched[A, U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, list[Any], P], MaybeAwaitableOutputs[U]], /
    ) -> BatchedMethod[S, AsyncBatched[A, U, P]]: ...


class PreparedInference(Protocol[A]):
    """Type as `PreparedDynamically`, for functions of features, by keyword or not."""

    @overload
    def __call__(self, func: OfFeatures[P, U], /) -> Batched[A, U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, dict[str, Any], P], U], /
    ) -> BatchedMethod[S, Batched[A, U, P]]: ...


class AsyncPreparedInference(Protocol[A]):
    """Type as `PreparedInference`, for functions that are awaited."""

    @overload
    def __call__(self, func: OfFeatures[P, Awaitable[U]], /) -> AsyncBatched[A, U, P]: ...
    @overload
    def __call__(self, func: OfFeatures[P, U], /) -> AsyncBatched[A, U, P]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, dict[str, Any], P], Awaitable[U]], /
    ) -> BatchedMethod[S, AsyncBatched[A, U, P]]: ...
    @overload
    def __call__(
        self, func: Callable[Concatenate[S, dict[str, Any], P], U], /
    ) -> BatchedMethod[S, AsyncBatched[A, U, P]]: ...


class SpreadDynamically(Protocol):
    """Type of a decorator for functions that take features by keyword.

    Type checkers cannot tell these from further parameters.
    """

    def __call__(self, func: OfKeywords[U], /) -> BatchedInference[U, ...]: ...


class AsyncSpreadDynamically(Protocol):
    """Type as `SpreadDynamically`, for functions that are awaited."""

    @overload
    def __call__(self, func: OfKeywords[Awaitable[U]], /) -> AsyncBatchedInference[U, ...]: ...
    @overload
    def __call__(self, func: OfKeywords[U], /) -> AsyncBatchedInference[U, ...]: ...


dynamically = Dynamically()
async_dynamically = AsyncDynamically()
inference_dynamically = InferenceDynamically()
async_inference_dynamically = AsyncInferenceDynamically()
