"""Target of the measurements: a batch function that the user names, and its items."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from ... import AsyncBatched, Batched, BatchedError, BatchedMethod
from ..._function.batched import BatchedCallable, parts_of, preparation_of
from ..._function.function import BatchFunction
from ..._function.settings import Options
from ..reference import argument_error, describe, import_attribute
from .advice import sources
from .sample import read_items, to_features

SEED = 0
"""Seed of the order of the items. In the order of a file sorted by length, small batches would have
short items only.
"""


@dataclass(frozen=True)
class Target:
    """Batched function, and the items that callers pass to it."""

    reference: str
    """Name that the user gave: `module:function`."""
    batched: BatchedCallable[Any, Any, ...]
    decorated: bool
    """True if the user has decorated it."""
    items: list[Any]
    """Items, or features of one row each, without axis 0."""
    seconds: list[float]
    """Time of each call of the function (s)."""

    @property
    def options(self) -> Options:
        """Settings of the function."""
        return self.batched._function.options

    @property
    def takes_features(self) -> bool:
        """True if the function takes features, not items."""
        return self.options.features is not None

    def batches(self, size: int) -> Iterator[Any]:
        """Yield arguments for calls of `size` items, without end."""
        items = cycle(self.items)
        while True:
            batch = list(islice(items, size))
            yield (
                {name: [row[name] for row in batch] for name in batch[0]}
                if self.takes_features
                else batch
            )

    def arguments(self) -> list[Any]:
        """Return arguments for calls of one item, for each item: of features [1, ...]."""
        if self.takes_features:
            return [{name: row[None] for name, row in item.items()} for item in self.items]
        # a list itself would be many items
        return [[item] if isinstance(item, list) else item for item in self.items]

    @property
    def prepare(self) -> Callable[[Any], Any]:
        """Function that returns the item of the batch function for the argument of a call."""
        return preparation_of(self.batched) or (lambda item: item)

    @property
    def unbatched(self) -> tuple[Callable[[Any], Any], list[Any]]:
        """Call as without this library, and its argument for each item."""
        function, owner, _, execution = parts_of(self.batched)
        func = function.func if owner is None else functools.partial(function.func, owner)
        spreads, prepare = self.options.spreads, self.prepare

        def call(item: Any) -> Any:
            return func([prepare(item)])

        def call_with_features(features: dict[str, Any]) -> Any:
            send = execution.collator.devices.to_function  # type: ignore[attr-defined]
            sent = send(features)
            return func(**sent) if spreads else func(sent)

        async def acall(item: Any) -> Any:
            return await direct(item)

        direct = call_with_features if self.takes_features else call
        given = self.arguments() if self.takes_features else self.items
        return acall if function.coroutine else direct, given

    def has_lengths(self) -> bool:
        """Return whether items differ in length, and the function has no setting for that.

        Features need no setting.
        """
        if self.takes_features or self.options.length is not None:
            return False
        try:
            return len({len(item) for item in map(self.prepare, self.items)}) > 1
        except TypeError:
            return False

    @contextlib.contextmanager
    def report_errors(self, when: str) -> Iterator[None]:
        """Raise an error of the function as an error of the command line, with the time `when`."""
        try:
            yield
        except BatchedError:  # its message names the function
            raise
        except Exception as error:
            raise argument_error(f"{self.reference} raised {describe(error)}, {when}") from error

    def suggestion(self, settings: Mapping[str, Any] | None) -> str:
        """Return the line to write into the source; `settings` are None without batching."""
        if settings is None:
            return "It needs no decorator."
        now = self.batched.options
        new = {
            name: value
            for name, value in settings.items()
            if name == "batch_size" or value != now[name]
        }
        if self.decorated:
            old = sources({name: now[name] for name in new})
            return f"In its decorator: {', '.join(sources(new))} (now {', '.join(old)})"
        where = "batched.aio" if isinstance(self.batched, AsyncBatched) else "batched"
        return f"Decorator: @{where}.dynamically({', '.join(sources(new))})"


def load_target(reference: str, sample: Path, column: str | None = None) -> Target:
    """Return the function `module:function`, and the items of a file.

    Raises:
        argparse.ArgumentError: the function does not exist, or it or the file cannot be used.
        OSError: the file cannot be read.
    """
    values = read_items(sample, column)
    found = import_attribute(reference)
    decorated = isinstance(found, BatchedCallable)
    if isinstance(found, BatchedMethod):
        raise argument_error(
            f"{reference} is a method; name the method of an instance, as module:instance.method"
        )
    if decorated and parts_of(found).execution.in_steps:
        raise argument_error(f"{reference} works in steps; bench measures functions of lists")
    if not decorated:
        try:
            function = BatchFunction.of(found, Options())
        except TypeError as error:
            reason = str(error).partition(";")[0]
            raise argument_error(f"cannot batch {reference}: {reason}") from error
        found = (AsyncBatched if function.coroutine else Batched)(function)
    parts = parts_of(found)
    seconds: list[float] = []
    function = dataclasses.replace(parts.function, func=timed(parts.function, seconds))
    found = type(found)(function, owner=parts.owner)
    target = Target(reference, found, decorated, list(values.values()), seconds)
    if target.takes_features:
        target.items[:] = to_features(values, sample)
    random.Random(SEED).shuffle(target.items)
    return target


def timed(function: BatchFunction, seconds: list[float]) -> Callable[..., Any]:
    """Return the function itself, with the time of each call added to `seconds` (s)."""
    func = function.func

    @functools.wraps(func)
    def called(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = func(*args, **kwargs)
        finish_on_gpu()
        seconds.append(time.perf_counter() - began)
        return result

    @functools.wraps(func)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = await func(*args, **kwargs)
        finish_on_gpu()
        seconds.append(time.perf_counter() - began)
        return result

    return awaited if function.coroutine else called


def finish_on_gpu() -> None:
    """Wait until the GPU has done all submitted work, which belongs to the call."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
