"""Decorated functions, their calls, and their binding to instances.

`__call__` and `acall` repeat their steps, because a helper would add Python calls to each call.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    Never,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from .._collate.arguments import is_method
from .._core.request import Request
from .._runtime.async_backend import current_loop, post
from .._runtime.recorder import Recorder
from .._runtime.settling import raise_error
from .._runtime.waits import current_worker
from .._runtime.wakers import Future, async_waker, blocking_waker, logger
from ..stats import Stats
from .function import Batcher, BatchFunction, Parts
from .map import Ahead, async_mapped, check_many, mapped
from .method import BatchedMethod
from .pickling import DOTTED_NAMES, Carriers, importable_name
from .requests import MISSING, Args, Keywords
from .settings import InferenceSettings, Settings

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    P = ParamSpec("P", default=...)
else:
    from typing import ParamSpec

    P = ParamSpec("P")

T = TypeVar("T")
U = TypeVar("U")

MANY_QUEUES: Final = 32
"""Queues in a row with only batches of one item, of which a warning tells."""

_latest: weakref.WeakKeyDictionary[types.CodeType, tuple[int, Recorder]] = (
    weakref.WeakKeyDictionary()
)
"""By function: queues in a row that had only batches of one item, and the counts of the latest."""

functions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Decorated functions of this process by id; bound methods are not among them."""


class BatchedCallable(Generic[T, U, P]):
    """A batched function, without the calls that differ between threads and coroutines."""

    # slots, because functools.wraps copies `__dict__`
    __slots__ = (
        "__dict__",
        "__func__",
        "__self__",
        "__weakref__",
        "_batcher",
        "_function",
        "_instances",
        "_owner",
    )

    __wrapped__: Callable[..., Any]
    """The undecorated batch function."""
    _function: BatchFunction
    _held_as = ""
    """`Class.attribute` of a function in a class body."""

    if not TYPE_CHECKING:  # without a count of parameters: P has a default for checkers only
        __class_getitem__ = classmethod(types.GenericAlias)

    def __init__(
        self, function: BatchFunction | BatchedMethod[Any, Any], owner: object = None
    ) -> None:
        self._owner = owner  # the instance, or class, of a bound method
        if isinstance(function, BatchedMethod):  # bind; arguments as of `types.MethodType`
            unbound: BatchedCallable[Any, Any, Any] = function.function
            self.__dict__ = unbound.__dict__.copy()
            self.__self__, self.__func__ = owner, function
            self._function = unbound._function
            self.__wrapped__ = types.MethodType(self._function.func, owner)
            self._batcher = unbound._batcher_of(owner)
            return
        self._function = function
        self._batcher = Batcher(function.parts(bound=owner is not None))
        # batchers of instances, by id; a weak reference removes each entry
        self._instances: dict[int, tuple[weakref.ref[Any], Batcher]] = {}
        # inspect recognizes no coroutine function without a name
        self.__name__ = self.__qualname__ = function.name
        functools.update_wrapper(self, function.func, updated=())  # type: ignore[arg-type]  # its subclasses are callable
        if owner is not None:
            self.__wrapped__ = types.MethodType(function.func, owner)
        functions[id(self)] = self
        _watch_queues(function, self._batcher.recorder)

    @overload
    async def acall(self, items: list[T], /, *args: P.args, **kwargs: P.kwargs) -> list[U]: ...
    @overload
    async def acall(self, item: T, /, *args: P.args, **kwargs: P.kwargs) -> U: ...
    async def acall(self, item: Any = MISSING, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result for an item, or the list of results for a list of items.

        The call may come from any event loop (asyncio, uvloop, trio) and does not block the loop.
        Cancelling the call removes its waiting items from the queue.

        Raises:
            BatcherClosed: the batcher was shut down.
            QueueFull: there is no room for the call, with `on_full="raise"`.
            QueueTimeout: no item of the call began to run within `queue_timeout_ms`.
            RuntimeError: the batch function called itself, directly or through another function,
                and would wait forever.
            Exception: the exception that the batch function raised.
        """
        batcher = self._batcher
        loop = current_loop()
        waker = async_waker(loop)
        parse, owner = batcher.requests.parse, self._owner
        if batcher.preparers is None:
            request = parse(item, args, kwargs, owner, waker, False)
        else:
            request = await batcher.preparers.run(parse, item, args, kwargs, owner, waker, False)
        if not request.size:
            return []
        runtime = batcher.runtime.here(loop)
        if current_worker():
            runtime.check_wait()
        try:
            runtime.submit(request, from_event_loop=True)
            await waker
        except BaseException:
            runtime.abandon(request)
            raise
        return request.result if request.error is None else raise_error(request)

    # Python's warning of a coroutine that nothing awaited has this name
    acall.__qualname__ = "call of a batched function"

    def submit(self, item: T = MISSING, /, *args: P.args, **kwargs: P.kwargs) -> Future[U]:
        """Return a future of the result for `item`, which is always one item, even if it is a list.

        The future can be awaited on an event loop. `future.cancel()` removes an item that still
        waits from the queue. A coroutine function needs a running loop, and `future.result()`
        raises if it would block that loop forever. While the queue is full (`max_queue_size`),
        `submit` waits for room. If the wait would block an event loop or a batch function forever,
        `submit` returns at once and the item waits in line.

        Raises:
            BatcherClosed: the batcher was shut down.
            QueueFull: there is no room for the item, with `on_full="raise"`.
        """
        return self._submit(item, args, kwargs)

    def _submit(
        self,
        item: Any,
        args: Args = (),
        kwargs: Keywords | None = None,
        *,
        ahead: bool = False,
        pieces: Any = None,
    ) -> Future[U]:
        """Submit `item` as `submit` does; `pieces` gets the pieces that a function emits.

        A call of `map`, made `ahead`, waits neither for room nor until `prepare` has run.
        """
        loop, batcher = current_loop(), self._batcher
        runtime = batcher.runtime.here(loop)
        on = loop if self._function.coroutine else None
        room = blocking_waker() if batcher.may_block and loop is None and not ahead else None
        future: Future[U] = Future()

        def parse() -> Request:
            request: Request = batcher.requests.parse(
                item, args, kwargs or {}, self._owner, future, True
            )
            request.pieces = pieces
            future.bind(request, runtime, on, room)
            if future.cancelled():  # while it was prepared
                request.waker = None
            return request

        if batcher.preparers is not None and (loop is not None or ahead):
            batcher.preparers.start(_enter, future, runtime, parse, on)
            return future
        request = parse()
        try:
            queued = runtime.submit(request, from_event_loop=loop is not None)
            if not queued and room is not None and runtime.may_wait():
                room.acquire()
        except BaseException:  # no caller gets this future
            runtime.abandon(request)
            raise
        return future

    @property
    def stats(self) -> Stats:
        """Counts and times of this batcher so far, as a frozen snapshot."""
        batcher = self._batcher
        return batcher.recorder.snapshot(*batcher.runtime.load())

    @property
    def options(self) -> Mapping[str, Any]:
        """Settings of this function by name, defaults included, as a read-only mapping.

        `fn.with_options(**fn.options)` is the same function with a batcher of its own.
        """
        return types.MappingProxyType(self._function.options.settings())

    def reset_stats(self) -> None:
        """Set all statistics to zero."""
        self._batcher.recorder.reset()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse new calls and finish accepted calls; `cancel_futures` cancels waiting calls.

        With `wait`, return when all accepted calls are finished; within the batch function itself,
        return at once. The method may be called again, from any thread. Later calls of the function
        raise `BatcherClosed`, until `with fn:` opens the batcher again.
        """
        self._batcher.close_preparers()
        self._batcher.runtime.shutdown(wait=wait, cancel=cancel_futures)

    async def aclose(self, *, cancel_futures: bool = False) -> None:
        """Shut down as `shutdown()` does, without blocking the event loop."""
        self._batcher.close_preparers()
        self._batcher.runtime.shutdown(wait=False, cancel=cancel_futures)
        await self._batcher.runtime.drain_async()

    def __enter__(self) -> Self:
        self._batcher.runtime.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        self._batcher.runtime.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def with_options(self, **settings: Unpack[Settings]) -> Self:
        """Return a copy of this function with other settings and a batcher of its own.

        This function stays as it is. A bound method stays bound to its instance.

        Raises:
            TypeError, ValueError: a setting is unknown, of the wrong type, or out of its range.
        """
        options = self._function.options.updated(settings)
        return self._rebuilt(dataclasses.replace(self._function, options=options), self._owner)

    @classmethod
    def _rebuilt(cls, function: BatchFunction, owner: object) -> Self:
        """Return a function of this class, also where its constructor takes other arguments."""
        made = cls.__new__(cls)
        BatchedCallable.__init__(made, function, owner)
        return made

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        if self._function.kind == "static" or self._owner is not None:
            return self
        if self._function.kind == "class":
            instance = type(instance) if owner is None else owner
        elif instance is None:
            # type checkers take a decorated method for a BatchedMethod
            return cast("Self", self.of_class)
        return type(self)(self.of_class, instance)

    @functools.cached_property
    def of_class(self) -> BatchedMethod[Any, Any]:
        return BatchedMethod(self)

    @functools.cached_property
    def _carriers(self) -> Carriers:
        # setdefault: threads that pickle at the same time get the same carriers
        made = Carriers(self, dataclasses.replace(self._function))
        return cast("Carriers", self.__dict__.setdefault("_carriers", made))

    def __set_name__(self, owner: type, name: str) -> None:
        self._held_as = f"{owner.__qualname__}.{name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchedCallable) and self._batcher is other._batcher

    def __hash__(self) -> int:
        return hash(self._batcher)

    def _batcher_of(self, instance: object) -> Batcher:
        key = id(instance)
        entry = self._instances.get(key)
        if entry is None:
            instances = self._instances
            try:
                ref = weakref.ref(instance, lambda _: instances.pop(key, None))
            except TypeError:
                raise TypeError(
                    f"{self._function.name} is a method, and got an object of type "
                    f"{type(instance).__name__} as its instance: call it on an instance of its "
                    "class; if the class has __slots__, add '__weakref__' to them (a dataclass: "
                    "weakref_slot=True); if the function is no method, wrap it in staticmethod"
                ) from None
            # setdefault: concurrent threads get the same batcher; a new one has no worker yet
            entry = instances.setdefault(key, (ref, Batcher(self._function.parts(bound=True))))
            _watch_queues(self._function, entry[1].recorder)
        return entry[1]

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        owner, func = self._owner, self._function.func
        if owner is not None:
            name = self._held_as.rpartition(".")[2] or self.__name__
            if getattr(owner, name, None) == self:
                return getattr, (owner, name)
        elif hasattr(func, "__qualname__") and not isinstance(func, types.MethodType):
            name = importable_name(self, self._held_as) or self.__qualname__
            return name if protocol < DOTTED_NAMES else self._carriers.reduce(name)
        return self._rebuilt, (dataclasses.replace(self._function), owner)

    def __setstate__(self, describe: Callable[[], BatchFunction]) -> None:
        if not hasattr(self, "_batcher"):  # pickled by value: the name leads to no function
            BatchedCallable.__init__(self, describe())

    def __copy__(self) -> Self:
        return self  # as copies of a plain function do

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the decorated function."""
        # not initialised yet; copied as it is pickled, not as the decorated object is copied; not
        # bound to an instance, though a decorated method may be
        if name in ("_function", "__deepcopy__", "__self__", "__func__"):
            raise AttributeError(name)
        try:
            return getattr(self._function.func, name)
        except AttributeError:
            hint = "; did you mean 'shutdown'?" if name == "close" else ""
            raise AttributeError(
                f"neither {self!r} nor the decorated function has an attribute {name!r}{hint}",
                name=name,
                obj=None if hint else self,  # of which Python suggests a similar attribute
            ) from None

    def __repr__(self) -> str:
        return f"<batched {self._function.name}>"

    def _ahead(
        self, buffersize: int | None, timeout: float | None, return_exceptions: bool
    ) -> Ahead[T]:
        submit = functools.partial(self._submit, ahead=True)
        policy = self._function.options.policy
        return Ahead(submit, policy, buffersize, timeout, return_exceptions)


def _watch_queues(function: BatchFunction, recorder: Recorder) -> None:
    """Warn if many queues in a row of one function have each had only batches of one item."""
    code = getattr(function.func, "__code__", None)
    if code is not None:
        count, latest = _latest.get(code, (0, Recorder()))
        stats = latest.snapshot(0, 0, 0)
        if stats.calls > stats.cancelled and not stats.batch_sizes:
            return  # its first batch runs: a later queue will tell
        count = count + 1 if [*stats.batch_sizes] == [1] else 0
        _latest[code] = count, recorder
        if count == MANY_QUEUES and function.options.policy.batch_size > 1:
            logger.warning(
                "%d queues in a row have run %s in batches of one item: each decorated function, "
                "and each instance, has a queue of its own. Decorate once, outside the function "
                "that handles a call, and share one instance among the callers",
                *(MANY_QUEUES, function.name),
            )


def _refuse(name: str, decorated: object, _: object) -> Never:
    raise AttributeError(
        f"{decorated!r} has its settings from its decoration; for others, "
        f"with_options({name}=...) returns the same function with a queue of its own"
    )


# read, they are attributes of the decorated function
for _name in (*InferenceSettings.__annotations__, "prepare", "spread_kwargs", "unpack"):
    for _class in (BatchedCallable, BatchedMethod):
        setattr(_class, _name, property(None, functools.partial(_refuse, _name)))


def _enter(
    future: Future[Any],
    runtime: Any,
    parse: Callable[[], Request],
    loop: object,
    request: Request | None = None,
) -> None:
    """Prepare and submit a call, on its `loop` if there is one. An error is its answer."""
    try:
        if request is None:
            request = parse()
            if loop is not None:
                return post(loop, _enter, future, runtime, parse, loop, request)
        if request.waker is not None:  # else it was cancelled
            runtime.submit(request, from_event_loop=True)
    except BaseException as error:
        if not future.done():
            future.fail(error)


def live() -> list[Batched[Any, Any, ...] | AsyncBatched[Any, Any, ...]]:
    """Return every batched function of this process that exists now.

    A method is in the list once for each instance that has called it, bound to that instance, and
    not as its class has it. For example, an operator looks at all queues::

        for fn in batched.live():
            print(fn.__name__, fn.stats)
    """
    found = [each for ref in functions.valuerefs() if (each := ref()) is not None]
    own = [each for each in found if each._owner is not None or each._function.kind == "static"]
    bound = [
        type(each)(each.of_class, owner)
        for each in found
        for ref, _ in list(each._instances.values())
        if (owner := ref()) is not None
    ]
    return own + bound


def preparation_of(decorated: BatchedCallable[Any, Any, Any]) -> Callable[[Any], Any] | None:
    """Return the `prepare` of a function or a bound method, as a function of one argument."""
    prepare = decorated._function.options.prepare
    if prepare is None or not is_method(prepare):
        return prepare
    return types.MethodType(prepare, decorated._owner)


def parts_of(decorated: BatchedCallable[Any, Any, Any]) -> Parts:
    """Return all that running batches of a decorated function or bound method needs."""
    return decorated._batcher.parts._replace(owner=decorated._owner)


class Batched(BatchedCallable[T, U, P]):
    """A batched function that threads call and wait for."""

    @overload  # no call matches it: it is for functions that take a `Callable[..., U]`
    def __call__(self, /, *, never: Never) -> U: ...
    @overload
    def __call__(self, items: list[T], /, *args: P.args, **kwargs: P.kwargs) -> list[U]: ...
    @overload
    def __call__(self, item: T, /, *args: P.args, **kwargs: P.kwargs) -> U: ...
    def __call__(self, item: Any = MISSING, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result for an item, or the list of results for a list of items.

        The call blocks its thread until then.

        Raises:
            BatcherClosed: the batcher was shut down.
            QueueFull: there is no room for the call, with `on_full="raise"`.
            QueueTimeout: no item of the call began to run within `queue_timeout_ms`.
            RuntimeError: the batch function called itself, directly or through another function,
                and would wait forever.
            Exception: the exception that the batch function raised.
        """
        batcher = self._batcher
        waker = threading.Lock()
        waker.acquire()
        request = batcher.requests.parse(item, args, kwargs, self._owner, waker, False)
        if not request.size:
            return []
        loop = current_loop()
        if loop is not None:
            self._function.warn_of_blocking()
        runtime = batcher.runtime.here(loop)
        if current_worker():
            runtime.check_wait()
        try:
            runtime.submit(request, from_event_loop=False)
            runtime.wait(request, waker)
        except BaseException:  # a signal handler raised at any point of the call
            runtime.abandon(request)
            raise
        return request.result if request.error is None else raise_error(request)

    @overload
    def map(
        self,
        items: Iterable[T],
        *,
        buffersize: int | None = None,
        timeout: float | None = None,
        return_exceptions: Literal[False] = False,
    ) -> Generator[U, None, None]: ...
    @overload
    def map(
        self,
        items: Iterable[T],
        *,
        buffersize: int | None = None,
        timeout: float | None = None,
        return_exceptions: bool,
    ) -> Generator[U | Exception, None, None]: ...
    def map(
        self,
        items: Iterable[T],
        *,
        buffersize: int | None = None,
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> Generator[Any, None, None]:
        """Yield the results for `items` in order, computed a bounded number of items ahead.

        At most `buffersize` items are taken from `items` and not yet answered. The default is the
        items of four batches for each batch that may run at once; `max_queue_size` is the limit.
        Closing the generator cancels waiting items.

        For a progress bar: `tqdm(fn.map(items), total=len(items))`.

        Raises:
            TimeoutError: a result is not ready `timeout` seconds after the call of `map`.
            Exception: the exception that the batch function raised for the item, unless
                `return_exceptions` puts it in place of the result. An exception that `items` raises
                follows the results for earlier items.
        """
        return mapped(self._ahead(buffersize, timeout, return_exceptions), check_many(items))


class AsyncBatched(BatchedCallable[T, U, P]):
    """A batched function that coroutines await, on asyncio, uvloop or trio."""

    # inspect.iscoroutinefunction reads these three
    __code__ = BatchedCallable.acall.__code__
    __defaults__ = None
    __kwdefaults__ = None

    __call__ = BatchedCallable[T, U, P].acall

    @overload
    def map(
        self,
        items: Iterable[T] | AsyncIterable[T],
        *,
        buffersize: int | None = None,
        timeout: float | None = None,
        return_exceptions: Literal[False] = False,
    ) -> AsyncGenerator[U, None]: ...
    @overload
    def map(
        self,
        items: Iterable[T] | AsyncIterable[T],
        *,
        buffersize: int | None = None,
        timeout: float | None = None,
        return_exceptions: bool,
    ) -> AsyncGenerator[U | Exception, None]: ...
    def map(
        self,
        items: Iterable[T] | AsyncIterable[T],
        *,
        buffersize: int | None = None,
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> AsyncGenerator[Any, None]:
        """Yield the results asynchronously, as `Batched.map` does; `items` may be asynchronous too.

        To stop early, call `aclose()` of the generator.
        """
        return async_mapped(self._ahead(buffersize, timeout, return_exceptions), check_many(items))
