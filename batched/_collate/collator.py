"""Protocol between the execution of a batch and its collator, of whichever kind its items are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .._core.scheduler import Batch, Request, Slice

Call = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Positional arguments, keyword arguments and context of one call of the batch function. The
context is what the collator needs to split the output of this very call.
"""


Collate = Callable[[list[Slice], Batch], Call]
"""Maker of the call that runs some slices of a batch."""

Part = tuple[list[Slice], Sequence[Collate]]
"""Slices that are to run together, and ways to collate them, each for when one has failed."""


class GroupsNeeded(Exception):
    """Request to run groups of the slices of a batch one by one instead of all together."""

    def __init__(self, groups: Sequence[Part]) -> None:
        super().__init__(groups)
        self.groups = groups


class Collator(Protocol):
    """Maker of arguments from slices, and of results from outputs."""

    def collate(self, slices: list[Slice], batch: Batch, /) -> Call:
        """The call that runs `slices`, which are all or some of those of `batch`. Adds the cells
        and the padding of its arrays to `batch`.

        Raises:
            GroupsNeeded: an output for all of them could not be split.
        """
        ...

    def split(self, output: Any, slices: list[Slice], context: Any, /) -> Sequence[Any]:
        """One part of `output` for each slice, or the exception in its place. The part of a slice
        that is a whole request is the result of its caller.

        Raises:
            GroupsNeeded: this output cannot be split.
        """
        ...

    def enter_thread(self) -> None:
        """Prepares this thread for calls that others are to make, which it is to disturb little."""
        ...

    def hand_over(self, call: Call, /) -> Any:
        """What tells when all of `call` has arrived; falsy if it has. For another thread, which is
        to `take_over`.
        """
        ...

    def take_over(self, call: Call | None, arrivals: Any, /) -> None:
        """Has whatever this thread computes next wait for the arrivals of `call`."""
        ...

    def join(self, request: Request, parts: list[Any], /) -> Any:
        """The result of a caller whose request ran in several slices: `parts` are those that
        `split` returned, in the order of their positions in the request.
        """
        ...
