"""Attempts at one batch: the calls of the function until each slice has an outcome.

`attempts` is a coroutine that starts from the failure of the first call, makes all further calls,
and returns the outcomes of all slices. It never suspends for a plain function, and has no queue,
waker, lock or clock. Its rules:

1. The whole batch is tried first. `Execution` makes that call.
2. If a part fails and `splits` accepts the error (memory ran out), the part is cut in halves until
   its parts fit or are one item. Later parts with as long an item, or a longer one, are tried with
   at most half as many items as the part that failed.
3. If `isolates` accepts the error, the part is cut in halves, too, until the items that fail stand
   alone. One bad item in 64 takes 13 calls. Both halves are tried before either is cut, so the
   third call shows whether any part of the batch succeeds.
4. If the collator cannot split the output among the slices, it names groups of slices, and each
   group is run alone. A group that can be collated in several ways is run in the next way if it
   fails.
5. Any other error is the outcome of all slices of that attempt. If a slice of a request fails, the
   request fails as a whole, with the error of the failed item that comes first in it. Its later
   items are not tried any more. Items that are `separate` have outcomes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .._collate.collator import Collate, Collator, GroupsNeeded, Part
from .._core.scheduler import Batch, Request, Slice
from .exceptions import trim_traceback
from .memory import drop_locals, free_cache

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
    failure: BaseException,
    splits: ErrorTest,
    isolates: ErrorTest,
    ends_task: ErrorTest | None = None,
) -> Outcomes:
    """Call `func` for parts of `batch` after the first call ended with `failure`.

    A coroutine function has `ends_task`, which selects the errors that cancel the awaiting task:
    only these are raised. See the rules of the module.
    """
    slices, calls = batch.slices, batch.attempts  # the next part, and the calls that it was in
    ways: Sequence[Collate] = (collator.collate,)  # ways to collate it, tried in this order
    # later parts, the next one last: slices, calls, ways, and whether it failed and must be cut
    todo: list[tuple[list[Slice], int, Sequence[Collate], bool]] = []
    # index in `todo` at which a failed part waits: below all parts that are called before it
    cut_index = 0
    # slices with an outcome: the outcome, and the calls that the slice was in
    done: list[tuple[Slice, Any, int]] = []
    # for each request that has failed: the place of its first failed item, and the error
    first_failures: dict[Request, tuple[int, BaseException]] = {}
    results: Sequence[Any] = ()
    error: BaseException | None = failure
    args: Any = None
    kwargs: Any = None
    output: Any = None
    del failure  # the next attempt needs the memory
    while True:
        groups: Sequence[Part] = ()
        if type(error) is GroupsNeeded:  # `isinstance` may run code of the error's class
            groups, error = error.groups, None
        if error is not None and len(ways) > 1:
            error, groups = None, [(slices, ways[1:])]
        if groups:
            batch.fitted = False
            todo += [(part, calls, others, False) for part, others in reversed(groups)]
        elif error is None:
            done += [(each, part, calls) for each, part in zip(slices, results, strict=True)]
        else:
            batch.fitted = False
            size = _size(slices)
            if too_big := passes(splits, error):
                drop_locals(error)  # the error lives on, and its frames must not hold memory
            if size > 1 and too_big:
                batch.too_big = [*batch.too_big, (size, _longest(slices))]
                todo.append((slices, calls, ways, False))  # cut below, to a size that may fit
            elif size > 1 and passes(isolates, error):
                todo.insert(cut_index, (slices, calls, ways, True))
            else:
                done += [(each, error, calls) for each in slices]
                for each in slices:
                    request, place = each[0], _place(each)
                    if not (
                        request.separate
                        or (request in first_failures and first_failures[request][0] <= place)
                    ):
                        first_failures[request] = place, error
            error = None
            if too_big:
                with suppress(BaseException):  # a user's module may be named torch
                    free_cache()
        slices = []
        while not slices:
            if not todo:
                # a call gets the error of the failed item that comes first in it
                done.sort(key=lambda outcome: _place(outcome[0]))
                try:
                    return tuple(map(list, zip(*done, strict=True)))  # type: ignore[return-value]  # three lists
                finally:  # errors hold this frame, which must not hold them
                    done.clear()
                    first_failures.clear()
            slices, calls, ways, must_cut = todo.pop()
            if first_failures:
                ended = [each for each in slices if _comes_after(each, first_failures)]
                done += [(each, first_failures[each[0]][1], calls) for each in ended]
                slices = [each for each in slices if not _comes_after(each, first_failures)]
            if slices and must_cut:
                cut_index = len(todo)
                halves = _cut(slices, _size(slices) // 2)
                todo += [(half, calls, ways, False) for half in reversed(halves) if half]
                slices = []
            elif slices and batch.too_big:
                longest, size = _longest(slices), _size(slices)
                halves_tried = [(n + 1) // 2 for n, width in batch.too_big if width <= longest]
                room = min(halves_tried, default=size)
                if size > room:
                    todo += [(part, calls, ways, False) for part in reversed(_cut(slices, room))]
                    slices = []
        try:
            args, kwargs, context = ways[0](slices, batch)
            batch.attempts += 1
            calls += 1
            output = func(*args, **kwargs)
            if ends_task is not None:
                output = await output
            args = kwargs = None
            results = collator.split(output, slices, context)
        except BaseException as raised:
            if ends_task is not None and ends_task(raised):
                raise
            error = trim_traceback(raised)
        args = kwargs = context = output = None


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


def _comes_after(piece: Slice, first_failures: dict[Request, tuple[int, BaseException]]) -> bool:
    """Return whether an item has failed that its caller has before all items of `piece`."""
    return piece[0] in first_failures and first_failures[piece[0]][0] < _place(piece)


def _size(slices: list[Slice]) -> int:
    return sum([stop - start for _, start, stop in slices])


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
