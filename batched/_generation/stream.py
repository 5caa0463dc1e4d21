"""Stream: tokens of one prompt, from the thread that generates them to a coroutine."""

from __future__ import annotations

from collections.abc import Iterable

from .._runtime.async_backend import current_loop
from .._runtime.wakers import AsyncWaker, async_waker, wake_all


class Stream:
    """Tokens of one prompt, as they come."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False
        self._waker: AsyncWaker | None = None  # of the coroutine that waits for more

    def put(self, count: int, token: int) -> None:
        """Adds the token that makes `count` of them; one that is there is known already, as the
        batch was begun anew.
        """
        if count > len(self.tokens):
            self.tokens.append(token)

    def end(self) -> None:
        """Tells that no more tokens come."""
        self.ended = True
        wake([self])

    async def wait(self, known: int) -> None:
        """Waits until there are more tokens than `known`, or all."""
        while len(self.tokens) <= known and not self.ended:
            self._waker = waker = async_waker(current_loop())
            if len(self.tokens) <= known and not self.ended:  # else it came in between
                await waker

    def take_waker(self) -> list[AsyncWaker]:
        waker, self._waker = self._waker, None
        return [] if waker is None else [waker]


def wake(streams: Iterable[Stream]) -> None:
    """Wakes the coroutines that wait for these, with one message for each loop."""
    wake_all([waker for stream in streams for waker in stream.take_waker()])
