"""Attempts at one batch: the calls of the function that it takes until each slice has its outcome.

`attempts` yields each call that must be made, is sent what it came to, and returns the outcomes. It
has no queue, waker, lock or clock: drivers stand around it. Its rules:

1. The whole batch comes first.
2. What fails with an error that `splits` (it ran out of memory) is cut in halves, and these again,
   until they fit or are one item; no part with an item as long or longer is tried with more items
   than such a half.
3. What fails with an error that `isolates` is cut in halves, too, until the items that fail stand
   alone. So one bad item in 64 takes 13 calls.
4. What cannot be split among its slices is run in groups that the collator names. A group that it
   can collate in several ways is run in the next one if it fails.
5. Any other error is the outcome of all slices of that attempt. A call of which a slice has failed
   fails as a whole: the rest of it is not tried any more, unless its items were sorted by length
   and the error to tell is the one of the item that stood first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

from .._collate.collator import Call, Collate, Collator, GroupsNeeded, Part
from .._core.exceptions import trim_traceback
from .._core.scheduler import Batch, Request, Slice
from .memory import drop_locals, free_cache

CallOutcome = tuple[Any, BaseException | None]
"""Output of one call of the batch function, or its error."""

ErrorTest = Callable[[BaseException], bool]
"""Whether an error is of some kind."""


Outcomes = tuple[list[Slice], Sequence[Any], Sequence[int]]
"""The slices of a batch, or parts of them; for each of these its part of the output, or the
`BaseException` in its place; and the number of calls of the function that it was in.
"""

Attempts = Generator[Call, CallOutcome, Outcomes]


def attempts(batch: Batch, collator: Collator, splits: ErrorTest, isolates: ErrorTest) -> Attempts:
    """Yields each call to be made for `batch`, and is sent its outcome."""
    slices, tried = batch.slices, 0  # what comes next, and the calls that it was in
    ways: Sequence[Collate] = (collator.collate,)  # to collate it, each for when one has failed
    todo: list[tuple[list[Slice], int, Sequence[Collate]]] = []  # what comes after it
    done: list[tuple[Slice, Any, int]] = []
    lost: dict[Request, BaseException] = {}  # requests that have failed, and are not tried on
    results: Sequence[Any] = ()
    context: Any = None
    while True:
        error: BaseException | None = None
        groups: Sequence[Part] = ()
        try:
            call = ways[0](slices, batch)
            context = call[2]
            batch.attempts += 1
            tried += 1
            output, error = yield call
            del call  # the next attempt has all memory for itself
            if error is None:
                results = collator.split(output, slices, context)
                if slices is batch.slices:
                    return slices, results, [tried] * len(slices)
        except GeneratorExit:  # nobody waits for the outcomes
            raise
        except GroupsNeeded as needed:
            groups = needed.groups
        except BaseException as raised:
            error = trim_traceback(raised)
        output = None
        if error is not None and len(ways) > 1:
            error, groups = None, [(slices, ways[1:])]
        if groups:
            batch.fitted = False
            todo += [(part, tried, others) for part, others in reversed(groups)]
        elif error is None:
            done += [(each, part, tried) for each, part in zip(slices, results, strict=True)]
        else:
            batch.fitted = False
            size = _size(slices)
            if too_big := _passes(splits, error):
                drop_locals(error)  # also if it is told: the next attempt has all memory for itself
            if size > 1 and too_big:
                batch.too_big = [*batch.too_big, (size, _longest(slices))]
                todo.append((slices, tried, ways))  # cut below, to what may fit by now
            elif size > 1 and _passes(isolates, error):
                todo += [(half, tried, ways) for half in reversed(_cut(slices, size // 2))]
            else:
                done += [(each, error, tried) for each in slices]
                # one whose items were sorted goes on: an item that stood earlier may fail, too
                lost.update({request: error for request, _, _ in slices if request.order is None})
            error = None
            if too_big:
                with suppress(BaseException):  # whatever passes for torch there
                    free_cache()
        slices = []
        while not slices:
            if not todo:
                done.sort(key=_place)  # a call is told of its failed item that stood first in it
                return tuple(map(list, zip(*done, strict=True)))  # type: ignore[return-value]
            slices, tried, ways = todo.pop()
            if lost:
                done += [(each, lost[each[0]], tried) for each in slices if each[0] in lost]
                slices = [each for each in slices if each[0] not in lost]
            if slices and batch.too_big:
                longest, size = _longest(slices), _size(slices)
                room = min(
                    [(n + 1) // 2 for n, width in batch.too_big if width <= longest] or [size]
                )
                if size > room:
                    todo += [(part, tried, ways) for part in reversed(_cut(slices, room))]
                    slices = []


def _passes(test: ErrorTest, error: BaseException) -> bool:
    """`test(error)`, which may run code of the error's class, such as its `__str__`."""
    try:
        return test(error)
    except BaseException:
        return False


def _place(outcome: tuple[Slice, Any, int]) -> int:
    """Place in the call of the first item of a slice."""
    request, start, stop = outcome[0]
    return start if request.order is None else min(request.order[start:stop])


def _size(slices: list[Slice]) -> int:
    return sum([stop - start for _, start, stop in slices])


def _longest(slices: list[Slice]) -> int:
    return max([request.lengths[start] if request.lengths else 0 for request, start, _ in slices])


def _cut(slices: list[Slice], room: int) -> tuple[list[Slice], list[Slice]]:
    """The first `room` items of `slices`, and the rest."""
    first: list[Slice] = []
    rest: list[Slice] = []
    for request, start, stop in slices:
        middle = min(stop, start + room)
        room -= middle - start
        first += [(request, start, middle)] if start < middle else []
        rest += [(request, middle, stop)] if middle < stop else []
    return first, rest
