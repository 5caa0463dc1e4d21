"""Runs one batch and deals out what comes of it. One logic for functions that return and for those
that are awaited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

from .._collate.collator import Call, Collator, ProbeNeeded
from .._core.scheduler import Batch, Request, Scheduler, Slice
from .failures import told
from .loops import current_task, ends_task
from .memory import free_cache, is_out_of_memory, without_frames

Answer = tuple[Any, BaseException | None]
"""What a call of the batch function came to: its output, or its error."""

Outcomes = tuple[list[Slice], Sequence[Any]]
"""Slices, and for each its part of the output or the `BaseException` in its place."""

Begun = tuple[Call | None, BaseException | None]
"""A batch that was collated: the call that runs all of it, or why there is none."""


class Execution:
    """One batch function and its collator."""

    def __init__(
        self,
        func: Callable[..., Any],
        collator: Collator,
        name: str,
        *,
        splits: bool,
        isolates: bool,
    ) -> None:
        self._func = func
        self._collator = collator
        self._name = name  # of the batch function, for error messages
        self._splits = splits  # batches that ran out of memory, instead of failing them
        self._isolates = isolates  # the items that fail alone from those that fail with them

    def begin(self, batch: Batch) -> Begun:
        """`batch` collated, for `run` to go on with. Never raises."""
        try:
            return self._collator.collate(batch.slices, batch), None
        except BaseException as raised:
            return None, _as_raised(raised)

    def run(self, batch: Batch, begun: Begun | None = None) -> Outcomes:
        """What each slice of `batch` came to, by calling the function here. Never raises."""
        call, error = begun or self.begin(batch)
        owner = batch.slices[0][0].owner
        note = None
        if call is not None:
            batch.attempts = 1
            note = call[2]
            output, error = self._answer(owner, call)
            if error is None:
                parts, error = self._dealt_out(batch, output, note)
                if error is None:
                    return batch.slices, parts
            del output, call
        attempts = self._attempts(batch, note, error)
        del begun, error, note  # the next attempt has all memory for itself
        try:
            call = next(attempts)
            while True:
                call = attempts.send(self._answer(owner, call))
        # an error among these holds the frame of this call, which must not hold it
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # of a generator

    async def run_async(self, batch: Batch) -> Outcomes:
        """What each slice of `batch` came to, by awaiting the function here. Raises only what ends
        the task it runs in.
        """
        call, error = self.begin(batch)
        owner = batch.slices[0][0].owner
        note = None
        if call is not None:
            batch.attempts = 1
            note = call[2]
            output, error = await self._answer_async(owner, call)
            if error is None:
                parts, error = self._dealt_out(batch, output, note)
                if error is None:
                    return batch.slices, parts
            del output, call
        attempts = self._attempts(batch, note, error)
        del error, note  # the next attempt has all memory for itself
        try:
            call = next(attempts)
            while True:
                call = attempts.send(await self._answer_async(owner, call))
        # an error among these holds the frame of this call, which must not hold it
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # of a generator

    def _answer(self, owner: object, call: Call) -> Answer:
        args, kwargs, _ = call
        try:
            return (
                self._func(*args, **kwargs) if owner is None else self._func(owner, *args, **kwargs)
            ), None
        except BaseException as raised:
            return None, _as_raised(raised)

    async def _answer_async(self, owner: object, call: Call) -> Answer:
        args, kwargs, _ = call
        try:
            return await (
                self._func(*args, **kwargs) if owner is None else self._func(owner, *args, **kwargs)
            ), None
        except BaseException as raised:
            if ends_task(raised, current_task()):
                raise
            return None, _as_raised(raised)

    def _dealt_out(
        self, batch: Batch, output: Any, note: Any
    ) -> tuple[Sequence[Any], BaseException | None]:
        """What each slice of `batch` came to by this output of the function, or why that cannot be
        told.
        """
        try:
            return self._collator.split(output, batch.slices, note), None
        except BaseException as raised:
            return [], _as_raised(raised)

    def _attempts(
        self, batch: Batch, note: Any, error: BaseException | None
    ) -> Generator[Call, Answer, Outcomes]:
        """Yields each call that is to be made after the first came to `error`, and is sent what it
        came to; returns the outcomes.

        What runs out of memory is cut in halves, and these again, until they fit or are one item.
        So is what fails, if it is to be found out which items fail alone.
        """
        outcomes: list[tuple[Slice, Any]] = []
        # calls that fail whatever becomes of the rest of them
        lost: dict[Request, BaseException] = {}
        todo = [batch.slices]
        while todo:
            slices = todo.pop()
            if lost:
                outcomes += [(each, lost[each[0]]) for each in slices if each[0] in lost]
                slices = [each for each in slices if each[0] not in lost]
                if not slices:
                    continue
            if batch.too_big:
                room = min(
                    [
                        (items + 1) // 2
                        for items, longest in batch.too_big
                        if longest <= _longest(slices)
                    ],
                    default=batch.size,
                )
                if _size(slices) > room:
                    todo += reversed(_cut(slices, room))
                    continue
            try:
                if isinstance(error, ProbeNeeded):
                    parts, error = yield from self._probed(error, slices, batch, note)
                elif error is not None:
                    parts = []
                else:
                    parts, error = yield from self._attempt(slices, batch)
            except GeneratorExit:  # the task that ran it has ended
                raise
            except BaseException as raised:
                parts, error = [], _as_raised(raised)
            failed, error = error, None
            if failed is None:
                outcomes += zip(slices, parts, strict=True)
            elif self._splits and is_out_of_memory(failed) and _size(slices) > 1:
                without_frames(failed)
                del failed
                free_cache()
                batch.too_big.append((_size(slices), _longest(slices)))
                todo.append(slices)
            elif self._isolates and isinstance(failed, Exception) and (size := _size(slices)) > 1:
                del failed
                todo += reversed(_cut(slices, size // 2))
            else:
                outcomes += [(each, failed) for each in slices]
                if todo:
                    lost.update(
                        {request: failed for request, _, _ in slices if request.order is None}
                    )
        if self._isolates:  # a call is told of that one of its failed items that stood first in it
            outcomes.sort(key=_place)
        return [each for each, _ in outcomes], [outcome for _, outcome in outcomes]

    def _attempt(
        self, slices: list[Slice], batch: Batch
    ) -> Generator[Call, Answer, tuple[Any, BaseException | None]]:
        """Yields what is to be called for `slices`; returns their parts of the output, or the error
        of a call.
        """
        call = self._collator.collate(slices, batch)
        note = call[2]
        batch.attempts += 1
        output, error = yield call
        del call
        if error is not None:
            return [], error
        try:
            return self._collator.split(output, slices, note), None
        except ProbeNeeded as needed:
            probe = needed
        del output
        return (yield from self._probed(probe, slices, batch, note))

    def _probed(
        self, probe: ProbeNeeded, slices: list[Slice], batch: Batch, note: Any
    ) -> Generator[Call, Answer, tuple[Any, BaseException | None]]:
        """As `_attempt`, once it has turned out that `probe` is needed."""
        while True:
            probe.__traceback__ = None  # which holds this frame
            for call in probe.calls:
                batch.probes += 1
                batch.attempts += 1
                answer, error = yield call
                if error is None:
                    probe.learn(answer, call)
                    break
                if probe.failed(error, call) and self._splits and is_out_of_memory(error):
                    return [], error
            try:
                return self._collator.split(probe.kept, slices, note), None
            except ProbeNeeded as needed:
                probe = needed

    def conclude(self, ended: list[Request]) -> int:
        """Gives each of `ended` that came in parts its result, or its own error, and returns how
        many have an error.
        """
        failed: list[Request] = []
        for request in ended:
            if request.parts is not None and request.error is None:
                try:
                    request.parts.sort(key=_position)
                    request.result = self._collator.joined(
                        request, [part for _, part in request.parts]
                    )
                except BaseException as raised:
                    request.error = raised
            if request.error is not None:
                failed.append(request)
        if failed:
            sharers = Counter(id(request.error) for request in failed)
            for request in failed:
                assert request.error is not None
                request.error = told(
                    self._name, request.error, alone=sharers[id(request.error)] == 1
                )
        return len(failed)


def _as_raised(error: BaseException) -> BaseException:
    """`error` with a traceback that begins in the user's code."""
    traceback = error.__traceback__
    return error.with_traceback(traceback.tb_next if traceback is not None else None)


def _place(outcome: tuple[Slice, Any]) -> int:
    (request, start, _), _ = outcome
    return start if request.order is None else request.order[start]


def _position(part: tuple[int, Any]) -> int:
    return part[0]


def settle(scheduler: Scheduler, outcomes: Outcomes) -> list[Request]:
    """Adds outcomes of a batch to its requests, and returns those that have ended with it."""
    ended: list[Request] = []
    slices, parts = outcomes
    for (request, start, stop), outcome in zip(slices, parts, strict=True):
        # its caller has gone, or another part of it failed
        if request.waker is None or request.error is not None:
            continue
        if issubclass(type(outcome), BaseException):  # its `__class__` may be code of the user's
            request.error = outcome
            scheduler.cancel(request)
        elif stop - start == request.size:
            request.unanswered = 0
            request.result = outcome
        else:
            if request.parts is None:
                request.parts = []
            request.parts.append((start, outcome))
            request.unanswered -= stop - start
            if request.unanswered:
                continue
        ended.append(request)
    return ended


def _size(slices: list[Slice]) -> int:
    return sum([stop - start for _, start, stop in slices])


def _longest(slices: list[Slice]) -> int:
    return max(
        [
            request.lengths[start] if request.lengths is not None else 0
            for request, start, _ in slices
        ]
    )


def _cut(slices: list[Slice], room: int) -> tuple[list[Slice], list[Slice]]:
    """The first `room` items of `slices`, and the rest."""
    first: list[Slice] = []
    rest: list[Slice] = []
    for request, start, stop in slices:
        middle = min(stop, start + room)
        room -= middle - start
        if start < middle:
            first.append((request, start, middle))
        if middle < stop:
            rest.append((request, middle, stop))
    return first, rest
