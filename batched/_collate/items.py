"""Collator of plain objects: a batch is a list of items, and the output has one entry per item."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from types import CoroutineType
from typing import Any, Final

from .._core.scheduler import Batch, Request, Slice
from ..errors import BatchFunctionError, BatchSizeMismatch
from .arrays import copy_array, find_imported, is_array, synchronize
from .collator import Call, Collator, refuse_unawaited

IMMUTABLE: Final = {bool, bytes, complex, float, int, str, type(None)}
"""Types of results that callers may share."""
PLAIN: Final = {dict, list, tuple, *IMMUTABLE}
"""Types of results that are neither exceptions nor arrays."""


@dataclass(eq=False)
class ItemCollator(Collator):
    """Collator of calls of plain objects."""

    name: str
    """Name of the batch function, for messages."""
    unpack: bool = False
    """Whether the function takes a list for each part of its items."""

    def collate(self, slices: list[Slice], batch: Batch) -> Call:
        """Return the call with the items of all slices in order.

        The list belongs to the batch function, which may change it. The context is None or, if
        items have keys, the place of the item that was computed for each item of the slices.
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
            lengths = [request.lengths[a:b] for request, a, b in slices]  # type: ignore[index]  # as the leader
            cells = len(items) * max(lengths)[0]  # the longest first
            batch.cells += cells
            batch.padding += cells - sum(map(sum, lengths))
        places = None
        if leader.keys is not None:
            keys = [request.keys[a:b] for request, a, b in slices]  # type: ignore[index]  # too
            items, places = distinct(items, list(chain.from_iterable(keys)))
        batch.computed = len(items)
        group: Any = leader.group_key  # its `Arguments`
        args, kwargs = group.given if group.is_plain else group.unpack()
        if self.unpack:
            return (*map(list, zip(*items, strict=True)), *args), kwargs, places
        return (items, *args), kwargs, places

    def split(self, output: Any, slices: list[Slice], places: list[int] | None) -> Sequence[Any]:
        """Return one part per slice.

        The part of a call of one item is its result. The part of a list call is the list of its
        results, or the first exception among them, unless its items are `separate`.

        Raises:
            BatchSizeMismatch: `output` does not have one result per item.
            BatchFunctionError: `output` is not a list, tuple, array or tensor.
        """
        # a copy: the function may keep its own list
        rows = output.copy() if type(output) is list else self._to_list(output)
        if places is not None:
            self._check_size(rows, max(places) + 1)
            output = rows = self._repeat(rows, places)
        plain = PLAIN.issuperset(map(type, rows))
        request, start, stop = slices[0]
        alone = len(slices) == 1
        listed = request.listed if alone else True in [each[0].listed for each in slices]
        if plain and not listed and len(rows) == len(slices):
            return rows
        self._check_size(rows, stop - start if alone else sum([b - a for _, a, b in slices]))
        if alone and plain and request.places is None:
            return [rows]
        if not plain:
            if CoroutineType in map(type, rows):
                raise BatchFunctionError(
                    f"{self.name} returned coroutines; return await asyncio.gather(*coroutines)"
                )
            rows = _own_memory(output, rows, alone=alone)
        parts: list[Any] = []
        end = 0
        for request, start, stop in slices:
            first, end = end, end + stop - start
            part = rows[first:end] if request.listed else rows[first]
            if request.listed and not (request.separate or (plain and request.places is None)):
                part = self._settle(request, start, part)
            parts.append(part)
        return parts

    def join(self, request: Request, parts: list[list[Any]]) -> list[Any]:
        """Return the results of a list call, in the order of its items."""
        results: Any = list(chain.from_iterable(parts))
        if request.places is not None:
            results = self._settle(request, 0, results)
            if type(results) is not list:
                raise results
        return results  # type: ignore[no-any-return]

    def _settle(self, request: Request, start: int, part: list[Any]) -> Any:
        """Return the outcome of a list call from position `start` on.

        It is the first exception among the results, in the order of the call, or the list of them.
        The results of a whole call are in that order, too.
        """
        order: Sequence[int] = request.order or range(request.size)
        if request.places is not None and len(part) == request.size:
            part = self._repeat(part, request.places)
            order = range(len(part))
        if PLAIN.issuperset(map(type, part)):
            return part
        errors = {
            order[position]: row
            for position, row in enumerate(part, start)
            if issubclass(type(row), BaseException)  # `__class__` may be user code
        }
        return errors[min(errors)] if errors else part

    def _check_size(self, rows: list[Any], size: int) -> None:
        if len(rows) != size:
            raise BatchSizeMismatch.between(self.name, size, len(rows))

    def _repeat(self, rows: list[Any], places: list[int]) -> list[Any]:
        """Return the row at each of `places`. A row that is there again is a copy."""
        repeated: list[Any] = []
        used: set[int] = set()
        for place in places:
            row = rows[place]
            if place in used and type(row) not in IMMUTABLE:
                row = self._copy(row)
            used.add(place)
            repeated.append(row)
        return repeated

    def _copy(self, row: Any) -> Any:
        """Return a copy of a result that `dedupe` gives to several callers, or an error."""
        if issubclass(type(row), BaseException):  # callers get copies anyway
            return row
        try:
            return copy_array(row) if is_array(row) else deepcopy(row)
        except Exception as error:
            return BatchFunctionError(
                f"{self.name}: with dedupe, callers of equal items get copies of one result, and "
                f"copy.deepcopy of this {type(row).__name__} raised {error!r}"
            )

    def _to_list(self, output: Any) -> list[Any]:
        if isinstance(output, (str, bytes, bytearray, memoryview)) or not (
            isinstance(output, Sequence) or hasattr(output, "__dlpack__")
        ):
            refuse_unawaited(f"{self.name} returned", output)
            raise BatchFunctionError(
                f"{self.name} returned {type(output).__name__}; it gets a list of items, and must "
                "return a list, tuple, array or tensor with one entry per item"
            )
        if isinstance(output, tuple):
            self._refuse_several(output)
        if getattr(output, "ndim", 1) == 0:
            raise BatchFunctionError(
                f"{self.name} returned a single value; it must return one per item (of one row, "
                "squeeze() makes a single value)"
            )
        return list(output)

    def _refuse_several(self, output: tuple[Any, ...]) -> None:
        """Raise `BatchFunctionError` if `output` is a tuple of several outputs, not of results."""
        columns = (list, *find_imported("numpy", "ndarray"), *find_imported("torch", "Tensor"))
        several = any(
            getattr(each, "ndim", 1) for each in output if issubclass(type(each), columns)
        )
        if hasattr(output, "_make") or hasattr(output, "n_fields") or several:
            raise BatchFunctionError(
                f"{self.name} returned a {type(output).__name__} of several outputs, not one "
                "entry per item; return list(zip(*output)), or list(output) if it has one entry "
                "per item"
            )


def distinct(items: list[Any], keys: list[Any]) -> tuple[list[Any], list[int]]:
    """Return the first item of each key, and for each item its place among them."""
    first: dict[Hashable, Any] = {}
    for item, key in zip(items, keys, strict=True):
        first.setdefault(key, item)
    numbers = dict(zip(first, range(len(first)), strict=True))
    return list(first.values()), [numbers[key] for key in keys]


def owned(value: Any) -> Any:
    """Return a result, an array or a tensor as a copy, because its memory may be used again."""
    return value if type(value) in PLAIN else _own_memory(None, [value], alone=False)[0]


def _own_memory(output: Any, rows: list[Any], *, alone: bool) -> list[Any]:
    """Return `rows` of `output` with arrays and tensors copied.

    The function may reuse their memory. For a caller that is `alone`, an array of rows is copied as
    a whole.
    """
    if alone and is_array(output) and not getattr(output.dtype, "hasobject", False):
        rows = [output]
    tensors = find_imported("torch", "Tensor")
    # numpy.void: records of structured arrays
    kinds = (*find_imported("numpy", "ndarray"), *find_imported("numpy", "void"), *tensors)
    # not `isinstance`: `__class__` of an object may be user code
    owned = [copy_array(each) if issubclass(type(each), kinds) else each for each in rows]
    if copied := [each for each in owned if issubclass(type(each), tensors)]:
        synchronize(copied)  # the caller may read them on another stream
    return list(owned[0]) if rows[0] is output else owned
