"""Interface between the execution of a batch and its collator, for plain items and features."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .._core.scheduler import Batch, Request, Slice
from ..errors import BatchFunctionError

Call = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Positional arguments, keyword arguments and context of one call of the batch function. The
collator needs the context to split the output of the same call.
"""


Collate = Callable[[list[Slice], Batch], Call]
"""Function that returns the call for some slices of a batch."""

Part = tuple[list[Slice], Collate]
"""Slices that run together, and the function that collates them."""


def refuse_unawaited(what: str, output: Any) -> None:
    """Raise a BatchFunctionError if `output`, of which `what` speaks, is a coroutine.

    Close it, because no caller can await it any more.
    """
    if inspect.iscoroutine(output):
        output.close()
        raise BatchFunctionError(
            f"{what} a coroutine, which nothing awaits: decorate an `async def` with an `aio` "
            "decorator; a wrapper around one must be an `async def` that awaits it"
        )


class GroupsNeeded(Exception):
    """Request to run the slices of a batch in groups, one group after another."""

    def __init__(self, groups: Sequence[Part]) -> None:
        super().__init__(groups)
        self.groups = groups


class Collator:
    """Converter of slices to arguments, and of outputs to results."""

    def collate(self, slices: list[Slice], batch: Batch, /) -> Call:
        """Return the call that runs `slices`, which are all or some slices of `batch`.

        Add the cells and the padding of its arrays to `batch`.

        Raises:
            GroupsNeeded: an output for all slices could not be split.
        """
        raise NotImplementedError

    def split(self, output: Any, slices: list[Slice], context: Any, /) -> Sequence[Any]:
        """Return one part of `output` for each slice, or an exception in its place.

        The part of a slice that is a whole request is the result of its caller.

        Raises:
            GroupsNeeded: this output cannot be split.
        """
        raise NotImplementedError

    def join(self, request: Request, parts: list[Any], /) -> Any:
        """Return the result for the caller of a request that ran in several slices.

        `parts` are the parts that `split` returned, in the order of their positions in the request.
        """
        raise NotImplementedError
