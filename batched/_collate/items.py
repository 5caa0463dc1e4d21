"""Plain objects: a batch is a list of items, and the output is one entry per item."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from .._core.scheduler import Request, Slice
from ..errors import BatchFunctionError, BatchSizeMismatch


class Items:
    """Collates calls of plain objects."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the batch function, for error messages

    def collate(self, slices: list[Slice]) -> list[Any]:
        """The items of all slices in order, in a list that belongs to the batch function."""
        items: list[Any] = []
        for request, start, stop in slices:
            items += request.items[start:stop]
        return items

    def split(self, output: Any, slices: list[Slice]) -> Sequence[list[Any] | Exception]:
        """One part per slice: its results in order, or the first of them that is an exception.

        Raises:
            BatchSizeMismatch: there is not one result per item.
            BatchFunctionError: `output` is not a list, tuple, array or tensor.
        """
        rows = output if type(output) is list else self._listed(output)
        size = sum(stop - start for _, start, stop in slices)
        if len(rows) != size:
            raise BatchSizeMismatch.between(self._name, size, len(rows))
        kinds = {type(rows[0])}
        if list(map(type, rows)).count(type(rows[0])) != size:  # twice as fast as a set where all are alike
            kinds = set(map(type, rows))
        if len(slices) == 1:
            parts = [rows]
        else:
            rows = _owned(rows, kinds)  # a neighbour's row must not live as long as this one
            ends = list(accumulate(stop - start for _, start, stop in slices))
            parts = [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if any(issubclass(kind, Exception) for kind in kinds):
            return [next((row for row in part if isinstance(row, Exception)), part) for part in parts]
        return parts

    def result(self, request: Request, parts: list[list[Any]]) -> Any:
        """What the caller gets: a list for a list call, else the one result."""
        if not request.listed:
            return parts[0][0]
        results: list[Any] = []
        for part in parts:
            results += part
        return results

    def _listed(self, output: Any) -> list[Any]:
        if isinstance(output, (str, bytes, Mapping)) or not (isinstance(output, Sequence) or hasattr(output, "__dlpack__")):
            raise BatchFunctionError(
                f"{self._name} returned {type(output).__name__}; it must return a list, tuple, array or tensor with one entry per item"
            )
        if getattr(output, "ndim", 1) == 0:
            raise BatchFunctionError(f"{self._name} returned a single value; it must return one per item")
        return list(output)


def _owned(rows: list[Any], kinds: set[type]) -> list[Any]:
    """`rows` with every view of a larger array or tensor replaced by a copy."""
    array = getattr(sys.modules.get("numpy"), "ndarray", ())  # a function that returns arrays has loaded their library
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    if not any(issubclass(kind, array) or issubclass(kind, tensor) for kind in kinds):
        return rows
    owned: list[Any] = []
    for row in rows:
        if isinstance(row, array) and row.base is not None:
            owned.append(row.copy())
        elif isinstance(row, tensor) and row.untyped_storage().nbytes() > row.nbytes:
            owned.append(row.clone())
        else:
            owned.append(row)
    return owned
