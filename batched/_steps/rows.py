"""Rows: calls that are computed together step by step, and that join and leave between steps."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, overload

from .._collate.items import owned
from .._core.capacity import Capacity, Room
from .._core.checks import check_whole
from .._core.request import Batch

T = TypeVar("T")
U = TypeVar("U")

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    V = TypeVarWithDefault("V", default=U)
else:
    V = TypeVar("V")


AnyRow: TypeAlias = "Row[Any, Any, Any]"


class Source(Protocol):
    """Provider of the rows of one run, and receiver of their outcomes."""

    capacity: Capacity
    """Rows that may be live at once."""
    again: deque[AnyRow]
    """Rows that were taken and do not run now: the next rows to join."""
    readers: list[Any]
    """Streams with new pieces for readers that wait."""

    def join(self, room: Room, /) -> list[AnyRow]:
        """Return rows that join now: as many as wait and find room."""
        ...

    def end(self, row: AnyRow, outcome: Any, /) -> None:
        """Answer the caller of a row, if it waits, with a result or an exception."""

    def stepped(self, live: int, /) -> None:
        """Note a step of `live` rows, and wake the readers of streams."""

    def fail(self, rows: list[AnyRow], error: BaseException | None, /) -> None:
        """Note the end of a call of the function: `rows` have no outcome because of `error`."""

    def too_big(self, rows: int, /) -> None:
        """Note that `rows` rows ran out of memory."""


class Row(Generic[T, U, V]):
    """One item on its way through the steps of the function.

    A row that has ended, or was given up by its caller, stays in its place until `Rows.leave()`.
    """

    __slots__ = ("_source", "batch", "emitted", "ended", "item", "length", "request")

    if not TYPE_CHECKING:  # pragma: no branch
        __class_getitem__ = classmethod(types.GenericAlias)

    item: T
    """The item of the caller."""

    def __init__(self, source: Source, batch: Batch) -> None:
        self.batch = batch  # of this item alone
        self.request, position, _ = batch.slices[0]
        items, lengths = self.request.items, self.request.lengths
        self.item = items[position] if self.request.listed else items
        self.length = lengths[position] if lengths else 0
        self.ended = self.emitted = False
        self._source = source

    @property
    def given_up(self) -> bool:
        """Whether no caller waits for the row any more."""
        return self.request.waker is None and not self.ended

    @property
    def has_reader(self) -> bool:
        """Whether the call is a stream: its reader gets the pieces that the row emits."""
        return self.request.pieces is not None

    @property
    def behind(self) -> bool:
        """Whether the reader of the row's stream is `max_pieces` pieces behind."""
        pieces = self.request.pieces
        return pieces is not None and pieces.is_full

    def emit(self, piece: V) -> None:
        """Pass a piece on to the reader of the row's stream, if the call is a stream.

        The method never blocks. While the reader is `behind`, further pieces of text are joined to
        the last one, and pieces of other types are kept. The reader gets a copy of an array.

        Raises:
            RuntimeError: the row has ended.
        """
        self._check("emit")
        pieces = self.request.pieces
        if pieces is not None and self.request.waker is not None:
            self.emitted = True
            if pieces.put(owned(piece)):
                self._source.readers.append(pieces)

    def finish(self, result: U) -> None:
        """Answer the caller with `result` now. The caller gets a copy of an array.

        Raises:
            RuntimeError: the row has ended.
        """
        self._check("finish")
        self._end(owned(result))  # if the copy fails, the row is still live

    def fail(self, error: BaseException) -> None:
        """Answer the caller with an exception now.

        Raises:
            RuntimeError: the row has ended.
            TypeError: `error` is no exception.
        """
        self._check("fail")
        if not isinstance(error, BaseException):
            raise TypeError(f"fail takes an exception, got {error!r:.60}")
        self._end(error)

    def _check(self, method: str) -> None:
        if self.ended:
            raise RuntimeError(f"{method} was called for a row that has ended; it has an outcome")

    def _end(self, outcome: Any) -> None:
        self.ended = True
        self._source.end(self, outcome)

    def _gives_up(self) -> bool:
        """Leave if the caller has gone. Return whether the row has ended."""
        if self.given_up:
            self._end(None)
        return self.ended


class Rows(Sequence[Row[T, U, V]]):
    """The live rows of one run of a function, in a stable order.

    The sequence changes in `join` and `leave` only. It is true as long as a row is live, or calls
    wait that may join.
    """

    if not TYPE_CHECKING:  # pragma: no branch
        __class_getitem__ = classmethod(types.GenericAlias)

    def __init__(self, source: Source) -> None:
        self._source: Source | None = source  # None once the call of the function has ended
        self._rows: list[Row[T, U, V]] = []
        self._taken: list[Row[T, U, V]] = []  # the next rows to join
        self.longest = 0
        """Length of the longest live row."""
        self.began = False
        """Whether a row has joined."""

    @overload
    def __getitem__(self, index: int) -> Row[T, U, V]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row[T, U, V]]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __iter__(self) -> Iterator[Row[T, U, V]]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __bool__(self) -> bool:
        for row in self._rows:
            if not row.ended:
                return True
        self._take(1)
        return bool(self._taken)

    def join(self, limit: int | None = None) -> list[Row[T, U, V]]:
        """Append rows of calls that wait, as many as fit and at most `limit`, and return them.

        The rows of one run are calls with equal extra arguments. If the oldest call that waits has
        other arguments, no call joins any more, so that this call runs once all rows have left.

        Raises:
            ValueError: `limit` is below 1.
        """
        if limit is not None:
            check_whole("limit", limit)
        self._take(sys.maxsize if limit is None else limit)
        joined = self._taken[:limit]
        if joined:
            del self._taken[:limit]
            self.began = True
            joined = [row for row in joined if row.request.waker is not None or not row._gives_up()]
            self._rows += joined
            self.longest = max([self.longest, *[row.length for row in joined]])
        return joined

    def leave(self) -> list[int]:
        """Remove the rows that have ended or were given up. Call this after each step.

        Return their places before the removal, in ascending order.
        """
        rows = self._rows
        if not rows:
            return []
        source = self._open_source()
        source.stepped(len(rows))
        places = [
            place
            for place, row in enumerate(rows)
            if row.ended or (row.request.waker is None and row._gives_up())
        ]
        if places:
            source.capacity.fitted(len(rows), self.longest)
            self._rows = [row for row in rows if not row.ended]
            self.longest = max([row.length for row in self._rows], default=0)
        return places

    def close(self) -> list[Row[T, U, V]]:
        """End the call of the function, and return the rows without an outcome."""
        live = [row for row in self._rows if not row._gives_up()]
        self._open_source().again.extendleft(reversed(self._taken))
        self._rows, self._taken, self._source = [], [], None
        return live

    def _take(self, most: int) -> None:
        """Take the next rows to join, as many as fit, and at most `most`."""
        source, taken = self._open_source(), self._taken
        capacity, again = source.capacity, source.again
        most = min(most, capacity.batch_size - len(self._rows))
        if len(taken) >= most:
            return
        live = len(self._rows) + len(taken)
        longest = max([self.longest, *[row.length for row in taken]])
        room = Room(capacity, live, longest, most - len(taken))
        while again and room.admits(again[0].length):
            taken.append(again.popleft())
        if not again:
            taken += source.join(room)

    def _open_source(self) -> Source:
        if self._source is None:
            raise RuntimeError("these rows belong to a call of the function that has returned")
        return self._source
