"""Step: one batch function over all rows, and its settings, checked where they are written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from math import inf
from typing import Any, Final

from .._batched import _BatchedBase, parts_of
from .._batcher import BatchFunction, Options, Parts
from .._core.policy import BatchPolicy
from .._method import BatchedMethod
from ._retry import Retry

LEAST: Final = 8
MOST: Final = 512
BATCH_SIZE: Final = BatchPolicy.batch_size


@dataclass(frozen=True)
class Auto:
    """A batch size that the library finds: it begins with `least`, and doubles, up to `most`, for
    as long as that makes a row cheaper.
    """

    least: int = LEAST
    """Rows in the first batches; at least 1."""
    most: int = MOST
    """Rows in the largest batches; at least `least`."""

    def __post_init__(self) -> None:
        for name in ("least", "most"):
            check_whole(f"Auto: {name}", getattr(self, name))
        if self.most < self.least:
            raise ValueError(
                f"Auto: most must be at least {self.least}, which is least, got {self.most}"
            )


@dataclass(frozen=True)
class Step:
    """A batch function, the columns that it reads and those that it writes.

    Raises:
        TypeError, ValueError: a setting is of the wrong type or out of its range; the sentence
            says which, and what is allowed.
    """

    fn: Callable[..., Any]
    """A decorated function, which keeps its settings; a plain batch function, `list` in, `list`
    out; a coroutine function; or a class, built once per worker, whose instances are called with a
    list.
    """
    input: str | Iterable[str] = field(kw_only=True)
    """Columns of what it reads: the value of one, or a dict of several."""
    output: str | Iterable[str] = field(kw_only=True)
    """Columns of what it returns for a row: the result itself, or a dict of several."""
    name: str = field(default="", kw_only=True)
    """For reports, and to resume from; the function's own if not given."""
    args: tuple[Any, ...] = field(default=(), kw_only=True)
    """Arguments after the list; of a class, those that it is built with."""
    kwargs: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Keyword arguments, likewise."""
    version: str | int | None = field(default=None, kw_only=True)
    """What stands for the code: results count as long as it is the same. None: the code itself."""
    batch_size: int | Auto | None = field(default=None, kw_only=True)
    """Most rows in one batch; None: the decorated function's, or 32."""
    length: Callable[[Any], float] | None = field(default=None, kw_only=True)
    """Length of an item, so that items of like length run together; None: the decorated function's,
    or unknown.
    """
    max_batch_tokens: int | None = field(default=None, kw_only=True)
    """Most rows times the longest of them in one batch."""
    workers: int | None = field(default=None, kw_only=True)
    """Batches that run at once, each in a thread, in a process, or as a task; None: the run's, or
    else the decorated function's own `max_concurrent_batches`, or 1.
    """
    processes: bool = field(default=False, kw_only=True)
    """Whether each worker is a process; on Ray it is one in any case."""
    timeout_s: float | None = field(default=None, kw_only=True)
    """Longest time of one call (s), after which it is cut off; needs processes, which actors are,
    too, or a coroutine function.
    """
    retry: Retry = field(default_factory=Retry, kw_only=True)
    """Errors of a service, and how often a call is made again after one."""
    preprocess: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    """Maker of the item that the function gets of what the columns hold, row by row, beside the
    batches.
    """
    postprocess: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    """Maker of the result that is kept of what the function returned, likewise."""
    route: Callable[[Any], str] | None = field(default=None, kw_only=True)
    """Key of what the columns hold. Rows of one key run together: a function gets it after the
    list, a class is built for each, with the key before its other arguments.
    """
    max_models: int = field(default=1, kw_only=True)
    """Instances that each worker keeps, of a class with `route`; the one that was used least lately
    goes.
    """
    num_cpus: float | None = field(default=None, kw_only=True)
    """CPUs of each worker that is an actor of Ray; None: as the engine says."""
    num_gpus: float | None = field(default=None, kw_only=True)
    """GPUs, likewise."""
    isolate_errors: bool = field(default=True, kw_only=True)
    """Whether rows that fail are found, and cost nothing but themselves."""

    def __post_init__(self) -> None:
        if isinstance(self.fn, Step):
            raise TypeError("a step holds a function, got a Step")
        if isinstance(self.fn, BatchedMethod):
            raise TypeError(
                f"{self.fn.__qualname__} is a method: give that of an instance, or a class, which "
                "is built once per worker"
            )
        if not callable(self.fn):
            raise TypeError(f"a step needs a batch function or a class, got {self.fn!r}")
        set_field = partial(object.__setattr__, self)
        name = self.name or getattr(self.fn, "__name__", "") or type(self.fn).__name__
        if not isinstance(name, str):
            raise TypeError(f"a step's name must be a string, got {name!r}")
        set_field("name", name)
        for which in ("input", "output"):
            set_field(which, self._check_columns(which, getattr(self, which)))
        if not isinstance(self.args, (tuple, list)):
            raise TypeError(f"step {name!r}: args must be a tuple, got {self.args!r}")
        if not isinstance(self.kwargs, Mapping):
            raise TypeError(f"step {name!r}: kwargs must be a dict, got {self.kwargs!r}")
        set_field("args", tuple(self.args))
        set_field("kwargs", dict(self.kwargs))
        for which in ("batch_size", "workers", "max_models"):
            given = getattr(self, which)
            if given is not None and not isinstance(given, Auto):
                check_whole(f"step {name!r}: {which}", given)
        for which in ("num_cpus", "num_gpus"):
            check_amount(f"step {name!r}: {which}", getattr(self, which) or 0)
        for which in ("length", "preprocess", "postprocess", "route"):
            given = getattr(self, which)
            if given is not None and not callable(given):
                raise TypeError(f"step {name!r}: {which} must be a function, got {given!r}")
        if not isinstance(self.retry, Retry):
            raise TypeError(f"step {name!r}: retry must be an offline.Retry, got {self.retry!r}")
        if self.processes and self.is_coroutine:
            raise TypeError(f"step {name!r}: a coroutine function runs on a loop, not in processes")
        if self.timeout_s is not None:
            self._check_timeout(self.timeout_s)
        self._check_arguments()  # and settings: here, not in the run

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the columns that it reads."""
        return self.input  # type: ignore[return-value]  # by __post_init__

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the columns that it writes."""
        return self.output  # type: ignore[return-value]  # by __post_init__

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self.fn)

    @property
    def is_coroutine(self) -> bool:
        return not self.is_class and self.parts.function.coroutine

    @property
    def own_workers(self) -> int:
        """Batches that run at once where nobody says."""
        return self.parts.function.options.policy.max_concurrent_batches

    @property
    def parts(self) -> Parts:
        """The function's parts, as a batcher has them, with the settings of this step."""
        settings: dict[str, Any] = {"isolate_errors": self.isolate_errors}
        if isinstance(self.batch_size, Auto):
            settings["batch_size"] = self.batch_size.most
        elif self.batch_size is not None:
            settings["batch_size"] = self.batch_size
        if self.length is not None:
            settings["length"] = self.length
        if self.max_batch_tokens is not None:
            settings["max_batch_tokens"] = self.max_batch_tokens
        if isinstance(self.fn, _BatchedBase):
            function = parts_of(self.fn).function
            function = replace(function, options=function.options.updated(settings))
        else:
            options = Options(name=self.name).updated(settings)
            func = _call if self.is_class else self.fn
            function = BatchFunction.of(func, options, coroutines=True)
        # further arguments are given where the function is called
        return replace(function, func=_call).parts(bound=False)

    def _check_arguments(self) -> None:
        """Raises a TypeError if the function, or the class, does not take what it will be given."""
        func: Any = self.fn.__wrapped__ if isinstance(self.fn, _BatchedBase) else self.fn
        features = self.parts.function.options.features
        if features is not None and features.spread_kwargs:
            return  # these are known only with the first row
        key = ("key",) if self.route is not None else ()
        first = () if self.is_class else (["items"],)
        try:
            inspect.signature(func).bind(*first, *key, *self.args, **self.kwargs)
        except TypeError as error:
            raise TypeError(
                f"step {self.name!r}: {error}; args= and kwargs= are given "
                f"{'when it is built' if self.is_class else 'after the list'}"
            ) from None
        except ValueError:  # builtins need not have a signature
            return
        if self.is_class and not any("__call__" in vars(each) for each in func.__mro__):
            raise TypeError(
                f"step {self.name!r}: instances of a class are called with a list, and this one "
                "has no __call__"
            )

    def _check_columns(self, which: str, given: Any) -> tuple[str, ...]:
        names = (given,) if isinstance(given, str) else tuple(given)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise TypeError(
                f"step {self.name!r}: {which} must be a column's name or several, got {given!r}"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"step {self.name!r}: {which} names a column twice: {given!r}")
        return names

    def _check_timeout(self, seconds: float) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ValueError(
                f"step {self.name!r}: timeout_s must be a number of seconds above 0, got "
                f"{seconds!r}"
            )
        if not self.processes and not self.is_coroutine:
            raise ValueError(
                f"step {self.name!r}: timeout_s needs processes=True or a coroutine function, for "
                "a thread cannot be cut off"
            )


def _call(items: list[Any] | None = None, *_: Any, **__: Any) -> Any:
    """In place of the function, where a row is taken for a call: a worker has the function."""
    raise AssertionError(f"a worker calls a function of its own with {items}")


def check_names(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises a TypeError for the first name that is no setting of `owner`."""
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{owner} has no setting {name!r}{hint}")


def check_amount(what: str, value: object) -> None:
    """Raises a ValueError unless `value` is a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < inf:
        raise ValueError(f"{what} must be a number of at least 0, got {value!r}")


def check_whole(what: str, value: object) -> None:
    """Raises a TypeError or ValueError unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an integer of at least 1, got {value!r}")
    if value < 1:
        raise ValueError(f"{what} must be at least 1, got {value!r}")
