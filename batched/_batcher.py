"""A batch function with its settings, and the batcher that answers calls of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Final, Literal, TypedDict

from ._collate.arguments import Binder
from ._collate.items import Items
from ._core.policy import BatchPolicy, Flush
from ._core.scheduler import Request
from ._runtime.event_loop import EventLoopRuntime, EventLoops
from ._runtime.execution import Execution
from ._runtime.thread import ThreadRuntime
from .stats import Recorder, Stats

MISSING: Final[Any] = object()
"""The items of a call that does not pass them by position."""


UNDER_CLASSMETHOD: Final = "{}: put the batching decorator above @classmethod, not below it"


class Settings(TypedDict, total=False):
    """The settings of a decorator; each is explained in `BatchPolicy`, `name` below."""

    batch_size: int
    timeout_ms: float
    small_batch_threshold: int
    flush: Flush
    max_concurrent_batches: int
    name: str
    """For messages and thread names; the function's qualified name if not given."""


@dataclass(frozen=True)
class Options:
    """Valid settings of a decorator."""

    policy: BatchPolicy = field(default_factory=BatchPolicy)
    name: str | None = None

    def updated(self, settings: Settings) -> Options:
        """These with `settings` in their place.

        Raises:
            TypeError, ValueError: a setting is unknown, of the wrong type, or out of its range.
        """
        changes: dict[str, Any] = dict(settings)
        name = changes.pop("name", self.name)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a string, got {name!r}")
        known = [setting.name for setting in fields(BatchPolicy)]
        for unknown in changes.keys() - set(known):
            raise TypeError(f"there is no setting {unknown!r}; the settings are {', '.join([*known, 'name'])}")
        return Options(replace(self.policy, **changes), name)


@dataclass(frozen=True)
class BatchFunction:
    """What the user wrote, and how it is to be batched."""

    func: Callable[..., Any]
    kind: Literal["function", "static", "class"]  # what attribute access does: bind the instance, nothing, or the class
    coroutine: bool
    options: Options

    @classmethod
    def of(cls, func: object, options: Options, *, coroutines: bool) -> BatchFunction:
        """`func` if it can be batched, `coroutines` being welcome or not.

        Raises:
            TypeError: it cannot.
        """
        kind: Literal["function", "static", "class"] = "function"
        if isinstance(func, (staticmethod, classmethod)):
            kind = "static" if isinstance(func, staticmethod) else "class"
            func = func.__func__
        if inspect.isclass(func) or not callable(func):
            raise TypeError(f"only a function that takes a list can be batched, got {func!r}; settings are passed by keyword")
        name = options.name or getattr(func, "__qualname__", None) or type(func).__qualname__
        faces = (func, type(func).__call__)  # an object is what its __call__ is
        if any(map(inspect.isgeneratorfunction, faces)) or any(map(inspect.isasyncgenfunction, faces)):
            raise TypeError(f"{name} is a generator function; a batch function returns all its results at once")
        coroutine = any(map(inspect.iscoroutinefunction, faces))
        if coroutine and not coroutines:
            raise TypeError(f"{name} is a coroutine function; decorate it with batched.aio.dynamically")
        return cls(func, kind, coroutine, replace(options, name=name))

    @property
    def name(self) -> str:
        assert self.options.name is not None
        return self.options.name

    @cached_property
    def _unbound(self) -> Binder:
        return Binder(self.func, self.name, leading=1)

    @cached_property
    def _bound(self) -> Binder:
        return Binder(self.func, self.name, leading=2)

    def batcher(self, *, bound: bool) -> Batcher:
        """A new batcher for it, for calls with (`bound`) or without an owner before the items."""
        return Batcher(self, self._bound if bound else self._unbound)


class Batcher:
    """The queue, the workers and the counts behind one function, or behind one method of one instance."""

    def __init__(self, function: BatchFunction, binder: Binder) -> None:
        policy, name = function.options.policy, function.name
        recorder = Recorder()
        execution = Execution(function.func, Items(name), name)
        self.name = name
        self.buffersize = 4 * policy.batch_size * policy.max_concurrent_batches  # one batch runs, the next ones are there
        self.recorder = recorder
        self.runtime: ThreadRuntime | EventLoops = (
            EventLoops(lambda: EventLoopRuntime(policy, execution, recorder, name), name)
            if function.coroutine
            else ThreadRuntime(policy, execution, recorder, name)
        )
        self._binder = binder
        self._home = getattr(function.func, "__qualname__", "").rpartition(".")[0]  # the class that defines it, if one does

    def request(self, item: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, owner: object, waker: Any, single: bool) -> Request:
        """The call `fn(item, *args, **kwargs)`; a list is many items unless `single`.

        Raises:
            TypeError: the arguments do not fit the function.
        """
        if item is MISSING:
            name = self._binder.items_name
            if name is None or name not in kwargs:
                got = f", got only {', '.join(kwargs)}" if kwargs else ""
                raise TypeError(f"{self.name} needs an item, or a list of items{f' ({name})' if name else ''}{got}")
            item = kwargs.pop(name)
        if args and isinstance(item, type) and self._home in {kind.__qualname__ for kind in item.__mro__}:
            raise TypeError(UNDER_CLASSMETHOD.format(self.name))  # Python 3.13 calls what is below @classmethod without binding it
        group = self._binder.bind(args, kwargs)
        if isinstance(item, list) and not single:
            items = list(item)
            return Request(items, len(items), group, waker=waker, listed=True, owner=owner)
        return Request([item], 1, group, waker=waker, owner=owner)

    def stats(self) -> Stats:
        return self.recorder.snapshot(self.runtime.queue_size, self.runtime.in_flight)
