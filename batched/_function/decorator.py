"""The decorators, with the types of the functions they take and return.

The classes are types alone: `make_decorator` gives the overloads of their method to a function.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from inspect import Parameter, Signature
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    overload,
)

from .._collate.features.settings import FeatureSettings
from .batched import AsyncBatched, Batched, BatchedCallable, T, U
from .function import BatchFunction
from .inference import AsyncBatchedInference, BatchedInference
from .method import BatchedMethod
from .requests import MISSING
from .settings import InferenceSettings, Options, Settings

P = ParamSpec("P")
S = TypeVar("S")
A = TypeVar("A")
F = TypeVar("F")
R = TypeVar("R")

if TYPE_CHECKING:
    from .unpacked import AsyncUnpacking, MaybeAwaitable, Outputs, Unpacking

    # `classmethod` has no parameters at run time
    Function: TypeAlias = Callable[Concatenate[T, P], R] | classmethod[Any, Concatenate[T, P], R]
    """A function, or a class method, whose first parameter gets the items."""
    Method: TypeAlias = Callable[Concatenate[S, T, P], R]
    Features: TypeAlias = dict[str, Any]
    Prepare: TypeAlias = Callable[[A], Any] | Callable[[Any, A], Any]
    """A `prepare` of one argument, or of an instance and one argument."""
    AnyFunction: TypeAlias = Callable[..., R] | classmethod[Any, ..., R]
    """Any function or class method: with `prepare`, or of features by keyword."""

_FEATURES = Options(features=FeatureSettings(), on_oom="split")


def make_decorator(
    place: str, face: type[BatchedCallable[Any, Any, Any]], call: F, options: Options
) -> F:
    """Return a decorator with the types and the docstring of `call`, and the settings in `options`.

    Args:
        place: public module of the decorator.
        face: class of the decorated functions.
        call: a method whose overloads are the decorator's.
        options: defaults of the settings.
    """

    def decorator(func: object = MISSING, /, **settings: Any) -> Any:
        given = options.updated(settings)
        if func is MISSING:
            return partial(decorator, **settings)
        if isinstance(func, BatchedCallable | BatchedMethod):
            raise TypeError(f"{func!r} is batched already; for other settings use its with_options")
        function = BatchFunction.of(func, given)
        if function.coroutine and not issubclass(face, AsyncBatched):
            aio = place.replace("batched", "batched.aio")
            raise TypeError(
                f"{function.name} is a coroutine function; decorate it with {aio}.{made.__name__}"
            )
        decorated = face(function)
        # a decorator above a method calls it with the instance first
        return decorated.of_class if function.kind == "method" else decorated

    made: Any = decorator
    made.__module__, made.__doc__ = place, call.__doc__
    made.__name__ = made.__qualname__ = call.__name__  # type: ignore[attr-defined]  # it is a method
    settings = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=value)
        for name, value in options.settings().items()
    ]
    func = Parameter("func", Parameter.POSITIONAL_ONLY, default=MISSING)
    made.__signature__ = Signature([func, *settings])
    return made  # type: ignore[no-any-return]


# A function whose first two parameters are lists matches the overloads of functions and of methods;
# checkers take the first, of functions. The overloads with `...` are for functions with `**kwargs`,
# because mypy cannot keep their parameters.
# mypy: disable-error-code="overload-overlap"


class Dynamically:
    """Type of a decorator."""

    @overload
    def dynamically(self, **settings: Unpack[Settings]) -> Self: ...
    @overload
    def dynamically(
        self, *, prepare: Prepare[A], **settings: Unpack[Settings]
    ) -> Callable[[AnyFunction[Outputs[U]]], Batched[A, U, ...]]: ...
    @overload
    def dynamically(
        self, *, unpack: Literal[True], prepare: Any = None, **settings: Unpack[Settings]
    ) -> Unpacking: ...
    @overload
    def dynamically(self, func: Function[list[T], P, Outputs[U]], /) -> Batched[T, U, P]: ...
    @overload
    def dynamically(
        self, func: Method[S, list[T], P, Outputs[U]], /
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
    def dynamically(self, **settings: Unpack[Settings]) -> Self: ...
    @overload
    def dynamically(
        self, *, prepare: Prepare[A], **settings: Unpack[Settings]
    ) -> Callable[[AnyFunction[MaybeAwaitable[Outputs[U]]]], AsyncBatched[A, U, ...]]: ...
    @overload
    def dynamically(
        self, *, unpack: Literal[True], prepare: Any = None, **settings: Unpack[Settings]
    ) -> AsyncUnpacking: ...
    @overload
    def dynamically(
        self, func: Function[list[T], P, MaybeAwaitable[Outputs[U]]], /
    ) -> AsyncBatched[T, U, P]: ...
    @overload
    def dynamically(
        self, func: Method[S, list[T], P, MaybeAwaitable[Outputs[U]]], /
    ) -> BatchedMethod[S, AsyncBatched[T, U, P]]: ...
    @overload
    def dynamically(
        self, func: Callable[Concatenate[list[T], ...], MaybeAwaitable[Outputs[U]]], /
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
    def dynamically(self, **settings: Unpack[InferenceSettings]) -> Self: ...
    @overload
    def dynamically(
        self, *, prepare: Prepare[A], **settings: Unpack[InferenceSettings]
    ) -> Callable[[AnyFunction[U]], Batched[A, U, ...]]: ...
    @overload
    def dynamically(
        self, *, spread_kwargs: Literal[True], **settings: Unpack[InferenceSettings]
    ) -> Callable[[AnyFunction[U]], BatchedInference[U, ...]]: ...
    @overload
    def dynamically(self, func: Function[Features, P, U], /) -> BatchedInference[U, P]: ...
    @overload
    def dynamically(
        self, func: Method[S, Features, P, U], /
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
    def dynamically(self, **settings: Unpack[InferenceSettings]) -> Self: ...
    @overload
    def dynamically(
        self, *, prepare: Prepare[A], **settings: Unpack[InferenceSettings]
    ) -> AsyncPrepared[A]: ...
    @overload
    def dynamically(
        self, *, spread_kwargs: Literal[True], **settings: Unpack[InferenceSettings]
    ) -> AsyncSpread: ...
    @overload
    def dynamically(
        self, func: Function[Features, P, Awaitable[U]], /
    ) -> AsyncBatchedInference[U, P]: ...
    @overload
    def dynamically(self, func: Function[Features, P, U], /) -> AsyncBatchedInference[U, P]: ...
    @overload
    def dynamically(
        self, func: Method[S, Features, P, Awaitable[U]], /
    ) -> BatchedMethod[S, AsyncBatchedInference[U, P]]: ...
    @overload
    def dynamically(
        self, func: Method[S, Features, P, U], /
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
    def __call__(self, func: AnyFunction[Awaitable[U]], /) -> AsyncBatched[A, U, ...]: ...
    @overload
    def __call__(self, func: AnyFunction[U], /) -> AsyncBatched[A, U, ...]: ...


class AsyncSpread(Protocol):
    """Type of a decorator with `spread_kwargs`."""

    @overload
    def __call__(self, func: AnyFunction[Awaitable[U]], /) -> AsyncBatchedInference[U, ...]: ...
    @overload
    def __call__(self, func: AnyFunction[U], /) -> AsyncBatchedInference[U, ...]: ...


dynamically = make_decorator("batched", Batched, Dynamically().dynamically, Options())
async_dynamically = make_decorator(
    "batched.aio", AsyncBatched, AsyncDynamically().dynamically, Options()
)
inference_dynamically = make_decorator(
    "batched.inference", BatchedInference, InferenceDynamically().dynamically, _FEATURES
)
async_inference_dynamically = make_decorator(
    "batched.aio.inference",
    AsyncBatchedInference,
    AsyncInferenceDynamically().dynamically,
    _FEATURES,
)
