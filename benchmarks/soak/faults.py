"""Injected faults, and the errors that callers may get for each."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import batched


class Injected(Exception):
    """Ordinary error."""


class Uncopyable(Exception):
    """Error whose `args` are not the arguments of its `__init__`."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


class Hostile(Exception):
    """Error that cannot be shown or pickled."""

    def __str__(self) -> str:
        raise Injected("__str__")

    __repr__ = __reduce__ = __str__


class Fatal(BaseException):
    """Error that is no `Exception`, and unknown to Python."""


RAISED: dict[str, Callable[[], BaseException]] = {
    "raised Exception": lambda: Injected("injected", 1),
    "raised uncopyable exception": lambda: Uncopyable("injected", code=7),
    "raised hostile exception": Hostile,
    "raised BaseException": lambda: Fatal("injected"),
    "raised SystemExit": lambda: SystemExit(3),
    "raised KeyboardInterrupt": KeyboardInterrupt,
    "raised CancelledError (asyncio)": asyncio.CancelledError,
    "raised CancelledError (futures)": concurrent.futures.CancelledError,
    "raised GeneratorExit": GeneratorExit,
    "raised StopIteration": lambda: StopIteration(4),
    "raised StopAsyncIteration": StopAsyncIteration,
    "out of memory": lambda: MemoryError("injected"),
}
SHORT, LONG, ODD = "output too short", "output too long", "output of a wrong type"
BATCH_KINDS = [*RAISED, SHORT, LONG, ODD]
"""Faults of a whole batch, on the request of one item."""
RETURNED, LENGTH = "returned exception as item", "length= raised"
CALLBACK, HOOK = "done-callback raised", "on_batch hook raised"
FULL, LATE = "queue full", "waited too long in the queue"

MISLEADING = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)


def _fault(kind: str) -> BaseException:
    """Return an error of a kind, with a mark that its copies share."""
    error = RAISED[kind]()
    vars(error)["mark"] = object()
    return error


class Faults:
    """Planned and injected faults of one episode. Threads only append and look up."""

    def __init__(self, *, splits: bool, isolates: bool, memory: int) -> None:
        self.splits = splits  # whether batches that run out of memory run again in parts
        self.isolates = isolates  # whether batches that failed run again in parts
        self.memory = memory  # most items of a batch that fit in memory
        self.plan: dict[int, str] = {}  # fault of the batch of an item, by item
        # injected fault by item: the error, expected and actual size, or the name of a wrong type
        self.struck: dict[int, Any] = {}
        self.refusals: dict[int, BaseException] = {}  # errors of `length`, by item
        self.ran: list[int] = []  # items of all calls of the function
        self.again: list[int] = []  # items that the library has to run once more
        self.injected: list[str] = []  # kinds of faults, in their order

    def enter(self, items: Sequence[int]) -> None:
        """Note a call of the batch function, and raise the error that one of `items` asks for."""
        self.ran.extend(items)
        kinds = [self.plan.get(item) for item in items]
        if len(items) > self.memory:
            kinds.insert(0, "out of memory")
        for kind in kinds:
            if kind in RAISED:
                error = _fault(kind)
                split = self.splits and isinstance(error, MemoryError)
                isolated = self.isolates and isinstance(error, Exception)
                self._strike(kind, items, error, again=split or isolated)
                raise error

    def leave(self, items: Sequence[int], output: Any) -> Any:
        """Return `output` with the faults that `items` ask for."""
        kinds = [self.plan.get(item) for item in items]
        for item, kind in zip(items, kinds, strict=True):
            if kind in (SHORT, LONG):
                size = len(items) + (1 if kind == LONG else -1)
                self._strike(kind, items, (len(items), size), again=self.isolates)
                rows = [min(row, len(items) - 1) for row in range(size)]
                if isinstance(output, dict):
                    return {name: value[rows] for name, value in output.items()}
                return [output[row] for row in rows]
            if kind == ODD:
                odd = object() if item // 1000 % 2 else None
                self._strike(kind, items, type(odd).__name__, again=self.isolates)
                return odd
        for place, item in enumerate(items):
            if kinds[place] == RETURNED:
                output[place] = _fault(list(RAISED)[item // 1000 % 2])
                self._strike(RETURNED, [item], output[place], again=False)
        return output

    def _strike(self, kind: str, items: Sequence[int], mark: object, *, again: bool) -> None:
        self.injected.append(kind)
        if again and len(items) > 1:
            self.again.extend(items)
        else:
            self.struck.update(dict.fromkeys(items, mark))

    def length(self, item: int) -> int:
        """Return the length of an item, as the setting `length`."""
        if self.plan.get(item) == LENGTH:
            self.injected.append(LENGTH)
            self.refusals[item] = Injected(LENGTH)
            raise self.refusals[item]
        return item % 40 + 1

    def explain(self, items: Sequence[int], error: BaseException) -> bool:
        """Return whether a fault in a batch with one of `items` explains `error`."""
        return any(_explains(self.struck[item], error) for item in items if item in self.struck)

    def refused(self, items: Sequence[int], error: BaseException) -> bool:
        """Return whether a call of `items` was refused with `error` unqueued."""
        return any(self.refusals.get(item) is error for item in items)


def _explains(mark: Any, error: BaseException) -> bool:
    if isinstance(mark, tuple):
        return (
            isinstance(error, batched.BatchSizeMismatch) and (error.expected, error.actual) == mark
        )
    wrapped = type(error) is batched.BatchFunctionError
    if isinstance(mark, str):
        return wrapped and error.__cause__ is None and mark in str(error)
    if type(error) is RuntimeError and isinstance(mark, StopIteration | StopAsyncIteration):
        return _is_copy(error.__cause__, mark)  # Python made it, at the end of a coroutine
    if isinstance(mark, MISLEADING) or not isinstance(mark, Exception):
        return wrapped and _is_copy(error.__cause__, mark)
    return _is_copy(error, mark)


def _is_copy(error: BaseException | None, mark: Any) -> bool:
    """Return whether `error` is `mark` or a copy of it."""
    return type(error) is type(mark) and vars(error).get("mark") is vars(mark).get("mark")
