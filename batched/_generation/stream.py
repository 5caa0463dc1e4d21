"""Stream: tokens of one prompt, from the thread that generates them to a coroutine."""

from __future__ import annotations

from collections.abc import Iterable

from .._runtime.async_backend import current_loop
from .._runtime.wakers import AsyncWaker, async_waker, wake_all


class Stream:
    """Tokens of one prompt as they are generated."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False
        self._waker: AsyncWaker | None = None  # of the coroutine that waits for a token

    def put(self, count: int, token: int) -> None:
        """Add token number `count`, from 1 on.

        A token that is already there is skipped: its batch has begun anew.
        """
        if count > len(self.tokens):
            self.tokens.append(token)

    def end(self) -> None:
        """Mark the stream as complete, and wake the coroutine."""
        self.ended = True
        wake([self])

    async def wait(self, known: int) -> None:
        """Wait until the stream has more tokens than `known`, or is complete."""
        while len(self.tokens) <= known and not self.ended:
            self._waker = waker = async_waker(current_loop())
            # a token may have come before the waker was set
            if len(self.tokens) <= known and not self.ended:
                await waker

    def take_waker(self) -> list[AsyncWaker]:
        """Remove and return the waker, if there is one."""
        waker, self._waker = self._waker, None
        return [] if waker is None else [waker]


def wake(streams: Iterable[Stream]) -> None:
    """Wake the coroutines that wait for `streams`, with one message for each loop."""
    wake_all([waker for stream in streams for waker in stream.take_waker()])
