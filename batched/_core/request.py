"""What is queued and what is handed out: plain data that the scheduler fills in and the runtimes
read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import chain, islice, starmap
from typing import TYPE_CHECKING, Any

from .linger import FlushReason
from .rest import Rest, Span

if TYPE_CHECKING:
    from .group import Group


class Request:
    """One call, all its items together, from its arrival to its answer."""

    __slots__ = (
        "arrived",
        "error",
        "group",
        "items",
        "listed",
        "owner",
        "parts",
        "queues",
        "result",
        "size",
        "taken",
        "unanswered",
        "waited",
        "waker",
    )

    lengths: list[int] | None = None
    """Of the items, longest first, as the batch function will see them; None where lengths do not
    matter.
    """
    order: list[int] | None = None
    """Where each item stood in the call, if they were sorted."""
    rest: Rest | None = None
    """Which items wait; None while all do, or where they leave first to last."""
    number: int = 0
    """In the order in which the small calls of its group came onto the shelf."""

    def __init__(
        self,
        items: Any,
        size: int,
        group: Hashable,
        waker: Any,
        listed: bool = False,
        owner: object = None,
    ) -> None:
        # the call's items, as the collator knows them: a list if `listed`, else the one item, or
        # features
        self.items = items
        self.size = size  # how many items
        self.group = group  # key of the requests that may share a batch with this one
        # tells the caller that the answer is there; None once nobody waits for it any more
        self.waker = waker
        self.listed = listed  # a list call, answered with a list
        self.owner = owner  # the instance whose method was called, alive until the answer
        self.arrived = 0.0  # when the scheduler got it (s)
        self.taken = 0  # items handed out in batches so far
        self.unanswered = size  # items without a result so far
        self.waited = False  # whether its wait has been counted, when the first batch of it ended
        # results so far, if it was split, each with the position of its first item
        self.parts: list[tuple[int, Any]] | None = None
        self.result: Any = None  # the answer, once all of it is there
        self.error: BaseException | None = None  # the answer, if the call failed
        self.queues: Group | None = None  # where it waits; None before and after

    @property
    def spans(self) -> list[Span]:
        """The positions of the items that wait."""
        return [(self.taken, self.size)] if self.rest is None else self.rest.spans

    @property
    def longest(self) -> int:
        """The length of the longest item that waits; 0 where lengths do not matter."""
        return self.lengths[self.spans[0][0]] if self.lengths else 0

    def waiting_lengths(self, count: int) -> list[int]:
        """Of the longest `count` items that wait; only where lengths matter."""
        assert self.lengths is not None
        return [
            self.lengths[position]
            for position in islice(chain.from_iterable(starmap(range, self.spans)), count)
        ]

    def rank(self, position: int) -> int:
        """How many of its items wait before the one at `position`; only where lengths matter."""
        return position if self.rest is None else self.rest.rank(position)

    def cut(self, low: int, high: int) -> list[Span]:
        """Takes the waiting items ranked from `low` up to, not including, `high` out of its rest;
        only where lengths matter.
        """
        if self.rest is None:
            self.rest = Rest(self.size)  # type: ignore[misc]  # a slot of those that have lengths
        return self.rest.cut(low, high)

    def before(self, position: int) -> Iterator[int]:
        """The waiting positions before `position`, nearest first."""
        return (
            iter(range(position - 1, -1, -1)) if self.rest is None else self.rest.before(position)
        )

    def outcome(self) -> Any:
        """The result, or raises the error; to be called once, by the caller who was woken."""
        error, self.error = self.error, None
        if error is None:
            return self.result
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


class MeasuredRequest(Request):
    """One call whose items have lengths; apart, because most have none and pay for nothing."""

    __slots__ = ("lengths", "number", "order", "rest")

    def __init__(
        self,
        items: Any,
        size: int,
        group: Hashable,
        waker: Any,
        listed: bool = False,
        owner: object = None,
        *,
        lengths: list[int],
        order: list[int] | None = None,
    ) -> None:
        super().__init__(items, size, group, waker, listed, owner)
        self.lengths = lengths
        self.order = order
        self.rest = None
        self.number = 0


Slice = tuple[Request, int, int]
"""A request, and the positions of the first and after the last of the items meant. Plain, for there
is one per call in each batch.
"""


class Batch:
    """Slices of requests that are to run together."""

    __slots__ = (
        "attempts",
        "begun",
        "cells",
        "ended",
        "longest",
        "padding",
        "probes",
        "reason",
        "size",
        "slices",
        "started",
        "too_big",
    )

    def __init__(
        self, slices: list[Slice], size: int, reason: FlushReason, started: float, longest: int = 0
    ) -> None:
        # in the order the batch function sees them; where lengths matter, a request may have
        # several
        self.slices = slices
        self.size = size  # items in all slices
        self.longest = longest  # the length of the longest item; 0 where lengths do not matter
        self.reason: FlushReason = reason  # why it left
        self.started = started  # when it was formed (s)
        self.ended = started  # when its function had returned (s)
        # filled in by the execution:
        # (items, longest) of each attempt to run it or a part that ran out of memory
        self.too_big: list[tuple[int, int]] = []
        self.begun = False  # the function has been, or is about to be, called for it
        self.attempts = 0  # calls of the function, of any part of it
        self.probes = 0  # extra runs of the function to learn its output
        self.cells = 0  # places in the collated arrays, padding included
        self.padding = 0  # those of them that are padding
