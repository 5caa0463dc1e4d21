"""Streams: pieces of one call, from the run that emits them to a thread or a coroutine."""

from __future__ import annotations

import types
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .._runtime.async_backend import current_loop
from .._runtime.wakers import POLL_INTERVAL, Future, async_waker, blocking_waker, wait, wake_all
from ..errors import BatcherClosed

if TYPE_CHECKING:
    from typing import Self

U = TypeVar("U")
V = TypeVar("V")


class Pieces:
    """Pieces that a run has emitted and the reader has not taken, at most `most` if all are text.

    One run adds pieces, and one reader takes them.
    """

    def __init__(self, most: int) -> None:
        self._pieces: deque[Any] = deque()
        self._most = most
        self._wakers: deque[Any] = deque()  # of the reader, while it waits

    @property
    def is_full(self) -> bool:
        """Whether the reader is `most` pieces behind."""
        return len(self._pieces) >= self._most

    def put(self, piece: Any) -> bool:
        """Add a piece. Return whether the reader waits for one."""
        pieces = self._pieces
        if self.is_full and type(piece) in (str, bytes):
            try:
                last = pieces.pop()
            except IndexError:  # the reader has just taken all
                pass
            else:
                if type(last) is type(piece):
                    piece = last + piece
                else:
                    pieces.append(last)
        pieces.append(piece)
        return bool(self._wakers)

    def take(self) -> Any:
        """Remove and return the first piece.

        Raises:
            IndexError: there is none.
        """
        return self._pieces.popleft()

    def set_waker(self, waker: Any) -> bool:
        """Let `waker` be woken with the next piece. Return whether there is no piece yet."""
        self._wakers.append(waker)
        return not self._pieces

    def take_wakers(self) -> list[Any]:
        """Remove and return the wakers of the reader."""
        wakers = []
        with suppress(IndexError):
            while True:
                wakers.append(self._wakers.popleft())
        return wakers

    def clear(self) -> None:
        """Drop all pieces."""
        self._pieces.clear()


class Stream(Generic[V, U]):
    """Pieces of the result of one call, in order, for one reader: `for` or `async for`.

    The stream ends once the call has ended, or raises the exception of the call after the pieces
    before. A stream that is closed, or dropped, gives up its call.
    """

    if not TYPE_CHECKING:  # pragma: no branch
        __class_getitem__ = classmethod(types.GenericAlias)

    def __init__(self, pieces: Pieces, future: Future[U]) -> None:
        self._pieces = pieces
        self._future = future
        self._closed = False
        future.add_done_callback(lambda _: wake_all(pieces.take_wakers()))

    def result(self, timeout: float | None = None) -> U:
        """Return the result of the call, as `Future.result` does. Pieces need not be read first."""
        return self._future.result(timeout)

    def close(self) -> None:
        """Give up the call if it has not ended, and drop its pieces."""
        self._closed = True
        self._future.cancel()
        self._pieces.clear()

    async def aclose(self) -> None:
        """Close the stream as `close` does."""
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> V:
        while True:
            done = self._future.done()  # first: its pieces came before its end
            try:
                piece: V = self._pieces.take()
            except IndexError:
                if done:
                    self._raise_error()
                    raise StopIteration from None
            else:
                return piece
            self._wait()

    def _wait(self) -> None:
        """Wait in this thread until a piece has come, or the call has ended."""
        future = self._future
        if future.loop is not None:
            raise RuntimeError("a stream of a coroutine function is read by `async for`")
        waker = blocking_waker()
        future.check_wait(None)
        if self._pieces.set_waker(waker) and not future.done():
            try:
                waker.acquire()
            except BaseException:  # a signal handler raised
                self.close()
                raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> V:
        while True:
            done = self._future.done()
            try:
                piece: V = self._pieces.take()
            except IndexError:
                if done:
                    self._raise_error()
                    raise StopAsyncIteration from None
            else:
                return piece
            await self._wait_async()

    async def _wait_async(self) -> None:
        """Wait on this event loop until a piece has come, or the call has ended."""
        future, loop = self._future, current_loop()
        waker = async_waker(loop)
        interval = None if future.loop in (None, loop) else POLL_INTERVAL
        future.check_wait(None)
        if self._pieces.set_waker(waker) and not future.done():
            try:
                while not await wait(waker, interval):
                    future.look_at_loop()
            except BaseException:  # the task was cancelled
                self.close()
                raise

    def _raise_error(self) -> None:
        """Raise the exception of the call, if it has one."""
        if self._future.cancelled():
            if self._closed:
                return
            raise BatcherClosed("the batcher was shut down before this call had ended")
        error = self._future.exception()
        try:
            if error is not None:
                raise error
        finally:
            del error, self  # the raised exception holds this frame

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        future: Future[U] | None = getattr(self, "_future", None)
        if future is not None and not future.done():
            future.cancel()
