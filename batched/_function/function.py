"""A batch function, the parts that run batches of it, and its batchers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Final, Literal, NamedTuple

from .._collate.arguments import Binder, signature_of, takes_instance
from .._collate.collator import Collator
from .._collate.features.collate import FeatureCollator
from .._collate.features.parse import FeatureParser
from .._collate.items import ItemCollator
from .._execution.execution import Execution, is_failure, never
from .._execution.memory import is_out_of_memory
from .._runtime.async_backend import ends_current_task, is_cell
from .._runtime.event_loop import EventLoopRuntime, EventLoops
from .._runtime.observer import make_observer
from .._runtime.recorder import Recorder
from .._runtime.thread import ThreadRuntime
from .._runtime.waits import current_worker
from .dedupe import deduping, item_itself
from .preparation import (
    FunctionPreparation,
    Preparation,
    PreparedParser,
    PreparingEventLoopRuntime,
    PreparingThreadRuntime,
)
from .requests import FeatureRequestParser, ItemRequestParser, RequestParser
from .settings import Options

ONE_ITEM: Final = {"bool", "bytes", "complex", "dict", "float", "int", "str"}
"""Names of types, as in annotations, that are no lists."""

Kind = Literal["method", "static", "class"]
"""Object that attribute access binds: the instance, nothing ("static"), or the class."""


@dataclass(frozen=True)
class BatchFunction:
    """The function that the user wrote, and its settings."""

    func: Callable[..., Any]
    kind: Kind
    coroutine: bool
    options: Options
    warned: set[str] = field(default_factory=set, compare=False)
    """Warnings already issued, once per decorated function."""
    preparation: Preparation | None = None
    """Preparation of its items; None: callers pass them as they are."""

    @classmethod
    def of(cls, func: object, options: Options, *, coroutines: bool) -> BatchFunction:
        """Return the batch function made of `func`; `coroutines` tells whether it may be one.

        Raises:
            TypeError: `func` cannot be batched.
        """
        kind: Kind | None = None
        if isinstance(func, staticmethod | classmethod):
            kind = "static" if isinstance(func, staticmethod) else "class"
            func = func.__func__
        if inspect.isclass(func):
            raise TypeError(
                f"a class cannot be batched, got {func!r}; decorate its method, or pass an "
                "instance that can be called"
            )
        if not callable(func):
            raise TypeError(
                f"only a function that takes {_input(options)} can be batched, got {func!r}; "
                "settings are passed by keyword"
            )
        name = options.name or getattr(func, "__qualname__", None) or type(func).__qualname__
        if _is(inspect.isgeneratorfunction, func) or _is(inspect.isasyncgenfunction, func):
            right = "let it return all results at once, as a list"
            if options.steps is not None:
                right = "a function that works in steps passes pieces on by `row.emit(piece)`"
            raise TypeError(f"{name} is a generator function; {right}")
        if kind is None:
            # a function of the items alone is no method: it may be the default of a dataclass
            kind = "method" if takes_instance(func) else "static"
        if options.features is None and options.steps is None:
            _refuse_function_of_one(name, func, 0 if kind == "static" else 1)
        coroutine = _is(inspect.iscoroutinefunction, func)
        if coroutine and not coroutines:
            where = "batched.aio" if options.features is None else "batched.aio.inference"
            which = "dynamically" if options.steps is None else "continuously"
            raise TypeError(f"{name} is a coroutine function; decorate it with {where}.{which}")
        return cls(func, kind, coroutine, replace(options, name=name))

    def __post_init__(self) -> None:
        if self.coroutine and self.options.policy.prefetch:
            raise TypeError(
                f"{self.name} is a coroutine function, whose batches are collated on its event "
                "loop; prefetch needs a plain function"
            )

    @property
    def name(self) -> str:
        return str(self.options.name)

    @property
    def runtimes(self) -> tuple[Any, Any]:
        """Classes of its runtimes: without and with a preparation of calls."""
        if self.coroutine:
            return EventLoopRuntime, PreparingEventLoopRuntime
        return ThreadRuntime, PreparingThreadRuntime

    def warn_of_blocking(self) -> None:
        """Warn the first caller that blocks an event loop.

        A notebook is not warned, because its loop has nothing else to do. Neither is a batch
        function that runs in a thread: if a loop runs there, `batched.testing` has put it there.
        """
        worker = current_worker()
        if (
            "blocking" not in self.warned
            and not is_cell()
            and (worker is None or worker.thread is None)
        ):
            self.warned.add("blocking")
            warnings.warn(
                f"waiting for {self.name} blocks the event loop of this thread, so that no other "
                "call from there can join its batch; "
                f"use `await {self.name}.acall(...)`",
                RuntimeWarning,
                stacklevel=3,
            )

    def warn_of_single_calls(self) -> None:
        """Warn the first thread that calls the function item by item, as a loop does."""
        if "single calls" not in self.warned:
            self.warned.add("single calls")
            warnings.warn(
                f"one thread calls {self.name} item by item, so that each batch has one item; "
                f"pass a list, `{self.name}(list(items))`, or use `{self.name}.map(items)`",
                RuntimeWarning,
                stacklevel=3,
            )

    @cached_property
    def _unbound(self) -> Binder:
        return Binder(self.func, self.name, leading=0 if self.options.spreads else 1)

    @cached_property
    def _bound(self) -> Binder:
        return Binder(self.func, self.name, leading=1 if self.options.spreads else 2)

    def parts(self, *, bound: bool) -> Parts:
        """Return new parts, for calls with (`bound`) or without an owner before the items."""
        options, name = self.options, self.name
        binder = self._bound if bound else self._unbound
        requests: RequestParser
        collator: Collator
        if options.features is None:
            requests = ItemRequestParser(name, binder, options.item_length)
            collator = ItemCollator(name)
        else:
            collator = FeatureCollator(name, options.features, self.warned)
            features = FeatureParser(
                name, options.features, options.length, collator.devices, self.warned
            )
            requests = FeatureRequestParser(name, binder, features, spread=options.spreads)
        execution = Execution(
            self.func,
            collator,
            splits=is_out_of_memory if options.on_oom == "split" else never,
            isolates=is_failure if options.isolate_errors else never,
            ends_task=ends_current_task,
            in_steps=options.steps is not None,
        )
        parser: RequestParser | PreparedParser = requests
        if self.preparation is not None:
            parser = PreparedParser(name, requests, self.preparation, defers=False)
        return Parts(self, None, parser, execution)


class Parts(NamedTuple):
    """Parts that run batches of a function; a `Batcher` adds queue, workers and statistics."""

    function: BatchFunction
    owner: object
    """Instance, or class, of a bound method; None otherwise, and in the parts of a batcher."""
    requests: RequestParser | PreparedParser
    execution: Execution
    """The function, and the collator."""


class Batcher:
    """Queue, workers and statistics of one function, or of one method of one instance."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        function, _, requests, execution = parts
        options, name = function.options, function.name
        policy, recorder = options.policy, Recorder(name)
        observer = None if options.on_batch is None else make_observer(name, options.on_batch)
        preparation = function.preparation
        if options.prepare is not None and preparation is None:
            preparation = FunctionPreparation(
                options.prepare, options.prepare_threads, of_features=options.features is not None
            )
        self.prepares = preparation is not None and preparation.threads > 0
        """Whether the runtime prepares the calls."""
        kind, preparing = function.runtimes
        first: tuple[Any, ...] = ()  # arguments before those of every runtime
        if preparation is not None and preparation.threads:
            parser = requests.parser if isinstance(requests, PreparedParser) else requests
            requests = PreparedParser(name, parser, preparation, defers=True)
            kind, first = preparing, (preparation,)
        if options.dedupe is not False:
            key = item_itself if options.dedupe is True else options.dedupe
            kind, first = deduping(kind), (key, *first)
        make = partial(kind, *first, policy, execution, recorder, observer, name)
        # callers who only submit
        self.may_block = policy.max_queue_size is not None and policy.on_full == "wait"
        self.recorder = recorder
        self.requests = requests
        self.runtime: Any = EventLoops(make, name) if function.coroutine else make()


def _input(options: Options) -> str:
    """Return the words for the first argument of a function with these options."""
    if options.steps is not None:
        return "`batched.Rows`"
    return "a list" if options.features is None else "a dict of features"


def _refuse_function_of_one(name: str, func: Callable[..., Any], position: int) -> None:
    """Raise a TypeError if the parameter at `position` is annotated with a type of one item."""
    for first in list(signature_of(func).parameters.values())[position : position + 1]:
        annotation = inspect.formatannotation(first.annotation).strip("'")
        if annotation.partition("[")[0] in ONE_ITEM:
            raise TypeError(
                f"{name} takes one item ({first.name}: {annotation}); a batch function takes a "
                f"list, `{first.name}: list[{annotation}]`, and returns one result per item"
            )


def _is(check: Callable[[object], bool], func: object) -> bool:
    """Return whether `check` holds for `func` or, if `func` is an object, for its `__call__`."""
    while isinstance(func, partial):
        func = func.func
    return check(func) or check(type(func).__call__)
