"""Protocol between the execution of a batch and its collator, of whichever kind its items are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .._core.scheduler import Batch, Request, Slice

Call = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Positional arguments, keyword arguments and context of one call of the batch function. The
context is what the collator needs to split the output of this very call.
"""


class ProbeNeeded(Exception):
    """Request for another call of the function, with one row alone, before its output can be split.

    The execution makes `calls` one after another. The output of the first that returns goes to
    `learn`; the error of one that raises goes to `failed`, which says whether the caller of that
    row would have got this error alone. Then it splits `kept`, a copy of the output: the function
    may write the next output to the same memory.
    """

    def __init__(
        self,
        kept: Any,
        calls: list[Call],
        learn: Callable[[Any, Call], None],
        failed: Callable[[BaseException, Call], bool],
    ) -> None:
        super().__init__(kept, calls, learn, failed)
        self.kept = kept
        self.calls = calls
        self.learn = learn
        self.failed = failed


class Collator(Protocol):
    """Maker of arguments from slices, and of results from outputs."""

    def collate(self, slices: list[Slice], batch: Batch, /) -> Call:
        """The call that runs `slices`, which are all or some of those of `batch`. Adds the cells
        and the padding of its arrays to `batch`.
        """
        ...

    def split(self, output: Any, slices: list[Slice], context: Any, /) -> Sequence[Any]:
        """One part of `output` for each slice, or the exception in its place. The part of a slice
        that is a whole request is the result of its caller.

        Raises:
            ProbeNeeded: another call has to be made first.
        """
        ...

    def join(self, request: Request, parts: list[Any], /) -> Any:
        """The result of a caller whose request ran in several slices: `parts` are those that
        `split` returned, in the order of their positions in the request.
        """
        ...
