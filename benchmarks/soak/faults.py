"""Injected faults, and the errors that callers may get for each."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
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

    __repr__ = __str__

    def __reduce__(self) -> str:
        raise Injected("__reduce__")


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
RETURNED = "returned exception as item"
SHORT, LONG, ODD = "output too short", "output too long", "output of a wrong type"
BATCH_KINDS = [*RAISED, SHORT, LONG, ODD]
"""Faults of a whole batch, on the request of one item."""
LENGTH = "length= raised"
CALLBACK = "done-callback raised"
ITSELF = "function called itself"
HOOK = "on_batch hook raised"
FULL, LATE = "queue full", "waited too long in the queue"
BLOCKING = "blocking call on a worker"
CIRCLE = "circle of functions that call each other"

MISLEADING = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)


def _fault(kind: str) -> BaseException:
    """Return an error of a kind, with a mark that its copies share."""
    error = RAISED[kind]()
    vars(error)["mark"] = object()
    return error


class Mismatch:
    """Expected error for callers of a batch with a wrong number of outputs."""

    def __init__(self, expected: int, actual: int) -> None:
        self.expected = expected
        self.actual = actual


class Faults:
    """Planned and injected faults of one episode. Threads only append and look up."""

    def __init__(
        self, *, splits: bool = False, memory: int = 1 << 30, isolates: bool = False
    ) -> None:
        self.splits = splits  # whether batches that run out of memory run again in parts
        self.isolates = isolates  # whether batches that raised an exception run again in parts
        self.memory = memory  # most items of a batch that fit in memory
        self.plan: dict[int, str] = {}  # fault of the batch of an item, by item
        # injected fault by item: the error, a Mismatch, or the name of a wrong type
        self.struck: dict[int, Any] = {}
        self.refusals: dict[int, BaseException] = {}  # errors of `length`, by item
        self.ran: list[int] = []  # items of all calls of the function
        self.again: list[int] = []  # items that the library has to run once more
        self.injected: list[str] = []  # kinds of faults, in their order

    def enter(self, items: Sequence[int]) -> None:
        """Note a call of the batch function, and raise the error that one of `items` asks for."""
        self.ran.extend(items)
        if len(items) > self.memory:
            self._raise("out of memory", items)
        if self.plan.keys().isdisjoint(items):
            return
        for item in items:
            kind = self.plan.get(item)
            if kind in RAISED:
                self._raise(kind, items)

    def leave(self, items: Sequence[int], output: Any, longer: Callable[[Any, int], Any]) -> Any:
        """Return `output` with the faults that `items` ask for.

        `longer` adds one row or removes one.
        """
        if self.plan.keys().isdisjoint(items):
            return output
        for item in items:
            kind = self.plan.get(item)
            if kind in (SHORT, LONG):
                change = 1 if kind == LONG else -1
                return self._spoil(
                    kind, items, Mismatch(len(items), len(items) + change), longer(output, change)
                )
            if kind == ODD:
                odd = object() if item // 1000 % 2 else None
                return self._spoil(kind, items, type(odd).__name__, odd)
        for position, item in enumerate(items):
            if self.plan.get(item) == RETURNED:
                error = _fault(
                    "raised uncopyable exception" if item // 1000 % 2 else "raised Exception"
                )
                self.injected.append(RETURNED)
                self.struck[item] = output[position] = error
        return output

    def _spoil(self, kind: str, items: Sequence[int], mark: object, output: Any) -> Any:
        self.injected.append(kind)
        if self.isolates and len(items) > 1:
            self.again.extend(items)
        else:
            self.struck.update(dict.fromkeys(items, mark))
        return output

    def _raise(self, kind: str, items: Sequence[int]) -> None:
        error = _fault(kind)
        self.injected.append(kind)
        parts = (self.splits and isinstance(error, MemoryError)) or (
            self.isolates and isinstance(error, Exception)
        )
        if parts and len(items) > 1:
            self.again.extend(items)
        else:
            self.struck.update(dict.fromkeys(items, error))
        raise error

    def length(self, item: int) -> int:
        """Return the length of an item, as the setting `length`."""
        if self.plan.get(item) == LENGTH:
            self.injected.append(LENGTH)
            self.refusals[item] = Injected(LENGTH)
            raise self.refusals[item]
        return item % 40 + 1

    def expected(self, items: Sequence[int], error: BaseException) -> bool:
        """Return whether a fault in a batch with one of `items` explains `error`."""
        return any(_explains(self.struck[item], error) for item in items if item in self.struck)

    def refused(self, items: Sequence[int], error: BaseException) -> bool:
        """Return whether a call of `items` was refused with `error` unqueued."""
        return any(self.refusals.get(item) is error for item in items)


def _explains(mark: Any, error: BaseException) -> bool:
    if isinstance(mark, Mismatch):
        return isinstance(error, batched.BatchSizeMismatch) and (error.expected, error.actual) == (
            mark.expected,
            mark.actual,
        )
    if isinstance(mark, str):
        return (
            type(error) is batched.BatchFunctionError
            and error.__cause__ is None
            and mark in str(error)
        )
    if type(error) is RuntimeError and isinstance(mark, StopIteration | StopAsyncIteration):
        return _is_copy(error.__cause__, mark)  # Python made it, at the end of a coroutine
    if isinstance(mark, MISLEADING) or not isinstance(mark, Exception):
        return type(error) is batched.BatchFunctionError and _is_copy(error.__cause__, mark)
    return _is_copy(error, mark)


def _is_copy(error: BaseException | None, mark: Any) -> bool:
    """Return whether `error` is `mark` or a copy of it."""
    return type(error) is type(mark) and vars(error).get("mark") is vars(mark).get("mark")


class Untouchable:
    """Extra argument whose hash and comparison raise: no code of its class may run."""

    def __hash__(self) -> int:
        raise AssertionError("the hash of an argument was taken")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("an argument was compared")


def raise_in_callback(faults: Faults, kind: str) -> Callable[[object], None]:
    """Return a callback of a future that raises an error of `kind`."""

    def callback(_: object) -> None:
        faults.injected.append(CALLBACK)
        raise RAISED[kind]()

    return callback


def idle(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)
