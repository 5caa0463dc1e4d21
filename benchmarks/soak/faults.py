"""Faults that are injected on purpose, and what callers may be told of each: a batch function that
fails as its items ask.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

import batched


class Injected(Exception):
    """An ordinary error."""


class Uncopyable(Exception):
    """Its `__init__` takes what its `args` do not tell."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


class Hostile(Exception):
    """Nothing can be asked of it."""

    def __str__(self) -> str:
        raise Injected("__str__")

    __repr__ = __str__

    def __reduce__(self) -> str:
        raise Injected("__reduce__")


class Fatal(BaseException):
    """No `Exception`, and none that Python knows."""


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
"""What becomes of a whole batch with an item that asks for it."""
LENGTH = "length= raised"
HASH, EQUAL = "hash of an argument raised", "equality of an argument raised"
CALLBACK = "done-callback raised"
ITSELF = "function called itself"
HOOK = "on_batch hook raised"
FULL, LATE = "queue full", "waited too long in the queue"
BLOCKING = "blocking call on a worker"
CIRCLE = "circle of functions that call each other"

MISLEADING = (StopIteration, StopAsyncIteration, concurrent.futures.CancelledError)


def _fault(kind: str) -> BaseException:
    """An error of that kind, with a mark that exceptions made of it have, too."""
    error = RAISED[kind]()
    vars(error)["mark"] = object()
    return error


class Mismatch:
    """What is expected of callers of a batch with another number of outputs."""

    def __init__(self, expected: int, actual: int) -> None:
        self.expected = expected
        self.actual = actual


class Faults:
    """What is to go wrong in one episode, and what did. Threads only append and look up."""

    def __init__(
        self, *, splits: bool = False, memory: int = 1 << 30, isolates: bool = False
    ) -> None:
        self.splits = splits  # batches that run out of memory are run again in parts
        self.isolates = isolates  # so are those that raised an exception
        self.memory = memory  # items that fit
        self.plan: dict[int, str] = {}  # what is to happen to the batch of an item
        # what happened in the batch of an item: the error, a Mismatch or the name of an odd type
        self.struck: dict[int, Any] = {}
        self.refusals: dict[int, BaseException] = {}  # by item: what `length` raised for it
        self.ran: list[int] = []  # items, as often as the function got them
        self.again: list[int] = []  # items that the library has to run once more
        self.injected: list[str] = []  # kinds, as they happened

    def enter(self, items: Sequence[int]) -> None:
        """What a batch function does first.

        Raises:
            BaseException: whatever one of `items` asks for.
        """
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
        """What a batch function returns for `items` instead of `output`; `longer` adds one row or
        takes one away.
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
        """The setting `length`."""
        if self.plan.get(item) == LENGTH:
            self.injected.append(LENGTH)
            self.refusals[item] = Injected(LENGTH)
            raise self.refusals[item]
        return item % 40 + 1

    def expected(self, items: Sequence[int], error: BaseException) -> bool:
        """Whether a fault in a batch with one of `items` explains `error`."""
        return any(_explains(self.struck[item], error) for item in items if item in self.struck)

    def refused(self, items: Sequence[int], tag: object, error: BaseException) -> bool:
        """Whether `error` is what the preparation of a call with `items` and `tag` raised, so that
        it was never accepted.
        """
        return any(self.refusals.get(item) is error for item in items) or (
            isinstance(tag, Unhashable) and tag.error is error
        )


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
    if isinstance(mark, MISLEADING) or not isinstance(mark, Exception):
        return type(error) is batched.BatchFunctionError and _is_copy(error.__cause__, mark)
    return _is_copy(error, mark)


def _is_copy(error: BaseException | None, mark: Any) -> bool:
    """Whether `error` is `mark` or a copy of it."""
    return type(error) is type(mark) and vars(error).get("mark") is vars(mark).get("mark")


class Unhashable:
    """An extra argument whose hash raises."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.error: Exception | None = None

    def __hash__(self) -> int:
        self.faults.injected.append(HASH)
        self.error = Injected(HASH)
        raise self.error

    def __eq__(self, other: object) -> bool:  # else it counts as itself, and nobody hashes it
        return self is other


class Incomparable:
    """An extra argument that looks like any other of its kind, until they are compared."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def __hash__(self) -> int:
        return 7

    def __repr__(self) -> str:
        return "Incomparable"

    def __eq__(self, other: object) -> bool:
        self.faults.injected.append(EQUAL)
        raise Injected(EQUAL)


def raise_in_callback(faults: Faults, kind: str) -> Callable[[object], None]:
    """A callback of a future that raises what `kind` says."""

    def callback(_: object) -> None:
        faults.injected.append(CALLBACK)
        raise RAISED[kind]()

    return callback


def idle(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)
