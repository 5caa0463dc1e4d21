"""Rows: calls that are computed together step by step, and that join and leave between steps."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, overload

from .._collate.items import owned
from .._core.checks import check_whole
from .._core.request import Batch, Request

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

    told: list[Any]
    """Streams with a reader that waits, and new pieces."""

    def take(self, live: list[AnyRow], most: int | None, /) -> list[Any]:
        """Return rows that may join the `live` rows now, at most `most` if a number is given."""
        ...

    def end(self, row: AnyRow, outcome: Any, /) -> None:
        """Answer the caller of a row with a result or an exception, and mark the row as ended."""

    def leave(self, row: AnyRow, /) -> None:
        """Note that a row leaves because its caller has gone."""

    def stepped(self, live: int, /) -> None:
        """Note a step of `live` rows, and wake the readers of streams."""


class Row(Generic[T, U, V]):
    """One item on its way through the steps of the function.

    A row that has ended, or was given up by its caller, stays in its place until `Rows.leave()`.
    """

    __slots__ = ("_source", "batch", "emitted", "ended", "item", "length", "position", "request")

    if not TYPE_CHECKING:  # pragma: no branch
        __class_getitem__ = classmethod(types.GenericAlias)

    item: T
    """The item of the caller."""

    def __init__(self, source: Source, batch: Batch | None, request: Request, position: int):
        items = request.items
        self.item = items[position] if request.listed else items
        self.batch = batch
        self.request = request
        self.position = position
        self.length = request.lengths[position] if request.lengths else 0
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
                self._source.told.append(pieces)

    def finish(self, result: U) -> None:
        """Answer the caller with `result` now. The caller gets a copy of an array.

        Raises:
            RuntimeError: the row has ended.
        """
        self._check("finish")
        self._source.end(self, result)

    def fail(self, error: BaseException) -> None:
        """Answer the caller with an exception now.

        Raises:
            RuntimeError: the row has ended.
            TypeError: `error` is no exception.
        """
        self._check("fail")
        if not isinstance(error, BaseException):
            raise TypeError(f"fail takes an exception, got {error!r:.60}")
        self._source.end(self, error)

    def _check(self, method: str) -> None:
        if self.ended:
            raise RuntimeError(f"{method} was called for a row that has ended; it has an outcome")


class Rows(Sequence[Row[T, U, V]]):
    """The live rows of one run of a function, in a stable order.

    The sequence changes in `join` and `leave` only. It is true as long as a row is live, or calls
    wait that may join.
    """

    if not TYPE_CHECKING:  # pragma: no branch
        __class_getitem__ = classmethod(types.GenericAlias)

    def __init__(self, source: Source) -> None:
        self._source: Source | None = source
        self._rows: list[Row[T, U, V]] = []
        self._taken: list[Row[T, U, V]] = []  # rows that join next
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
        if self._taken or not all(row.ended for row in self._rows):
            return True
        self._take(None)
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
        if not self._taken or (limit is not None and len(self._taken) < limit):
            self._take(None if limit is None else limit - len(self._taken))
        joined = self._taken[:limit]
        del self._taken[:limit]
        self.began = self.began or bool(joined)
        joined = [row for row in joined if not self._left(row)]
        self._rows += joined
        return joined

    def leave(self) -> list[int]:
        """Remove the rows that have ended or were given up. Call this after each step.

        Return their places before the removal, in ascending order.
        """
        if self._rows:
            self._find_source().stepped(len(self._rows))
        places = []
        for place, row in enumerate(self._rows):
            if row.ended or self._left(row):
                places.append(place)
        if places:
            self._rows = [row for row in self._rows if not row.ended]
        return places

    def close(self) -> tuple[list[Row[T, U, V]], list[Row[T, U, V]]]:
        """End the run. Return the rows without an outcome, and the rows that have not joined."""
        live = [row for row in self._rows if not row.ended and not self._left(row)]
        taken = self._taken
        self._rows, self._taken, self._source = [], [], None
        return live, taken

    def _left(self, row: Row[T, U, V]) -> bool:
        """Let a row leave if its caller has gone. Return whether it has left."""
        if row.given_up:
            self._find_source().leave(row)
            row.ended = True
        return row.ended

    def _take(self, most: int | None) -> None:
        self._taken += self._find_source().take([*self._rows, *self._taken], most)

    def _find_source(self) -> Source:
        if self._source is None:
            raise RuntimeError("these rows belong to a call of the function that has returned")
        return self._source
