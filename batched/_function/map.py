"""`fn.map`: results in order, computed a bounded number of items ahead of the consumer.

A submitted item waits for the items before it, and may expire meanwhile (`queue_timeout_ms`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Mapping
from typing import Any, Final, Generic, TypeVar

from .._core.checks import check_whole
from .._core.policy import BatchPolicy
from .._runtime.async_backend import current_loop
from .._runtime.wakers import Future, wait
from ..errors import BatcherClosed

T = TypeVar("T")

_LATE: Final = (
    "map: not all results were there within `timeout`: the seconds from the call of map on, "
    "for all results together"
)


def check_many(items: T) -> T:
    """Return the items of a call of `map`, unless they are one text, dict or table."""
    if isinstance(items, str | bytes | Mapping | None) or type(items).__name__ == "DataFrame":
        raise TypeError(f"map takes many items, as a list, got a {type(items).__name__}")
    return items


class Ahead(Generic[T]):
    """Items of one `map` that are submitted and not yet answered, in order."""

    def __init__(
        self,
        submit: Callable[[T], Future[Any]],
        policy: BatchPolicy,
        buffersize: int | None,
        timeout: float | None,
        return_exceptions: bool,
    ) -> None:
        if buffersize is not None:
            check_whole("buffersize", buffersize)
        # by default the items of the running batches and of the next three
        size = buffersize or 4 * policy.batch_size * policy.max_concurrent_batches
        self._submit = submit
        self._limit = min(size, policy.max_queue_size or sys.maxsize)  # items
        self._deadline = None if timeout is None else time.perf_counter() + timeout  # s
        self._return_exceptions = return_exceptions
        self._futures: collections.deque[Future[Any]] = collections.deque()
        self.end: Exception | None = None
        """Exception after which no item is taken: that of the source, `StopIteration` included."""

    @property
    def goes_on(self) -> bool:
        """Whether an item may be taken, or a result is still to come.

        Raises:
            Exception: the exception of the source, after the last result.
        """
        if self._futures or self.end is None:
            return True
        if isinstance(self.end, StopIteration | StopAsyncIteration):
            return False
        raise self.end

    @property
    def is_due(self) -> bool:
        """Whether to yield the next result before another item is taken."""
        futures = self._futures
        full = self.end is not None or len(futures) >= self._limit
        return len(futures) > 0 and (full or futures[0].done())

    def add(self, item: T) -> None:
        """Submit `item`.

        Raises:
            BatcherClosed: the batcher was shut down.
        """
        try:
            future = self._submit(item)
        except BatcherClosed:
            raise
        except Exception as error:  # becomes the result of this item
            future = Future()
            future.set_exception(error)
        self._futures.append(future)

    async def arrives(self) -> None:
        """Wait on the running event loop for the next result.

        Raises:
            TimeoutError: the result is late.
        """
        future, left = self._futures[0], self._left()
        if not future.done():
            waker = future.new_waker(current_loop())
            future.check_wait(left)
            if not await wait(waker, left):
                raise TimeoutError(_LATE)

    def result(self) -> Any:
        """Return or raise the next result, once it is there.

        Raises:
            TimeoutError: the result is late.
        """
        try:
            error = self._futures[0].exception(self._left())
        except concurrent.futures.CancelledError:
            error = BatcherClosed("map: the batcher was shut down before this item ran")
        except TimeoutError:
            raise TimeoutError(_LATE) from None
        try:
            if error is not None and not self._return_exceptions:
                raise error
            future = self._futures.popleft()
            return future.result() if error is None else error
        finally:
            error = None  # its traceback holds this frame

    def cancel(self) -> None:
        """Cancel all items that wait."""
        while self._futures:
            self._futures.pop().cancel()
        self.end = None  # its traceback holds the frame of `map`

    def _left(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.perf_counter(), 0.0)


def mapped(ahead: Ahead[T], items: Iterable[T]) -> Generator[Any, None, None]:
    """Yield the results for `items` in a thread."""
    source = iter(items)
    try:
        while ahead.goes_on:
            if ahead.end is None:
                try:
                    ahead.add(next(source))
                except Exception as error:
                    ahead.end = error
            if ahead.is_due:
                yield ahead.result()
    finally:
        ahead.cancel()


async def async_mapped(ahead: Ahead[T], items: Any) -> AsyncGenerator[Any, None]:
    """Yield the results for `items` in a coroutine."""
    awaits = isinstance(items, AsyncIterable)
    source: Any = aiter(items) if awaits else iter(items)
    try:
        while ahead.goes_on:
            if ahead.end is None:
                try:
                    ahead.add(await anext(source) if awaits else next(source))
                except Exception as error:
                    ahead.end = error
            if ahead.is_due:
                await ahead.arrives()
                yield ahead.result()
    finally:
        ahead.cancel()
