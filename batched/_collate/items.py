"""Plain objects: a batch is a list of items, and the output is one entry per item."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from .._core.scheduler import Batch, Request, Slice
from ..errors import BatchFunctionError, BatchSizeMismatch
from .collator import Call
from .fields import loaded


class Items:
    """Collates calls of plain objects."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the batch function, for error messages

    def collate(self, slices: list[Slice], batch: Batch) -> Call:
        """The call with the items of all slices in order, in a list that belongs to the batch
        function.
        """
        leader, start, stop = slices[0]
        if leader.listed and len(slices) == 1:
            items: list[Any] = leader.items[start:stop]
        else:
            items = []
            for request, start, stop in slices:
                if request.listed:
                    items += request.items[start:stop]
                else:
                    items.append(request.items)
        if leader.lengths is not None:
            _count(slices, len(items), batch)
        # the `Arguments` that the request was made with
        args, kwargs = leader.group_key.fresh()  # type: ignore[attr-defined]
        return (items, *args), kwargs, None

    def split(self, output: Any, slices: list[Slice], _: None) -> Sequence[Any]:
        """One part per slice: its results in order or the first exception among them; for one item
        that is no list, its result.

        Raises:
            BatchSizeMismatch: there is not one result per item.
            BatchFunctionError: `output` is not a list, tuple, array or tensor.
        """
        # the function may keep its own
        rows = output.copy() if type(output) is list else self._listed(output)
        if len(rows) == len(slices):
            for each, row in zip(slices, rows, strict=True):
                if each[0].listed or type(row) not in _PLAIN:
                    break
            else:
                return rows
        request, start, stop = slices[0]
        alone = len(slices) == 1
        size = stop - start if alone else sum([stop - start for _, start, stop in slices])
        if len(rows) != size:
            raise BatchSizeMismatch.between(self._name, size, len(rows))
        kind = type(rows[0])
        # where they are, twice as fast as a set of the types
        alike = list(map(type, rows)).count(kind) == size
        kinds = {kind} if alike else set(map(type, rows))
        plain = kind in _PLAIN if alike else kinds <= _PLAIN
        # what lies beside a row is none of its caller's business
        if not plain and not (alone and size == request.size):
            rows = _owned(rows)
        if len(slices) == size and not [True for request, _, _ in slices if request.listed]:
            return rows
        if alone:
            parts: list[Any] = [rows]
            if plain and size < request.size:
                return parts
        else:
            ends = list(accumulate([stop - start for _, start, stop in slices]))
            parts = [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if not plain and any(issubclass(kind, BaseException) for kind in kinds):
            parts = [_with_errors(part, each) for part, each in zip(parts, slices, strict=True)]
        return [_as_called(part, each) for part, each in zip(parts, slices, strict=True)]

    def joined(self, request: Request, parts: list[list[Any]]) -> list[Any]:
        """What the caller of a list gets."""
        results: list[Any] = []
        for part in parts:
            results += part
        return results if request.order is None else _reordered(results, request.order)

    def _listed(self, output: Any) -> list[Any]:
        if isinstance(output, (str, bytes, bytearray, memoryview, Mapping)) or not (
            isinstance(output, Sequence) or hasattr(output, "__dlpack__")
        ):
            raise BatchFunctionError(
                f"{self._name} returned {type(output).__name__}; it must return a list, tuple, "
                "array or tensor with one entry per item"
            )
        if getattr(output, "ndim", 1) == 0:
            raise BatchFunctionError(
                f"{self._name} returned a single value; it must return one per item"
            )
        return list(output)


def _with_errors(part: list[Any], of: Slice) -> list[Any] | BaseException:
    """`part` or, if there are exceptions in it, the one whose item stands first in the call."""
    request, start, _ = of
    failed = [
        position for position, row in enumerate(part, start) if issubclass(type(row), BaseException)
    ]
    if not failed:
        return part
    first = failed[0] if request.order is None else min(failed, key=request.order.__getitem__)
    error: BaseException = part[first - start]
    return error


def _as_called(part: list[Any] | BaseException, of: Slice) -> Any:
    """`part` as its caller wants it, if it is all of the call."""
    request, start, stop = of
    if isinstance(part, BaseException) or stop - start < request.size:
        return part
    if not request.listed:
        return part[0]
    return part if request.order is None else _reordered(part, request.order)


def _reordered(results: list[Any], order: list[int]) -> list[Any]:
    """`results` of items that were sorted, each where its item stood in the call."""
    places = results.copy()
    for place, result in zip(order, results, strict=True):
        places[place] = result
    return places


def _count(slices: list[Slice], size: int, batch: Batch) -> None:
    """Adds to `batch` how much the function will see if it pads its items, and how much of that is
    padding.
    """
    lengths = [
        request.lengths[start:stop]
        for request, start, stop in slices
        if request.lengths is not None
    ]
    cells = size * max(map(max, lengths))
    batch.cells += cells
    batch.padding += cells - sum(map(sum, lengths))


_PLAIN = {bool, bytes, dict, float, int, list, str, tuple, type(None)}
"""Types of results that are neither exceptions nor views of arrays."""


def _owned(rows: list[Any]) -> list[Any]:
    """`rows` with every array or tensor that shares its memory with more than itself replaced by a
    copy.
    """
    # the latter are records of structured arrays
    arrays = (*loaded("numpy", "ndarray"), *loaded("numpy", "void"))
    tensors = loaded("torch", "Tensor")
    owned: list[Any] = []
    memories: set[int] = set()
    for row in rows:
        if issubclass(type(row), arrays):  # its `__class__` may be code of the user's
            own = row.base is None and id(row) not in memories
            memories.add(id(row))
            owned.append(row if own else row.copy())
        elif issubclass(type(row), tensors):
            memory = (
                row.untyped_storage()
                if row.layout is getattr(sys.modules["torch"], "strided", None)
                else None
            )
            own = (
                memory is not None
                and memory.nbytes() == row.nbytes
                and memory.data_ptr() not in memories
            )
            if memory is not None:
                memories.add(memory.data_ptr())
            owned.append(row if own else row.clone())
        else:
            owned.append(row)
    return owned
