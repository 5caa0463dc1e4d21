"""A batch function, the parts that run batches of it, and its batchers."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

from .._collate.arguments import Binder, is_in_class, signature_of, takes_instance
from .._collate.features.collate import FeatureCollator
from .._collate.features.parse import FeatureParser
from .._collate.items import ItemCollator
from .._core.capacity import Capacity
from .._execution.execution import Execution, is_failure, never
from .._execution.memory import is_out_of_memory
from .._runtime.async_backend import current_loop, ends_current_task, is_cell
from .._runtime.event_loop import EventLoopRuntime, EventLoops
from .._runtime.observer import make_observer
from .._runtime.recorder import Recorder
from .._runtime.thread import ThreadRuntime
from .._runtime.waits import current_worker
from .._runtime.wakers import Future
from .._steps.execution import StepExecution
from .preparation import Preparation, PreparedParser, Preparers
from .requests import Args, FeatureRequestParser, ItemRequestParser
from .settings import Options, is_kind, takes_arguments

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
    def of(cls, func: object, options: Options) -> BatchFunction:
        """Return the batch function made of `func`.

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
            takes = "`batched.Rows`" if options.steps else "a list"
            raise TypeError(
                f"only a function that takes {'a dict of features' if options.features else takes} "
                f"can be batched, got {func!r}; settings are passed by keyword"
            )
        name = options.name or getattr(func, "__qualname__", type(func).__qualname__)
        if is_kind(inspect.isgeneratorfunction, func) or is_kind(inspect.isasyncgenfunction, func):
            right = "let it return all results at once, as a list"
            if options.steps is not None:
                right = "a function that works in steps passes pieces on by `row.emit(piece)`"
            raise TypeError(f"{name} is a generator function; {right}")
        if kind is None:
            # a function of the items alone is no method: it may be the default of a dataclass
            kind = "method" if takes_instance(func) else "static"
            in_class = is_in_class(func) and "<lambda>" not in str(name)
            if kind == "static" and in_class and not takes_arguments(func, 1):
                raise TypeError(
                    f"{name} is in a class: the first parameter of a method is named self or cls, "
                    "and a function without an instance is decorated with staticmethod, too"
                )
        coroutine = is_kind(inspect.iscoroutinefunction, func)
        function = cls(func, kind, coroutine, replace(options, name=name))
        function._check_lists()
        return function

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(signature_of(self.func).parameters.values())[self.kind != "static" :]

    @cached_property
    def parts_of_items(self) -> tuple[str, ...]:
        """With `unpack`, names of the parameters that get the parts of an item; else empty."""
        if not self.options.unpack:
            return ()
        places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(
            each.name
            for each in self._parameters
            if each.kind in places and each.default is each.empty
        )

    def _check_lists(self) -> None:
        """Raise a TypeError if the function takes no list, or a wrong number of lists."""
        own = signature_of(self.func, follow_wrapped=False).parameters.values()
        for first in [*own][self.kind != "static" :][: not self.options.spreads]:
            kind = inspect.formatannotation(first.annotation).strip("'")
            if kind in ("str", "int", "float"):
                raise TypeError(
                    f"{self.name} takes one {kind}, and a batch function gets a list of items: "
                    f"{first.name}: list[{kind}]"
                )
        if self.options.unpack:
            if len(self.parts_of_items) < 2:
                raise TypeError(
                    f"{self.name} has unpack=True, so it must take a list for each part of its "
                    "items: two or more parameters without a default"
                )
            if self.options.policy.max_batch_tokens is not None and self.options.length is None:
                raise TypeError(
                    f"{self.name} has unpack=True, and max_batch_tokens needs the length of each "
                    "item; pass length=, a function of the tuple that returns it"
                )
        elif self.options.features is None and self.options.steps is None:
            for second in self._parameters[1:2]:
                if (
                    second.kind is second.POSITIONAL_OR_KEYWORD
                    and second.default is second.empty
                    and re.match(
                        r"'?([a-z.]+\.)?([Ll]ist|Sequence|Iterable|Collection)\b",
                        inspect.formatannotation(second.annotation),
                    )
                ):
                    raise TypeError(
                        f"{self.name} takes two lists, and extra arguments are shared by all "
                        "items: with unpack=True each item is a tuple with one entry for each "
                        f"list; if {second.name} is shared, make it keyword-only: "
                        f"`*, {second.name}`"
                    )

    @property
    def name(self) -> str:
        return str(self.options.name)

    @property
    def runtime(self) -> Any:
        """Class of its runtimes."""
        return EventLoopRuntime if self.coroutine else ThreadRuntime

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

    @cached_property
    def _binders(self) -> dict[bool, Binder]:
        return {}

    def parts(self, *, bound: bool) -> Parts:
        """Return new parts, for calls with (`bound`) or without an owner before the items."""
        options, name = self.options, self.name
        if (binder := self._binders.get(bound)) is None:
            items = 0 if options.spreads else len(self.parts_of_items) or 1
            binder = self._binders[bound] = Binder(self.func, name, leading=bound + items)
        if options.features is None:
            requests: Any = ItemRequestParser(name, binder, options, self.parts_of_items)
            collator: Any = ItemCollator(name, unpack=options.unpack)
        else:
            collator = FeatureCollator(name, options.features, self.warned)
            features = FeatureParser(name, options.features, options.length, collator.devices)
            requests = FeatureRequestParser(name, binder, features, spread=options.spreads)
        make: Any = Execution
        if options.steps is not None:
            capacity = Capacity(options.policy.batch_size, options.policy.max_batch_tokens)
            make = partial(StepExecution, capacity=capacity)
        execution = make(
            self.func,
            collator,
            splits=is_out_of_memory if options.on_oom == "split" else never,
            isolates=is_failure if options.isolate_errors else never,
            ends_task=ends_current_task,
        )
        if self.preparation is not None:
            requests = PreparedParser(name, requests, self.preparation)
        return Parts(self, None, requests, execution)


class Parts(NamedTuple):
    """Parts that run batches of a function; a `Batcher` adds queue, workers and statistics."""

    function: BatchFunction
    owner: object
    """Instance, or class, of a bound method; None otherwise, and in the parts of a batcher."""
    requests: Any
    """The parser of calls."""
    execution: Execution
    """The function, and the collator."""


class Batcher:
    """Queue, workers and statistics of one function, or of one method of one instance."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        function, _, self.requests, execution = parts
        options, name = function.options, function.name
        policy, self.recorder = options.policy, Recorder(name)
        # callers who only submit
        self.may_block = policy.max_queue_size is not None and policy.on_full == "wait"
        preparation = function.preparation
        if preparation is None and options.prepare is not None:
            preparation = Preparation(options.prepare, options.prepare_threads)
        self.preparers: Preparers | None = None
        """Threads that prepare calls; None: each call is prepared where it is made."""
        if preparation is not None and preparation.threads:
            self.preparers = Preparers(preparation.threads, name)
            parser = getattr(self.requests, "parser", self.requests)
            self.requests = PreparedParser(name, parser, preparation, self.preparers)
        observer = None if options.on_batch is None else make_observer(name, options.on_batch)
        make = partial(function.runtime, policy, execution, self.recorder, observer, name)
        self.runtime: Any = EventLoops(make, name) if function.coroutine else make()

    def close_preparers(self) -> None:
        """End the threads that prepare calls. A later call starts new threads."""
        if self.preparers is not None:
            self.preparers.close()

    def outcomes(
        self,
        items: Sequence[Any],
        ended: Callable[[list[int], list[Any]], object],
        args: Args = (),
        owner: object = None,
    ) -> Future[None]:
        """Submit a call of items that each have their own outcome, and return its future.

        `ended` is called for each part of a batch that has ended, in the thread or on the loop that
        ran it: with places in `items`, and a result or an exception for each. The call is one
        request, so its items cost no futures, and an item that is slow or fails holds up no other.
        """
        loop = current_loop()
        future: Future[None] = Future()
        request = self.requests.parse([*items], args, {}, owner, future, False)
        places: list[list[int]] = [[] for _ in range(request.size)]
        for place, position in enumerate(request.places or range(len(items))):
            places[position].append(place)

        def on_part(start: int, outcomes: list[Any]) -> None:
            here = places[start : start + len(outcomes)]
            ended(
                [place for each in here for place in each],
                [one for each, one in zip(here, outcomes, strict=True) for _ in each],
            )

        request.separate, request.on_part = True, on_part
        runtime = self.runtime.here(loop)
        future.bind(request, runtime, loop if self.parts.function.coroutine else None, None)
        if request.size:
            runtime.submit(request, from_event_loop=True)
        else:
            future.wake()
        return future
