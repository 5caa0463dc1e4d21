"""What the execution of a batch asks of a collator, whichever kind of items it knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .._core.scheduler import Batch, Request, Slice

Call = tuple[tuple[Any, ...], dict[str, Any], Any]
"""One call of the batch function: positional and keyword arguments, and what the collator wants to
know when it splits the output.
"""


class ProbeNeeded(Exception):
    """The output cannot be split before it is known what the function makes of one row of it alone.

    The first of `calls` that the function answers tells. `learn` is to be told the output, and
    `failed` the errors before, of which it says whether the caller of that row would have got it
    alone; and `split` is to be asked again, about `kept`, a copy of the output: the function may
    write the next one to the same memory.
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
    """Makes arguments of slices, and results of outputs."""

    def collate(self, slices: list[Slice], batch: Batch, /) -> Call:
        """The call that runs `slices`, all or a part of those of `batch`, in which it counts
        padding.
        """
        ...

    def split(self, output: Any, slices: list[Slice], note: Any, /) -> Sequence[Any]:
        """One part per slice, or the exception in its place. The part of a whole call is what its
        caller gets.

        Raises:
            ProbeNeeded: something has to be found out before.
        """
        ...

    def joined(self, request: Request, parts: list[Any], /) -> Any:
        """What a caller gets whose call was split, of its parts in the order of their positions."""
        ...
