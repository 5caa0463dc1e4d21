"""The decorators, with the types of the functions they take and return.

The classes are types alone: `typed_as` gives the overloads of their method to a plain function.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
)

from .._collate.features.settings import FeatureSettings
from .batched import AsyncBatched, Batched, BatchedCallable
from .function import BatchFunction
from .inference import AsyncBatchedInference, BatchedInference
from .method import BatchedMethod
from .requests import MISSING
from .settings import InferenceSettings, Options, Settings

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
S = TypeVar("S")
A = TypeVar("A")
F = TypeVar("F")

if TYPE_CHECKING:
    from typing import Unpack

    from .unpacked import AsyncUnpacking, MaybeAwaitableOutputs, Outputs, Unpacking

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
    OfAny: TypeAlias = Callable[..., U] | classmethod[Any, ..., U]
    """Any function or class method: with `prepare`, or of features by keyword."""

_FEATURES = Options(features=FeatureSettings(), on_oom="split")


def typed_as(call: F, options: Options) -> Callable[[Callable[..., Any]], F]:
    """Give a decorator the types and the docstring of `call`, and the settings in `options`."""
    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value)
        for name, value in options.settings().items()
    ]

    def present(decorator: Any) -> F:
        decorator.__doc__ = call.__doc__
        func, _ = inspect.signature(decorator).parameters.values()
        decorator.__signature__ = inspect.Signature([func, *settings])
        return decorator  # type: ignore[no-any-return]

    return present


def decorate(
    decorator: Callable[..., Any],
    face: type[BatchedCallable[Any, Any, Any]],
    options: Options,
    func: object,
    settings: Mapping[str, Any],
) -> Any:
    """Return the decorated function or, without a function, the decorator with `settings`."""
    options = options.updated(settings)
    if func is MISSING:
        return partial(decorator, **settings)
    if isinstance(func, BatchedCallable | BatchedMethod):
        raise TypeError(f"{func!r} is batched already; for other settings use its with_options")
    function = BatchFunction.of(func, options, coroutines=issubclass(face, AsyncBatched))
    decorated = face(function)
    # a decorator above a method calls it with the instance first
    return decorated.of_class if function.kind == "method" else decorated


# A function whose first two parameters are lists matches the overloads of functions and of methods;
# checkers take the first, of functions. The overloads with `...` are for functions with `**kwargs`,
# because mypy cannot keep their parameters.
# mypy: disable-error-code="overload-overlap"


class Dynamically:
    """Type of a decorator."""

    @overload
    def dynamically(self, /, **settings: Unpack[Settings]) -> Dynamically: ...
    @overload
    def dynamically(
        self, /, *, prepare: Prepare[A], **settings: Unpack[Settings]
    ) -> Callable[[OfAny[Outputs[U]]], Batched[A, U, ...]]: ...
    @overload
    def dynamically(
        self, /, *, unpack: Literal[True], prepare: Any = None, **settings: Unpack[Settings]
    ) -> Unpacking: ...
    @overload
    def dynamically(self, func: OfItems[T, P, Outputs[U]], /) -> Batched[T, U, P]: ...
    @overload
    def dynamically(
        self, func: Callable[Concatenate[S, list[T], P], Outputs[U]], /
    ) -> BatchedMethod[S, Batched[T, U, P]]: ...
    @overload
    def dynamically(
        self, func: Callable[Concatenate[list[T], ...], Outputs[U]], /
    ) -> Batched[T, U, ...]: ...
    def dynamically(self, *_: Any, **__: Any) -> Any:
        """Make a function of a list callable for one item, from any thread.

        Calls that arrive together run together.

        `@dynamically` or, with settings, `@dynamically(batch_size=64, ...)`; on functions and
        methods, above `@classmethod`, above or below `@staticmethod`. The function must return one
        result per item, in order: a list, tuple, array or tensor.

        Args:
            batch_size: most items in one batch; 32.
            timeout_ms: longest time for which an item is held, so that more items can join its
                batch, in milliseconds (50.0, not 0.05). None: with `flush="auto"` at most 5 ms or
                half of the mean time of a batch, whichever is more; 5 ms with `flush="window"`;
                None.
            small_batch_threshold: largest size of a small call; small calls go first; 8.
            flush: rule for a batch that is not full. "auto": the batch leaves once no more callers
                are expected or waiting no longer pays, learned from earlier batches. "eager": it
                leaves as soon as a worker is free. "window": it leaves `timeout_ms` after its
                oldest item; "auto".
            prepare: the callers' half of the work, a function that returns the item for the
                argument of a call, for instance its tokens. It runs before the call is queued: in
                the thread of the caller, or in a thread of the batcher for calls from event loops,
                list calls and `map`. Its errors reach that caller alone. If the first of several
                parameters is `self`, it gets the instance, too; None.
            prepare_threads: most threads of the batcher that call `prepare`; 8.
            length: function that returns the length of an item. If more items wait than fit, items
                of like length run together; None.
            max_batch_tokens: largest product of the items of a batch and their greatest length.
                Without `length`, the length is `len`; None.
            max_queue_size: most items in the queue. A larger call enters an empty queue; None.
            on_full: treatment of a call while the queue is full. "wait": calls enter in the order
                of their arrival. "raise": the call raises `QueueFull`; "wait".
            queue_timeout_ms: longest time until a call begins to run, in milliseconds. A later call
                ends with `QueueTimeout`; None.
            max_concurrent_batches: batches that run at once, each in its own thread; 1.
            on_oom: treatment of a batch that runs out of memory. "split": smaller batches run.
                "raise": its callers get the error; "raise".
            isolate_errors: whether the halves of a failed batch run again, until the failing items
                stand alone (13 calls of the function for one item in 64). The other items get their
                results; False.
            dedupe: whether equal items of one list, and of one batch, are computed once. Each
                caller has a copy of the result (`copy.deepcopy`), and an error reaches all of them.
                Items need a hash; or a function that returns the key of an item; False.
            unpack: whether each item is a tuple, and the function takes a list for each of its
                parts: the parameters without a default, two at least. All others are keyword-only.
                Callers write `score("q", "p")`, `score([("q1", "p1"), ("q2", "p2")])` and
                `score.submit(("q", "p"))`; `prepare`, `length` and `dedupe` get the tuple; False.
            on_batch: observer that gets a `BatchRecord` of every batch, after its callers are
                answered; None.
            name: name in messages and of threads; by default the function's qualified name.

        Raises:
            TypeError, ValueError: at decoration, for a setting or a function that cannot work.
        """

    __call__ = dynamically


class AsyncDynamically:
    """Type of a decorator."""

    @overload
    def dynamically(self, /, **settings: Unpack[Settings]) -> AsyncDynamically: ...
    @overload
    def dynamically(
        self, /, *, prepare: Prepare[A], **settings: Unpack[Settings]
    ) -> Callable[[OfAny[MaybeAwaitableOutputs[U]]], AsyncBatched[A, U, ...]]: ...
    @overload
    def dynamically(
        self, /, *, unpack: Literal[True], prepare: Any = None, **settings: Unpack[Settings]
    ) -> AsyncUnpacking: ...
    @overload
    def dynamically(
        self, func: OfItems[T, P, MaybeAwaitableOutputs[U]], /
    ) -> AsyncBatched[T, U, P]: ...
    @overload
    def dynamically(
        self, func: Callable[Concatenate[S, list[T], P], MaybeAwaitableOutputs[U]], /
    ) -> BatchedMethod[S, AsyncBatched[T, U, P]]: ...
    @overload
    def dynamically(
        self, func: Callable[Concatenate[list[T], ...], MaybeAwaitableOutputs[U]], /
    ) -> AsyncBatched[T, U, ...]: ...
    def dynamically(self, *_: Any, **__: Any) -> Any:
        """Make a function of a list awaitable for one item, on any event loop.

        All settings of `batched.dynamically` are accepted: batch_size=32, timeout_ms=None,
        small_batch_threshold=8, flush="auto", prepare=None, prepare_threads=8, length=None,
        max_batch_tokens=None, max_queue_size=None, on_full="wait", queue_timeout_ms=None,
        max_concurrent_batches=1, on_oom="raise", isolate_errors=False, dedupe=False, unpack=False,
        on_batch=None, name=None.

        A coroutine function runs on the event loop of its callers (asyncio, uvloop or trio), in one
        queue per loop. A plain function runs in a thread of its own, so that the loop never blocks,
        and serves any number of loops.
        """

    __call__ = dynamically


class InferenceDynamically:
    """Type of a decorator."""

    @overload
    def dynamically(self, /, **settings: Unpack[InferenceSettings]) -> InferenceDynamically: ...
    @overload
    def dynamically(
        self, /, *, prepare: Prepare[A], **settings: Unpack[InferenceSettings]
    ) -> Callable[[OfAny[U]], Batched[A, U, ...]]: ...
    @overload
    def dynamically(
        self, /, *, spread_kwargs: Literal[True], **settings: Unpack[InferenceSettings]
    ) -> Callable[[OfAny[U]], BatchedInference[U, ...]]: ...
    @overload
    def dynamically(self, func: OfFeatures[P, U], /) -> BatchedInference[U, P]: ...
    @overload
    def dynamically(
        self, func: Callable[Concatenate[S, dict[str, Any], P], U], /
    ) -> BatchedMethod[S, BatchedInference[U, P]]: ...
    def dynamically(self, *_: Any, **__: Any) -> Any:
        """Make a function of padded features callable for some rows, from any thread.

        Calls that arrive together run together.

        The function takes a dict of arrays or tensors, features with one row per item, and returns
        arrays or tensors with one row per item, in a tuple, list, dict, dataclass or `ModelOutput`
        if there are several. A caller passes a mapping of features, or features by keyword, and
        gets what the function would have returned for them alone: same structure, same rows, same
        lengths.

        All settings of `batched.dynamically` but `dedupe` and `unpack` are accepted, and some more.

        Args:
            pad_token: value that fills short rows, by name of the feature; 0 for all other
                features. `pad_tokens` is another spelling.
            padding_side: side on which rows are filled, "right" or "left"; "right".
            pad_to_multiple_of: divisor of the length of token ids, of masks, of features as long as
                these, and of all padded rows; 1.
            unpad: rule by which outputs are cut to the lengths of a caller's rows. "auto": as
                learned from earlier outputs. False: outputs are not cut. Or a declaration,
                `{"last_hidden_state": {1: "input_ids"}}`, where "" is the whole output; "auto".
            spread_kwargs: whether to call `func(**features)` instead of `func(features)`; False.
            device: device on which the function gets its features, as tensors; None, the device of
                the callers.
            output_device: device on which callers get their results; None, the device of the
                outputs.
            length: as in `batched.dynamically`, for one row as a dict; by default the length of its
                token ids, or else the greatest length.
            on_oom: as in `batched.dynamically`; "split".

        Raises:
            TypeError, ValueError: at decoration, for a setting or a function that cannot work.
        """

    __call__ = dynamically


class AsyncInferenceDynamically:
    """Type of a decorator."""

    @overload
    def dynamically(
        self, /, **settings: Unpack[InferenceSettings]
    ) -> AsyncInferenceDynamically: ...
    @overload
    def dynamically(
        self, /, *, prepare: Prepare[A], **settings: Unpack[InferenceSettings]
    ) -> AsyncPrepared[A]: ...
    @overload
    def dynamically(
        self, /, *, spread_kwargs: Literal[True], **settings: Unpack[InferenceSettings]
    ) -> AsyncSpread: ...
    @overload
    def dynamically(self, func: OfFeatures[P, Awaitable[U]], /) -> AsyncBatchedInference[U, P]: ...
    @overload
    def dynamically(self, func: OfFeatures[P, U], /) -> AsyncBatchedInference[U, P]: ...
    @overload
    def dynamically(
        self, func: Callable[Concatenate[S, dict[str, Any], P], Awaitable[U]], /
    ) -> BatchedMethod[S, AsyncBatchedInference[U, P]]: ...
    @overload
    def dynamically(
        self, func: Callable[Concatenate[S, dict[str, Any], P], U], /
    ) -> BatchedMethod[S, AsyncBatchedInference[U, P]]: ...
    def dynamically(self, *_: Any, **__: Any) -> Any:
        """Make a function of padded features awaitable for some rows, on any event loop.

        All settings of `batched.inference.dynamically` are accepted: pad_token={},
        padding_side="right", pad_to_multiple_of=1, unpad="auto", spread_kwargs=False, device=None,
        output_device=None, on_oom="split", and the settings of `batched.aio.dynamically`.
        """

    __call__ = dynamically


class AsyncPrepared(Protocol[A]):
    """Type of a decorator with `prepare`."""

    @overload
    def __call__(self, func: OfAny[Awaitable[U]], /) -> AsyncBatched[A, U, ...]: ...
    @overload
    def __call__(self, func: OfAny[U], /) -> AsyncBatched[A, U, ...]: ...


class AsyncSpread(Protocol):
    """Type of a decorator with `spread_kwargs`."""

    @overload
    def __call__(self, func: OfAny[Awaitable[U]], /) -> AsyncBatchedInference[U, ...]: ...
    @overload
    def __call__(self, func: OfAny[U], /) -> AsyncBatchedInference[U, ...]: ...


@typed_as(Dynamically().dynamically, Options())
def dynamically(func: Any = MISSING, /, **settings: Any) -> Any:
    return decorate(dynamically, Batched, Options(), func, settings)


@typed_as(AsyncDynamically().dynamically, Options())
def async_dynamically(func: Any = MISSING, /, **settings: Any) -> Any:
    return decorate(async_dynamically, AsyncBatched, Options(), func, settings)


@typed_as(InferenceDynamically().dynamically, _FEATURES)
def inference_dynamically(func: Any = MISSING, /, **settings: Any) -> Any:
    return decorate(inference_dynamically, BatchedInference, _FEATURES, func, settings)


@typed_as(AsyncInferenceDynamically().dynamically, _FEATURES)
def async_inference_dynamically(func: Any = MISSING, /, **settings: Any) -> Any:
    return decorate(async_inference_dynamically, AsyncBatchedInference, _FEATURES, func, settings)
