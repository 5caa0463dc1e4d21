"""Attempts at one batch: the calls of the function until each slice has an outcome.

`attempts` is a coroutine that starts from the failure of the first call, makes all further calls,
and returns the outcomes of all slices. It never suspends for a plain function, and has no queue,
waker, lock or clock. Its rules:

1. The whole batch is tried first. `Execution` makes that call.
2. A part that fails with an error that `splits` (memory ran out) is cut in halves, until its parts
   fit or are one item. From then on no part with an item as long or longer is tried with more
   items than the half.
3. A part that fails with an error that `isolates` is cut in halves, too, until the items that fail
   stand alone. So one bad item in 64 takes 13 calls. Both halves are tried before either is cut.
   So the third call shows whether any part of the batch succeeds.
4. If the collator cannot split the output among the slices, it names groups of slices, and each
   group is run alone. A group that can be collated in several ways is run in the next way if it
   fails.
5. Any other error is the outcome of all slices of that attempt. If a slice of a call fails, the
   call fails as a whole, with the error of its failed item that comes first. Later items of the
   call are not tried any more, unless the items are `separate`.
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
"""Test of an error."""


Outcomes = tuple[list[Slice], Sequence[Any], Sequence[int]]
"""The slices of a batch, or parts of them. For each: its part of the output, or a `BaseException`
in its place; and the number of calls of the function that it was in.
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
    slices, tried = batch.slices, batch.attempts  # the next part; its calls so far
    ways: Sequence[Collate] = (collator.collate,)  # ways to collate it, tried in this order
    # parts after it, the last first; True for a part that has failed, and must be cut
    todo: list[tuple[list[Slice], int, Sequence[Collate], bool]] = []
    tries = 0  # index in `todo` from which no part must be cut
    done: list[tuple[Slice, Any, int]] = []
    # failed requests: the place after which items are not tried, and the error
    lost: dict[Request, tuple[int, BaseException]] = {}
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
            todo += [(part, tried, others, False) for part, others in reversed(groups)]
        elif error is None:
            done += [(each, part, tried) for each, part in zip(slices, results, strict=True)]
        else:
            batch.fitted = False
            size = _size(slices)
            if too_big := _passes(splits, error):
                drop_locals(error)  # a caller may get it later; memory is needed now
            if size > 1 and too_big:
                batch.too_big = [*batch.too_big, (size, _longest(slices))]
                todo.append((slices, tried, ways, False))  # cut below, to a size that may fit
            elif size > 1 and _passes(isolates, error):
                todo.insert(tries, (slices, tried, ways, True))
            else:
                done += [(each, error, tried) for each in slices]
                for each in slices:
                    request, place = each[0], _place(each)
                    if not (request.separate or (request in lost and lost[request][0] <= place)):
                        lost[request] = place, error
            error = None
            if too_big:
                with suppress(BaseException):  # another module may be named torch
                    free_cache()
        slices = []
        while not slices:
            if not todo:
                # a call gets the error of the failed item that comes first in it
                done.sort(key=lambda outcome: _place(outcome[0]))
                return tuple(map(list, zip(*done, strict=True)))  # type: ignore[return-value]  # of three
            slices, tried, ways, failed = todo.pop()
            if lost:
                ended = [each for each in slices if _comes_after(each, lost)]
                done += [(each, lost[each[0]][1], tried) for each in ended]
                slices = [each for each in slices if not _comes_after(each, lost)]
            if slices and failed:
                tries = len(todo)
                halves = _cut(slices, _size(slices) // 2)
                todo += [(half, tried, ways, False) for half in reversed(halves) if half]
                slices = []
            elif slices and batch.too_big:
                longest, size = _longest(slices), _size(slices)
                halves_tried = [(n + 1) // 2 for n, width in batch.too_big if width <= longest]
                room = min(halves_tried, default=size)
                if size > room:
                    todo += [(part, tried, ways, False) for part in reversed(_cut(slices, room))]
                    slices = []
        try:
            args, kwargs, context = ways[0](slices, batch)
            batch.attempts += 1
            tried += 1
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


def _passes(test: ErrorTest, error: BaseException) -> bool:
    """Return `test(error)`, which may run code of the error's class, for instance its `__str__`."""
    try:
        return test(error)
    except BaseException:
        return False


def _place(piece: Slice) -> int:
    """Return the place in the call of the first item of `piece`."""
    request, start, stop = piece
    return start if request.order is None else min(request.order[start:stop])


def _comes_after(piece: Slice, lost: dict[Request, tuple[int, BaseException]]) -> bool:
    """Return whether an item that comes before all of `piece` in its call has failed."""
    return piece[0] in lost and lost[piece[0]][0] < _place(piece)


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
