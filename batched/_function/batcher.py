"""A batch function with its settings, and the batcher that answers calls of it."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Final, Literal, NamedTuple, TypedDict, TypeVar, cast, get_args

from .._collate.arguments import Binder
from .._collate.collator import Collator
from .._collate.features.collate import FeatureCollator
from .._collate.features.parse import FeatureParser
from .._collate.features.settings import Device, FeatureSettings, PaddingSide, Unpad
from .._collate.items import ItemCollator
from .._core.policy import BatchPolicy, Flush, OnFull
from .._execution.execution import Execution, is_failure, never
from .._execution.memory import is_out_of_memory
from .._runtime.async_backend import ends_current_task, is_notebook
from .._runtime.event_loop import EventLoopRuntime, EventLoops
from .._runtime.observer import Observer
from .._runtime.thread import ThreadRuntime
from ..stats import BatchRecord, Recorder, Stats
from .requests import (
    FeatureRequestParser,
    ItemRequestParser,
    Preparation,
    PreparedRequestParser,
    RequestParser,
)

ONE_ITEM: Final = {"bool", "bytes", "complex", "dict", "float", "int", "str", "None"}
"""Names of types that are no lists, as in annotations."""

Part = TypeVar("Part", BatchPolicy, FeatureSettings)
OnOom = Literal["split", "raise"]

Kind = Literal["function", "method", "static", "class"]
"""Object that attribute access binds: the instance, nothing ("static"), or the class.

Called unbound, as by a decorator above it, a "method" takes its first argument as the instance, and
a "function" as the items.
"""

OTHER_SETTINGS = ("length", "on_oom", "isolate_errors", "on_batch", "name")
"""Settings that are neither the scheduler's nor the collator's."""


class Settings(TypedDict, total=False):
    """The settings of a decorator; each is explained in `BatchPolicy` or `Options`."""

    batch_size: int
    timeout_ms: float
    small_batch_threshold: int
    flush: Flush
    max_batch_tokens: int | None
    max_queue_size: int | None
    on_full: OnFull
    queue_timeout_ms: float | None
    max_concurrent_batches: int
    prefetch: int
    isolate_errors: bool
    on_batch: Callable[[BatchRecord], object] | None
    length: Callable[[Any], float] | None
    on_oom: OnOom
    name: str


class InferenceSettings(Settings, total=False):
    """Settings of the tensor variant; `FeatureSettings` explains the additions.

    `spread_kwargs` is absent, since it changes types.
    """

    pad_token: Mapping[str, Any]
    pad_tokens: Mapping[str, Any]
    padding_side: PaddingSide
    pad_to_multiple_of: int
    unpad: Unpad
    device: Device | None
    output_device: Device | None


@dataclass(frozen=True)
class Options:
    """Valid settings of a decorator."""

    policy: BatchPolicy = field(default_factory=BatchPolicy)
    features: FeatureSettings | None = None
    """Settings of the tensor variant; None in the plain one."""
    length: Callable[[Any], float] | None = None
    """Function that returns the length of an item, so that items of like length run together.

    None: the length of its rows (tensor variant), or unknown.
    """
    on_oom: OnOom = "raise"
    """Second attempts, in halves, at a batch that runs out of memory; "raise": none."""
    isolate_errors: bool = False
    """Second attempts at the halves of a batch that failed, to find the items that fail alone."""
    on_batch: Callable[[BatchRecord], object] | None = None
    """An observer, called with a record of each batch after its callers have been answered."""
    name: str | None = None
    """For messages and thread names; the function's qualified name if not given."""

    def __post_init__(self) -> None:
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"name must be a string, got {self.name!r}")
        if self.length is not None and not callable(self.length):
            raise TypeError(
                f"length must be a function of an item that returns its length, got {self.length!r}"
            )
        if self.on_oom not in get_args(OnOom):
            raise ValueError(f"on_oom must be 'split' or 'raise', got {self.on_oom!r}")
        if not isinstance(self.isolate_errors, bool):
            raise TypeError(f"isolate_errors must be True or False, got {self.isolate_errors!r}")
        if self.on_batch is not None and (
            not callable(self.on_batch) or _is(inspect.iscoroutinefunction, self.on_batch)
        ):
            raise TypeError(
                f"on_batch must be a plain function of a BatchRecord, got {self.on_batch!r}"
            )

    @property
    def item_length(self) -> Callable[[Any], float] | None:
        """`length` of the plain variant; a budget of tokens needs one."""
        return (
            len if self.length is None and self.policy.max_batch_tokens is not None else self.length
        )

    def settings(self) -> dict[str, Any]:
        """Return every setting of the decorator by name."""
        features = {} if self.features is None else vars(self.features)
        own = {name: getattr(self, name) for name in OTHER_SETTINGS}
        return vars(self.policy) | features | own

    def updated(self, settings: Mapping[str, Any]) -> Options:
        """Return these options with other `settings`.

        Raises:
            TypeError, ValueError: a setting is unknown, of the wrong type, or out of its range.
        """
        changes = dict(settings)
        if self.features is not None and "pad_tokens" in changes:
            if "pad_token" in changes:
                raise TypeError("pad_token and pad_tokens are the same setting; give one of them")
            changes["pad_token"] = changes.pop("pad_tokens")
        policy = replace_known(self.policy, changes)
        features = None if self.features is None else replace_known(self.features, changes)
        own = {name: changes.pop(name) for name in OTHER_SETTINGS if name in changes}
        if changes:
            from difflib import get_close_matches

            unknown, known = next(iter(changes)), list(self.settings())
            alike = get_close_matches(unknown, known, 1)
            names = f"the settings are {', '.join(known)}"
            hint = f"did you mean {alike[0]!r}?" if alike else names
            raise TypeError(f"there is no setting {unknown!r}; {hint}")
        return replace(self, policy=policy, features=features, **own)


def replace_known(part: Part, changes: dict[str, Any]) -> Part:
    """Return `part` with its settings among `changes` replaced, and remove them from `changes`."""
    known = [setting.name for setting in fields(part)]
    return replace(part, **{name: changes.pop(name) for name in known if name in changes})


@dataclass(frozen=True)
class BatchFunction:
    """The function that the user wrote, and its settings."""

    func: Callable[..., Any]
    kind: Kind
    coroutine: bool
    options: Options
    told: set[str] = field(default_factory=set, compare=False)
    """Warnings already issued, once per decorated function."""
    preparation: Preparation | None = None
    """Preparation of its items; None: callers pass them as they are."""

    @classmethod
    def of(cls, func: object, options: Options, *, coroutines: bool) -> BatchFunction:
        """Return the batch function made of `func`; `coroutines` tells whether it may be one.

        Raises:
            TypeError: `func` cannot be batched.
        """
        kind: Kind
        if isinstance(func, (staticmethod, classmethod)):
            kind = "static" if isinstance(func, staticmethod) else "class"
            func = func.__func__
        else:
            kind = _kind_of(func)
        if inspect.isclass(func) or not callable(func):
            what = "a list" if options.features is None else "a dict of features"
            raise TypeError(
                f"only a function that takes {what} can be batched, got {func!r}; "
                "settings are passed by keyword"
            )
        name = options.name or getattr(func, "__qualname__", None) or type(func).__qualname__
        if _is(inspect.isgeneratorfunction, func) or _is(inspect.isasyncgenfunction, func):
            raise TypeError(
                f"{name} is a generator function; a batch function returns all its results at once"
            )
        if options.features is None:
            _refuse_function_of_one(func, name, kind)
        coroutine = _is(inspect.iscoroutinefunction, func)
        if coroutine and not coroutines:
            where = "batched.aio" if options.features is None else "batched.aio.inference"
            raise TypeError(f"{name} is a coroutine function; decorate it with {where}.dynamically")
        return cls(func, kind, coroutine, replace(options, name=name))

    def __post_init__(self) -> None:
        if self.coroutine and self.options.policy.prefetch:
            raise TypeError(
                f"{self.name} is a coroutine function, whose batches are collated on the loop that "
                "runs it; prefetch needs a plain one"
            )

    @property
    def name(self) -> str:
        assert self.options.name is not None
        return self.options.name

    def warn_of_blocking(self) -> None:
        """Warn the first caller that blocks an event loop, except in a notebook.

        The loop of a notebook has nothing else to do.
        """
        if "blocking" not in self.told and not is_notebook():
            self.told.add("blocking")
            warnings.warn(
                f"waiting for {self.name} blocks the event loop of this thread, so that no other "
                "call from there can join its batch; "
                f"use `await {self.name}.acall(...)`",
                RuntimeWarning,
                stacklevel=3,
            )

    @cached_property
    def _unbound(self) -> Binder:
        return Binder(self.func, self.name, leading=0 if self._spreads else 1)

    @cached_property
    def _bound(self) -> Binder:
        return Binder(self.func, self.name, leading=1 if self._spreads else 2)

    @property
    def _spreads(self) -> bool:
        return self.options.features is not None and self.options.features.spread_kwargs

    def parts(self, *, bound: bool) -> Parts:
        """Return new parts, for calls with (`bound`) or without an owner before the items."""
        options, name = self.options, self.name
        binder = self._bound if bound else self._unbound
        requests: RequestParser
        collator: Collator
        if options.features is None:
            requests = (
                ItemRequestParser(name, binder, options.item_length)
                if self.preparation is None
                else PreparedRequestParser(name, binder, options.item_length, self.preparation)
            )
            collator = ItemCollator(name)
        else:
            collator = FeatureCollator(name, options.features, self.told)
            parser = FeatureParser(
                name, options.features, options.length, collator.devices, self.told
            )
            spread = options.features.spread_kwargs
            requests = FeatureRequestParser(name, binder, parser, spread=spread)
        execution = Execution(
            self.func,
            collator,
            splits=is_out_of_memory if options.on_oom == "split" else never,
            isolates=is_failure if options.isolate_errors else never,
            ends_task=ends_current_task,
        )
        return Parts(self, None, requests, execution)


class Parts(NamedTuple):
    """Parts that run batches of a function; a `Batcher` adds queue, workers and statistics."""

    function: BatchFunction
    owner: object
    """Instance, or class, of a bound method; None otherwise, and in the parts of a batcher."""
    requests: RequestParser
    execution: Execution
    """The function, and the collator."""


class Batcher:
    """Queue, workers and statistics of one function, or of one method of one instance."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        function, _, self.requests, execution = parts
        options, name = function.options, function.name
        policy, recorder = options.policy, Recorder()
        observer = None if options.on_batch is None else Observer(name, options.on_batch)
        # callers who only submit
        self.may_block = policy.max_queue_size is not None and policy.on_full == "wait"
        self.recorder = recorder
        self.runtime: ThreadRuntime | EventLoops = (
            EventLoops(lambda: EventLoopRuntime(policy, execution, recorder, observer, name), name)
            if function.coroutine
            else ThreadRuntime(policy, execution, recorder, observer, name)
        )

    def stats(self) -> Stats:
        return self.recorder.snapshot(*self.runtime.load())


def _refuse_function_of_one(func: Callable[..., Any], name: str, kind: str) -> None:
    """Raise a TypeError if the annotation of `func` says that it takes one item."""
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):  # builtins need not have one
        return
    if parameters and (kind == "class" or parameters[0].name == "self"):
        del parameters[0]
    if not parameters or parameters[0].kind > inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return
    annotation = inspect.formatannotation(parameters[0].annotation).strip("'")
    kinds = {each.partition("[")[0].strip() for each in annotation.split("|")}
    if kinds - {"None"} and kinds <= ONE_ITEM:
        item = parameters[0].name
        raise TypeError(
            f"{name} takes one item ({item}: {annotation}); a batch function takes a list, "
            f"`{item}: list[{annotation}]`, and returns one result per item"
        )


def _kind_of(func: object) -> Kind:
    """Return the object that attribute access binds.

    A function of the items alone is no method: it may be the default of a dataclass.
    """
    if isinstance(func, types.MethodType) or not hasattr(type(func), "__get__"):
        return "static"
    try:
        signature = inspect.signature(cast("Callable[..., Any]", func))
    except Exception:  # builtins need not have one; late annotations may not be there yet
        return "function"
    parameters = list(signature.parameters.values())
    if len(parameters) > 1 and parameters[0].name in ("self", "cls"):
        return "method"
    needed = [
        each
        for each in parameters
        if each.kind <= each.VAR_POSITIONAL and each.default is each.empty
    ]
    several = len(needed) > 1 or any(each.kind is each.VAR_POSITIONAL for each in needed)
    return "function" if several else "static"


def _is(check: Callable[[object], bool], func: object) -> bool:
    """Return the answer of `check` for `func` or, if `func` is an object, for its `__call__`."""
    while isinstance(func, partial):
        func = func.func
    return check(func) or check(type(func).__call__)
