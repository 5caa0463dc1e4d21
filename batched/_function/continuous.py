"""Decorated functions that work in steps: their calls join and leave a run one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from .._runtime.async_backend import current_loop
from .._runtime.wakers import blocking_waker
from .._steps.stream import Pieces, Stream
from .batched import AsyncBatched, Batched, BatchedCallable, P
from .requests import MISSING

if TYPE_CHECKING:
    from typing import Self, Unpack

    from .settings import StepSettings

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


class _Streaming(BatchedCallable[T, U, P], Generic[T, U, V, P]):
    """The calls that threads and coroutines share."""

    def stream(self, item: T = MISSING, /, *args: P.args, **kwargs: P.kwargs) -> Stream[V, U]:
        """Return the pieces that the function emits for `item`, which is always one item.

        The call begins now. The stream is read by `for`, or by `async for` on any event loop.

        Raises:
            BatcherClosed: the batcher was shut down.
            QueueFull: there is no room for the item, with `on_full="raise"`.
        """
        steps = self._function.options.steps
        assert steps is not None
        pieces = Pieces(steps.max_pieces)
        room = blocking_waker() if self._batcher.may_block and current_loop() is None else None
        return Stream(pieces, self._submit(item, args, kwargs, room, pieces=pieces))

    if TYPE_CHECKING:

        def with_options(self, **settings: Unpack[StepSettings]) -> Self: ...  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]


class Continuous(_Streaming[T, U, V, P], Batched[T, U, P]):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A function that works in steps, which threads call and wait for."""


class AsyncContinuous(_Streaming[T, U, V, P], AsyncBatched[T, U, P]):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A function that works in steps, which coroutines await."""
