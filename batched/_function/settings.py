"""Settings of a decorator, and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, TypedDict, get_args

from .._collate.arguments import is_method, signature_of
from .._collate.features.settings import Device, FeatureSettings, PaddingSide, Unpad
from .._core.checks import check_whole, suggest
from .._core.policy import BatchPolicy, Flush, OnFull
from ..stats import BatchRecord

OnOom = Literal["split", "raise"]

PARTS: Final = ("policy", "features", "steps")
"""Fields of `Options` with several settings each."""

OF_FEATURES: Final = {"pad_tokens", *FeatureSettings.__annotations__}
"""Settings of functions of features alone."""


class _SharedSettings(TypedDict, total=False):
    batch_size: int
    small_batch_threshold: int
    max_batch_tokens: int | None
    max_queue_size: int | None
    on_full: OnFull
    queue_timeout_ms: float | None
    max_concurrent_batches: int
    prepare_threads: int
    length: Callable[[Any], float] | None
    on_oom: OnOom
    on_batch: Callable[[BatchRecord], object] | None
    name: str


class Settings(_SharedSettings, total=False):
    """The settings of a decorator; each is explained in `BatchPolicy` or `Options`.

    `prepare` and `unpack` are absent, since they change types.
    """

    timeout_ms: float | None
    flush: Flush
    isolate_errors: bool
    dedupe: bool | Callable[[Any], Hashable]


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


class StepSettings(_SharedSettings, total=False):
    """The settings of a function that works in steps."""

    max_pieces: int


NOT_OF_STEPS: Final = {"timeout_ms", "flush", "isolate_errors", "dedupe", "unpack"}
"""Settings that mean nothing where calls join whenever there is room."""

SHORTEST_MS: Final = {"timeout_ms": 0.1, "queue_timeout_ms": 1}
"""Least times besides 0: a shorter one is more likely meant in seconds (ms)."""


@dataclass(frozen=True)
class Steps:
    """Settings of functions that work in steps, besides `Options`."""

    max_pieces: int = 64
    """Most pieces of a stream that wait for their reader, if they are text."""

    def __post_init__(self) -> None:
        check_whole("max_pieces", self.max_pieces)


@dataclass(frozen=True)
class Options:
    """Valid settings of a decorator."""

    policy: BatchPolicy = field(default_factory=BatchPolicy)
    features: FeatureSettings | None = None
    """Settings of the tensor variant; None in the plain one."""
    steps: Steps | None = None
    """Settings of a function that works in steps; None for all other functions."""
    prepare: Callable[..., Any] | None = None
    """Function that returns the item for the argument of a call, before the call is queued."""
    prepare_threads: int = 8
    """Most threads that call `prepare`, for calls from event loops, list calls and `map`."""
    length: Callable[[Any], float] | None = None
    """Function that returns the length of an item, so that items of like length run together.

    None: the length of its rows (tensor variant), or unknown.
    """
    on_oom: OnOom = "raise"
    """Treatment of a batch that runs out of memory: it runs again in halves, or its callers get
    the error.
    """
    isolate_errors: bool = False
    """Whether a batch that fails is run again in halves, to find the items that fail alone."""
    dedupe: bool | Callable[[Any], Hashable] = False
    """Whether equal items of one call, and of one batch, are computed once; or a function that
    returns the key of an item, which is equal for equal items.
    """
    unpack: bool = False
    """Whether an item is a tuple, and the function takes a list for each of its parts."""
    on_batch: Callable[[BatchRecord], object] | None = None
    """An observer, called with a record of each batch after its callers have been answered."""
    name: str | None = None
    """For messages and thread names; the function's qualified name if not given."""

    def __post_init__(self) -> None:
        if self.name is not None and not (isinstance(self.name, str) and self.name):
            raise TypeError(f"name must be a string that is not empty, got {self.name!r}")
        form = "a plain function of an item that returns its length"
        _check_function("length", self.length, form)
        form = "a plain function of one argument that returns the item"
        _check_function("prepare", self.prepare, form)
        _check_function("on_batch", self.on_batch, "a plain function of a BatchRecord")
        check_whole("prepare_threads", self.prepare_threads)
        for name, least in SHORTEST_MS.items():
            if 0 < (value := getattr(self.policy, name) or 0) < least:
                raise ValueError(f"{name} is a time in milliseconds, at least {least}, got {value}")
        if self.on_oom not in get_args(OnOom):
            raise ValueError(f"on_oom must be 'split' or 'raise', got {self.on_oom!r}")
        for name in ("isolate_errors", "unpack"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        if not isinstance(self.dedupe, bool):
            form = "True, False or a plain function of an item that returns its key"
            _check_function("dedupe", self.dedupe, form)
        if self.dedupe and self.features:
            raise TypeError(
                "dedupe is for functions of a list; put features into the items of such a function"
            )

    @property
    def item_length(self) -> Callable[[Any], float] | None:
        """`length` for plain items; with `max_batch_tokens` alone, `len`."""
        if self.length is None and self.policy.max_batch_tokens is not None:
            return partial(_length_of, str(self.name))
        return self.length

    @property
    def spreads(self) -> bool:
        """Whether the function takes its features by keyword."""
        return self.features is not None and self.features.spread_kwargs

    @property
    def _parts(self) -> dict[str, Any]:
        return {name: part for name in PARTS if (part := getattr(self, name)) is not None}

    def settings(self) -> dict[str, Any]:
        """Return every setting of the decorator by name."""
        settings: dict[str, Any] = {}
        for part in (*self._parts.values(), self):
            settings |= vars(part)
        hidden = NOT_OF_STEPS if self.steps else {"unpack"} if self.features else set()
        return {name: settings[name] for name in settings if name not in hidden.union(PARTS)}

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
        known = self.settings()
        for name in changes:
            if name not in known:
                raise TypeError(f"there is no setting {name!r}{self._hint(name, known)}")
        parts = {
            name: replace(part, **{key: changes.pop(key) for key in vars(part) if key in changes})
            for name, part in self._parts.items()
        }
        options = replace(self, **parts, **changes)
        if options.policy.on_full == "raise" and options.policy.max_queue_size is None:
            raise ValueError("on_full='raise' needs max_queue_size, the most items that may wait")
        return options

    def _hint(self, unknown: str, known: Iterable[str]) -> str:
        if self.steps is not None and unknown in NOT_OF_STEPS:
            return " of a function that works in steps, whose calls join whenever there is room"
        if self.features is None and unknown in OF_FEATURES:
            return "; it belongs to batched.inference.dynamically"
        hint = suggest(unknown, known)
        return hint or f"; the settings are {', '.join(known)}"


def _check_function(name: str, function: Any, form: str) -> None:
    """Raise TypeError unless the setting `name` is None or a plain function of one argument.

    `prepare` may take an instance, too. `form` is a phrase for a right value.
    """
    if function is None:
        return
    fits = callable(function)
    fits &= not is_kind(inspect.iscoroutinefunction, function)
    arguments = 1 + (name == "prepare" and is_method(function))
    if not fits or not takes_arguments(function, arguments):
        raise TypeError(f"{name} must be {form}, got {function!r}")


def takes_arguments(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with `count` arguments by position."""
    try:
        signature_of(function).bind(*[None] * count)
    except TypeError:
        return False
    return True


def _length_of(name: str, item: Any) -> int:
    """Return `len(item)` for the function `name`, whose `max_batch_tokens` needs it."""
    with suppress(TypeError):
        if not isinstance(item, Mapping | tuple):
            return len(item)
    raise TypeError(
        f"{name} has max_batch_tokens, which needs the length of each item, and len() does not "
        f"tell that of a {type(item).__name__}; pass length=, a function that returns it"
    )


def is_kind(check: Callable[[object], bool], func: object) -> bool:
    """Return whether `check` holds for `func` or, if `func` is an object, for its `__call__`."""
    while isinstance(func, partial):
        func = func.func
    return check(func) or check(type(func).__call__)
