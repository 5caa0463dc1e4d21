"""Settings of a step that its engine needs, and the outcome of a batch."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import cloudpickle

from ..._collate.collator import Collator
from ..._core.request import Batch, Slice
from ..._function.batched import _BatchedBase
from ...errors import RemoteError
from ..failures import error_text
from ..retry import Retry

if TYPE_CHECKING:
    from .ray import Ray


@dataclass
class Spec:
    """Settings of a step that its engine needs."""

    step: int
    name: str
    func: Callable[..., Any]
    """A batch function, plain or decorated; a coroutine function; or a class, built for each worker
    (for a coroutine function: once), of which an instance is called with a batch.
    """
    collator: Collator
    args: tuple[Any, ...] = ()
    """Arguments of the class, or arguments of the function after the items."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 1
    """Threads, processes or actors; or calls of a coroutine function at once."""
    processes: bool = False
    ray: Ray | None = None
    """Cluster where the function computes; None: this machine."""
    timeout_s: float | None = None
    """Longest time of one call (s), in a process, in an actor or of a coroutine function."""
    retry: Retry = field(default_factory=Retry)
    isolate_errors: bool = True
    models: int = 0
    """Instances that a worker keeps of a class with a routing key, its first argument; 0: no key.
    """
    outputs: tuple[str, ...] = ()
    """Output columns. The function may return several columns as a dict of lists."""
    warned: bool = False
    """Whether a wrong number of results has been logged."""

    @property
    def is_coroutine(self) -> bool:
        """Whether calls of the function are awaited."""
        return is_awaited(self.func)

    def build(self) -> Callable[..., Any]:
        """Return the function with its extra arguments, or a new instance of the class."""
        func, args, kwargs = unwrap(self.func), self.args, self.kwargs
        if inspect.isclass(func):
            built: Any = _Models(self) if self.models else func(*args, **kwargs)
            return built  # type: ignore[no-any-return]  # `Step` has checked that it is callable
        return lambda *items, **features: func(*items, *args, **features, **kwargs)

    def pickled(self) -> bytes:
        """Return the function and its settings for another process.

        Raises:
            TypeError: the function cannot be sent.
        """
        try:
            data: bytes = cloudpickle.dumps(replace(self, collator=None, ray=None))  # type: ignore[arg-type]  # unused there
        except Exception as error:
            raise TypeError(
                f"{self.name}, or what its args= and kwargs= hold, cannot be sent to another "
                f"process ({type(error).__name__}: {error}); define it in a module that can be "
                "imported, and load what it needs in the __init__ of a class"
            ) from error
        return data


class _Models:
    """Instances of a class, one for each routing key; the least recently used one is dropped."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._models: dict[str, Callable[..., Any]] = {}  # least recently used first
        self._failed: dict[str, RemoteError] = {}  # keys without an instance, which cannot be built

    def __call__(self, items: list[Any], key: str) -> Any:
        models, failed, spec = self._models, self._failed, self._spec
        if key not in models and key not in failed:
            if len(models) == spec.models:
                del models[next(iter(models))]
                gc.collect()  # a model may be part of a circle; its memory is needed now
            try:
                models[key] = unwrap(spec.func)(key, *spec.args, **spec.kwargs)
            except Exception as error:
                if spec.retry.is_due(error):
                    raise
                # not as a memory error, for which the size of the batch is no reason
                failed[key] = RemoteError(*error_text(error))
        if key in failed:
            raise failed[key].with_traceback(None)
        models[key] = model = models.pop(key)
        return model(items)


def unwrap(func: Callable[..., Any]) -> Any:
    """Return the function below a decorator of this package, or `func`."""
    return func.__wrapped__ if isinstance(func, _BatchedBase) else func


def is_awaited(func: Callable[..., Any]) -> bool:
    """Return whether calls of a function, or of the instances of a class, are awaited."""
    inner = unwrap(func)
    return any(map(inspect.iscoroutinefunction, (inner, inner.__call__)))


@dataclass
class Outcome:
    """Outcome of a batch, or the end of all workers."""

    step: int
    batch: Batch | None
    """None if the outcome is `fatal`."""
    slices: list[Slice] = field(default_factory=list)
    results: Sequence[Any] = ()
    """For each slice its result, or the exception in its place."""
    tried: list[int] = field(default_factory=list)
    """For each slice the number of calls that included the slice."""
    seconds: float = 0.0
    """Time from the first call to the end of the last one (s)."""
    timed_out: bool = False
    """Whether the whole batch took longer than `timeout_s`, and all its parts succeeded."""
    fatal: BaseException | None = None
    """Error of the last worker, which could not be built."""
