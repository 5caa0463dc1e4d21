"""Attempts at one batch: the calls of the function until each slice has an outcome.

`attempts` never suspends for a plain function, and has no queue, waker, lock or clock. Its rules:

1. The whole batch is tried first.
2. A part that fails is cut in halves if `splits` (memory ran out) or `isolates` accepts the error.
   Both halves are called before a part of either, so one bad item in 64 takes 13 calls.
3. If the collator cannot split the output among the slices, it names groups of slices, and each
   group is run alone.
4. Any other error is the outcome of all slices of that attempt. A request fails with the error of
   the failed item that comes first in it, and its later items are not tried any more. Items that
   are `separate` have outcomes of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from .._collate.collator import Collator, GroupsNeeded
from .._core.scheduler import Batch, Request, Slice
from .exceptions import trim_traceback
from .memory import release_memory

U = TypeVar("U")

ErrorTest = Callable[[BaseException], bool]
"""Function that returns whether a rule applies to an error."""

Outcomes = tuple[list[Slice], Sequence[Any], Sequence[int]]
"""Slices that make up a batch. For each slice: its part of the output, or a `BaseException` in its
place; and the number of calls of the function that its items were in.
"""


async def attempts(
    func: Callable[..., Any],
    batch: Batch,
    collator: Collator,
    splits: ErrorTest,
    isolates: ErrorTest,
    ends_task: ErrorTest | None = None,
    error: BaseException | None = None,
) -> Outcomes:
    """Call `func` for `batch` and parts of it. `error` ended the first call, if that was made.

    A coroutine function has `ends_task`, which selects the errors that cancel the awaiting task:
    only these are raised. See the rules of the module.
    """
    # parts to call: slices, calls that they were in, and function that collates
    todo = deque([(batch.slices, batch.attempts, collator.collate)])
    # slices with their outcomes, and calls that they were in
    done: list[tuple[Slice, Any, int]] = []
    # for each request that has failed: the place of its first failed item, and the error
    failures: dict[Request, tuple[int, BaseException]] = {}
    args = kwargs = context = output = None
    while todo:
        slices, calls, collate = todo.popleft()
        if failures:
            ended = [each for each in slices if _comes_after(each, failures)]
            done += [(each, failures[each[0]][1], calls) for each in ended]
            slices = [each for each in slices if each not in ended]
        if not slices:
            continue
        if error is None:
            try:
                args, kwargs, context = collate(slices, batch)
                batch.attempts += 1
                calls += 1
                output = func(*args, **kwargs)
                if ends_task is not None:
                    output = await output
                parts = collator.split(output, slices, context)
                if slices is batch.slices:  # as nearly all batches
                    return slices, parts, [calls] * len(slices)
                done += [(each, part, calls) for each, part in zip(slices, parts, strict=True)]
                continue
            except BaseException as raised:
                if ends_task is not None and ends_task(raised):
                    raise
                error = trim_traceback(raised)
            finally:  # the next attempt needs the memory, and an error holds this frame
                args = kwargs = context = output = None
        batch.fitted = False
        size, too_big = sum([stop - start for _, start, stop in slices]), passes(splits, error)
        if too_big and size > 1:
            batch.too_big = [*batch.too_big, (size, _longest(slices))]
        if type(error) is GroupsNeeded:  # `isinstance` may run code of the error's class
            todo += [(part, calls, way) for part, way in error.groups]
        elif size > 1 and (too_big or passes(isolates, error)):
            todo += [(half, calls, collate) for half in _cut(slices, (size + 1) // 2)]
        else:
            for each in slices:
                done.append((each, error, calls))
                if not (each[0].separate or _comes_after(each, failures)):
                    failures[each[0]] = _place(each), error
        if too_big:
            release_memory(error)
        error = None
    done.sort(key=lambda outcome: _place(outcome[0]))
    try:
        return tuple(map(list, zip(*done, strict=True)))  # type: ignore[return-value]  # three lists
    finally:  # errors hold this frame, which must not hold them
        done.clear()
        failures.clear()


def finish_now(coroutine: Coroutine[Any, Any, U]) -> U:
    """Return the result of a coroutine that never suspends."""
    try:
        raise AssertionError(coroutine.send(None))  # it has suspended
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # of this coroutine


def passes(test: ErrorTest, error: BaseException) -> bool:
    """Return `test(error)`; False if code of the error's class fails in it, such as `__str__`."""
    try:
        return test(error)
    except BaseException:
        return False


def _place(piece: Slice) -> int:
    """Return the least place of the items of `piece` in the list of their caller."""
    request, start, stop = piece
    return start if request.order is None else min(request.order[start:stop])


def _comes_after(piece: Slice, failures: dict[Request, tuple[int, BaseException]]) -> bool:
    """Return whether an item has failed that its caller has before all items of `piece`."""
    return piece[0] in failures and failures[piece[0]][0] < _place(piece)


def _longest(slices: list[Slice]) -> int:
    return max([request.lengths[start] if request.lengths else 0 for request, start, _ in slices])


def _cut(slices: list[Slice], room: int) -> tuple[list[Slice], list[Slice]]:
    """Return slices of the first `room` items of `slices`, and of the rest."""
    first: list[Slice] = []
    rest: list[Slice] = []
    for request, start, stop in slices:
        middle = min(stop, start + room)
        room -= middle - start
        first += [(request, start, middle)] if start < middle else []
        rest += [(request, middle, stop)] if middle < stop else []
    return first, rest
