"""Runs one batch and deals out what comes of it. One logic for functions that return and for those that are awaited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from .._core.scheduler import Batch, Request, Scheduler, Slice
from .failures import told
from .loops import current_task, ends_task

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call of the batch function."""

Outcome = Any
"""What one slice came to: its part of the output, or the `BaseException` in its place."""


class Collator(Protocol):
    """Makes an argument of slices, and results of an output."""

    def collate(self, slices: list[Slice]) -> Any: ...

    def split(self, output: Any, slices: list[Slice]) -> Sequence[Any]: ...

    def result(self, request: Request, parts: list[Any]) -> Any: ...


class Execution:
    """One batch function and its collator."""

    def __init__(self, func: Callable[..., Any], collator: Collator, name: str) -> None:
        self._func = func
        self._collator = collator
        self._name = name  # of the batch function, for error messages

    def run(self, batch: Batch) -> list[Outcome]:
        """What each slice of `batch` came to, by calling the function here. Never raises."""
        attempt = self._attempt(batch.slices)
        output = error = None
        try:
            args, kwargs = next(attempt)
            while True:
                try:
                    output, error = self._func(*args, **kwargs), None
                except BaseException as raised:
                    output, error = None, _as_raised(raised)
                args, kwargs = attempt.send((output, error))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # of a generator
        finally:  # an error holds the frame that it was raised below, and must not be held by it
            del output, error

    async def run_async(self, batch: Batch) -> list[Outcome]:
        """What each slice of `batch` came to, by awaiting the function here. Raises only what ends the task it runs in."""
        attempt = self._attempt(batch.slices)
        output = error = None
        task = current_task()
        try:
            args, kwargs = next(attempt)
            while True:
                try:
                    output, error = await self._func(*args, **kwargs), None
                except BaseException as raised:
                    if ends_task(raised, task):
                        raise
                    output, error = None, _as_raised(raised)
                args, kwargs = attempt.send((output, error))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # of a generator
        finally:  # an error holds the frame that it was raised below, and must not be held by it
            del output, error

    def _attempt(self, slices: list[Slice]) -> Generator[Call, tuple[Any, BaseException | None], list[Outcome]]:
        """Yields each call that is to be made and is sent its output or error; returns the outcomes."""
        leader = slices[0][0]
        arguments = leader.group
        owner = () if leader.owner is None else (leader.owner,)
        try:
            args, kwargs = arguments.fresh()  # type: ignore[attr-defined]
            output, error = yield (*owner, self._collator.collate(slices), *args), kwargs
            if error is None:
                return list(self._collator.split(output, slices))
        except BaseException as raised:
            error = _as_raised(raised)
        return [error] * len(slices)

    def conclude(self, ended: list[Request]) -> int:
        """Gives each of `ended` its result or its own error, and returns how many have an error."""
        failed: list[Request] = []
        for request in ended:
            if request.error is None:
                try:
                    parts = request.parts
                    if len(parts) > 1:
                        parts.sort(key=_position)
                    request.result = self._collator.result(request, [part for _, part in parts])
                except BaseException as raised:
                    request.error = raised
            if request.error is not None:
                failed.append(request)
        if failed:
            sharers = Counter(id(request.error) for request in failed)
            for request in failed:
                assert request.error is not None
                request.error = told(self._name, request.error, alone=sharers[id(request.error)] == 1)
        return len(failed)


def _as_raised(error: BaseException) -> BaseException:
    """`error` with a traceback that begins in the user's code."""
    traceback = error.__traceback__
    return error.with_traceback(traceback.tb_next if traceback is not None else None)


def _position(part: tuple[int, Any]) -> int:
    return part[0]


def settle(scheduler: Scheduler, batch: Batch, outcomes: list[Outcome]) -> list[Request]:
    """Adds the outcomes of `batch` to its requests, and returns those that have ended with it."""
    ended: list[Request] = []
    for (request, start, stop), outcome in zip(batch.slices, outcomes, strict=True):
        if request.waker is None:  # its caller has gone, or another part of it failed
            continue
        if isinstance(outcome, BaseException):
            request.error = outcome
            scheduler.cancel(request)
        else:
            request.parts.append((start, outcome))
            request.unanswered -= stop - start
            if request.unanswered:
                continue
        ended.append(request)
    return ended
