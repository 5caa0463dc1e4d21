"""Step: a batch function with its columns and settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from .._collate.arguments import signature_of
from .._core.checks import check_whole
from .._function.batched import BatchedCallable, parts_of, preparation_of
from .._function.function import BatchFunction, Parts
from .._function.method import BatchedMethod
from .._function.settings import Options
from .checks import check_amount
from .retry import Retry

REFILLS: Final = 8
"""Rows in one batch of a function that works in steps, for each place."""


@dataclass(frozen=True)
class Auto:
    """A batch size that the library finds.

    Batches begin with `least` rows, and double up to `most`, for as long as a larger batch makes a
    row cheaper.
    """

    least: int = 8
    """Rows in the first batches; at least 1."""
    most: int = 512
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
    """A batch function, the columns that it reads and the columns that it writes.

    Raises:
        TypeError, ValueError: a setting is of the wrong type or out of its range; the sentence
            names the setting and the allowed values.
    """

    fn: Callable[..., Any]
    """A batch function, plain or decorated; a coroutine function; or a class, built once per
    worker. The function, or the instance of the class, gets a list and returns a list. A decorated
    function keeps its settings.
    """
    input: str | Iterable[str] = field(kw_only=True)
    """Columns that the step reads: an item is the value of one column, or a dict of several."""
    output: str | Iterable[str] | Mapping[str, Any] = field(kw_only=True)
    """Columns that the step writes: the result of a row is the value of one column, or a dict of
    several. A batch may also return a dict of lists. A mapping from names to `pyarrow` types
    declares the types; None leaves a type open.
    """
    name: str = field(default="", kw_only=True)
    """Name for reports and `resume_step`; the function's own by default."""
    args: tuple[Any, ...] = field(default=(), kw_only=True)
    """Arguments after the list; of a class, the arguments of its constructor."""
    kwargs: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Keyword arguments of the function, or of the constructor."""
    version: str | int | None = field(default=None, kw_only=True)
    """Version of the code and the arguments. Results are valid as long as the version is the same.
    None: the code and the arguments themselves are compared.
    """
    batch_size: int | Auto | None = field(default=None, kw_only=True)
    """Most rows in one batch; None: the decorated function's, or 32."""
    length: Callable[[Any], float] | None = field(default=None, kw_only=True)
    """Length of an item, so that items of similar length run together; None: the decorated
    function's, or unknown.
    """
    max_batch_tokens: int | None = field(default=None, kw_only=True)
    """Most rows times the longest of them in one batch."""
    workers: int | None = field(default=None, kw_only=True)
    """Batches that run at once, each in a thread, in a process, or as a task; None: the run's, or
    else the decorated function's own `max_concurrent_batches`, or 1.
    """
    processes: bool = field(default=False, kw_only=True)
    """Whether each worker is a process; on Ray it always is."""
    timeout_s: float | None = field(default=None, kw_only=True)
    """Longest time of one call (s), after which the call is ended. A limit needs processes, Ray, or
    a coroutine function.
    """
    retry: Retry = field(default_factory=Retry, kw_only=True)
    """Retries after errors of a service."""
    outage_s: float = field(default=600.0, kw_only=True)
    """Time without any success after which the run ends (s)."""
    preprocess: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    """Function of one row's input that returns the item, called in threads beside the batches;
    None: the decorated function's `prepare`, if it has one.
    """
    postprocess: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    """Function of one row's output that returns the result to keep, called in the same threads."""
    where: Callable[..., bool] | None = field(default=None, kw_only=True)
    """Predicate on a row's result, called in the same threads. A row for which the predicate is
    false enters no later step, and is not in the result. A predicate with two parameters that
    have no default also gets the row, a dict of the columns that the steps read.
    """
    route: Callable[[Any], str] | None = field(default=None, kw_only=True)
    """Function of one row's input that returns a key. Rows of one key run together. The function,
    or the instance of the class, gets the key after the list.
    """
    num_cpus: float | None = field(default=None, kw_only=True)
    """CPUs of each worker that is an actor of Ray; None: the setting of the engine."""
    num_gpus: float | None = field(default=None, kw_only=True)
    """GPUs of each worker that is an actor of Ray; None: the setting of the engine."""
    isolate_errors: bool = field(default=True, kw_only=True)
    """Whether a failed batch is called again in parts, to find the rows that fail."""

    def __post_init__(self) -> None:
        if isinstance(self.fn, BatchedMethod):
            raise TypeError(
                f"{self.fn.__qualname__} is a method: give that of an instance, or a class, which "
                "is built once per worker"
            )
        if not callable(self.fn):
            raise TypeError(f"a step needs a batch function or a class, got {self.fn!r}")
        given = vars(self)  # changed in place, because the instance is frozen
        name = given["name"] = self.name or getattr(self.fn, "__name__", type(self.fn).__name__)
        for which, kind, noun in (
            ("name", str, "a string"),
            ("args", tuple | list, "a tuple"),
            ("kwargs", Mapping, "a dict"),
            ("version", str | int | None, "a text or a number"),
            ("retry", Retry, "an offline.Retry"),
            ("processes", bool, "True or False, and workers= is their number"),
        ):
            if not isinstance(given[which], kind):
                raise TypeError(f"step {name!r}: {which} must be {noun}, got {given[which]!r}")
        for which in ("input", "output"):
            if isinstance(given[which], str) or not isinstance(given[which], Iterable):
                given[which] = (given[which],)
            elif not isinstance(given[which], Mapping):
                given[which] = tuple(given[which])
            self._check_columns(which, given[which])
        if self.workers is not None:
            check_whole(f"step {name!r}: workers", self.workers)
        if isinstance(self.batch_size, str):
            raise TypeError(
                f"step {name!r}: batch_size is a number, or offline.Auto() for a size that the "
                f"library finds, got {self.batch_size!r}"
            )
        for which in ("num_cpus", "num_gpus", "outage_s", "timeout_s"):
            check_amount(f"step {name!r}: {which}", given[which] or 0)
        address = getattr(getattr(self.fn, "__wrapped__", None), "address", None)
        if address is not None:
            raise TypeError(
                f"step {name!r}: {address} runs in another process, whose code a run cannot "
                "compare with that of an earlier run; name the function itself, or pass a function "
                "that calls the connected one with a list"
            )
        if self.preprocess is None and isinstance(self.fn, BatchedCallable):
            given["preprocess"] = preparation_of(self.fn)
        for which in ("preprocess", "postprocess", "route", "where"):
            func = given[which]
            if func is not None and (not callable(func) or inspect.iscoroutinefunction(func)):
                raise TypeError(f"step {name!r}: {which} must be a plain function, got {func!r}")
        if self.processes and self.is_coroutine:
            raise TypeError(f"step {name!r}: a coroutine function runs on a loop, not in processes")
        if in_steps(self.fn) and isinstance(self.batch_size, Auto):
            raise TypeError(
                f"step {name!r} works in steps, and batch_size is the number of its places: give a "
                "number in place of Auto"
            )
        self._check_call()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the columns that the step reads."""
        return self.input  # type: ignore[return-value]  # by __post_init__

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the columns that the step writes."""
        return tuple(self.output)

    @property
    def declared(self) -> dict[str, Any]:
        """Types of the columns that have one, by name."""
        given = self.output if isinstance(self.output, Mapping) else {}
        return {name: kind for name, kind in given.items() if kind is not None}

    @property
    def is_coroutine(self) -> bool:
        """Whether calls of the function are awaited."""
        func = unwrap(self.fn)
        return any(map(inspect.iscoroutinefunction, (func, func.__call__)))

    @property
    def call_retry(self) -> Retry:
        """Retries by the run: none if the function itself repeats its calls."""
        by_itself = getattr(self.fn, "retries_itself", False)
        return replace(self.retry, attempts=1) if by_itself else self.retry

    @property
    def function_options(self) -> Options:
        """Options of the function, with the settings of this step."""
        size = self.batch_size.most if isinstance(self.batch_size, Auto) else self.batch_size
        of_step = {
            "batch_size": size,
            "length": self.length,
            "max_batch_tokens": self.max_batch_tokens,
        }
        settings = {name: value for name, value in of_step.items() if value is not None}
        options = Options(name=self.name)
        if isinstance(self.fn, BatchedCallable):
            options = parts_of(self.fn).function.options
        return options.updated(settings)

    @property
    def parts(self) -> Parts:
        """The function's parts, as a batcher has them, with the settings of this step."""
        options = self.function_options
        policy = options.policy
        if options.steps is not None:  # the places of the rows are filled again and again
            tokens = policy.max_batch_tokens
            policy = replace(
                policy,
                batch_size=REFILLS * policy.batch_size,
                max_batch_tokens=None if tokens is None else REFILLS * tokens,
            )
        options = replace(options, policy=policy, steps=None, isolate_errors=self.isolate_errors)
        if isinstance(self.fn, BatchedCallable):
            function = replace(parts_of(self.fn).function, options=options)
        else:
            # its extra arguments may be lists
            func = _call if inspect.isclass(self.fn) or self.args else self.fn
            function = BatchFunction.of(func, options)
        # further arguments are given where the function is called
        return replace(function, func=_call).parts(bound=False)

    def _check_call(self) -> None:
        """Raise an error unless the function, or the class, can be called with its arguments."""
        func = unwrap(self.fn)
        is_class = inspect.isclass(func)
        if self.parts.function.options.spreads:  # `parts` checks settings
            return  # the keyword arguments are known only with the first row
        first = () if is_class else (["items"], *["key"] * (self.route is not None))
        try:
            signature_of(func).bind(*first, *self.args, **self.kwargs)
        except TypeError as error:
            where = "to the constructor" if is_class else "after the list"
            if isinstance(self.fn, BatchedCallable):
                where = f"{where}; settings of a client or generator by with_options(...)"
            raise TypeError(
                f"step {self.name!r}: {error}; args= and kwargs= are given {where}"
            ) from None
        if is_class and not any("__call__" in vars(each) for each in func.__mro__):
            raise TypeError(
                f"step {self.name!r}: instances of a class are called with a list, and this one "
                "has no __call__"
            )

    def _check_columns(self, which: str, given: Collection[Any]) -> None:
        """Raise an error unless `given`, the setting `which`, has names, and types of Arrow."""
        names = [*given]
        is_right = which == "output" or not isinstance(given, Mapping)
        if not (is_right and names and all(isinstance(name, str) and name for name in names)):
            raise TypeError(
                f"step {self.name!r}: {which} must be a column's name or several, got {given!r}"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"step {self.name!r}: {which} names a column twice: {given!r}")
        for name, kind in given.items() if isinstance(given, Mapping) else ():
            import pyarrow

            if kind is not None and not isinstance(kind, pyarrow.DataType):
                raise TypeError(
                    f"step {self.name!r}: the type of column {name!r} must be a pyarrow.DataType, "
                    f"got {kind!r}"
                )


def in_steps(func: object) -> bool:
    """Return whether `func` is a decorated function that works in steps."""
    return isinstance(func, BatchedCallable) and parts_of(func).execution.in_steps


def unwrap(func: Callable[..., Any]) -> Any:
    """Return the function below a decorator of this package, or `func`."""
    return func.__wrapped__ if isinstance(func, BatchedCallable) else func


def _call(items: list[Any] | None = None, *_: Any, **__: Any) -> Any:
    """Stand for the function where only requests are made of rows."""
    raise AssertionError(items)
