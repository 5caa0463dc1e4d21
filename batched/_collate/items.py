"""Collator of plain objects: a batch is a list of items, and the output has one entry per item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from .._core.scheduler import Batch, Request, Slice
from ..errors import BatchFunctionError, BatchSizeMismatch
from .arrays import copy_array, find_imported, is_array, synchronize
from .collator import UNAWAITED, Call, Collator, is_unawaited

PLAIN = {bool, bytes, dict, float, int, list, str, tuple, type(None)}
"""Types of results that are neither exceptions nor arrays."""


class ItemCollator(Collator):
    """Collator of calls of plain objects."""

    def __init__(self, name: str) -> None:
        self._name = name  # name of the batch function, for error messages

    def collate(self, slices: list[Slice], batch: Batch) -> Call:
        """Return the call with the items of all slices in order.

        The list belongs to the batch function, which may change it.
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
            _count_padding(slices, len(items), batch)
        group: Any = leader.group_key  # its `Arguments`
        args, kwargs = group.values if group.is_plain else group.unpack()
        return (items, *args), kwargs, None

    def split(self, output: Any, slices: list[Slice], _: None) -> Sequence[Any]:
        """Return one part per slice.

        The part of a call of one item is its result. The part of a list call is the list of its
        results, or the first exception among them, unless its items are `separate`.

        Raises:
            BatchSizeMismatch: `output` does not have one result per item.
            BatchFunctionError: `output` is not a list, tuple, array or tensor.
        """
        # a copy: the function may keep its own list
        rows = output.copy() if type(output) is list else self._to_list(output)
        plain = PLAIN.issuperset(map(type, rows))
        request, start, stop = slices[0]
        alone = len(slices) == 1
        listed = request.listed if alone else True in [each[0].listed for each in slices]
        if plain and not listed and len(rows) == len(slices):
            return rows
        size = stop - start if alone else sum([stop - start for _, start, stop in slices])
        if len(rows) != size:
            raise BatchSizeMismatch.between(self._name, size, len(rows))
        if alone and plain and request.order is None:
            return [rows]
        if not plain:
            rows = _own_memory(output, rows, alone=alone)
        parts: list[Any] = []
        end = 0
        for request, start, stop in slices:
            first, end = end, end + stop - start
            if not request.listed:
                parts.append(rows[first])
                continue
            part = rows[first:end]
            error = None if plain or request.separate else _first_error(request, start, part)
            if error is None and request.order is not None and stop - start == request.size:
                part = _restore_order(part, request.order)
            parts.append(part if error is None else error)
        return parts

    def join(self, request: Request, parts: list[list[Any]]) -> list[Any]:
        """Return the results of a list call, in the order of its items."""
        results = list(chain.from_iterable(parts))
        return results if request.order is None else _restore_order(results, request.order)

    def _to_list(self, output: Any) -> list[Any]:
        if isinstance(output, (str, bytes, bytearray, memoryview, Mapping)) or not (
            isinstance(output, Sequence) or hasattr(output, "__dlpack__")
        ):
            if is_unawaited(output):
                raise BatchFunctionError(f"{self._name} returned {UNAWAITED}")
            raise BatchFunctionError(
                f"{self._name} returned {type(output).__name__}; it must return a list, tuple, "
                "array or tensor with one entry per item"
            )
        if isinstance(output, tuple):
            self._refuse_several(output)
        if getattr(output, "ndim", 1) == 0:
            raise BatchFunctionError(
                f"{self._name} returned a single value; it must return one per item"
            )
        return list(output)

    def _refuse_several(self, output: tuple[Any, ...]) -> None:
        """Raise `BatchFunctionError` if `output` is a tuple of several outputs, not of results."""
        kind = type(output)
        if hasattr(kind, "_make") or hasattr(kind, "n_fields"):
            fields = ", ".join(getattr(kind, "__match_args__", ()))
            raise BatchFunctionError(
                f"{self._name} returned {kind.__name__}, a named tuple of {len(output)} fields "
                f"({fields}), not one entry per item; return list(zip(*output)), or the field that "
                "is the result"
            )
        columns = (list, *find_imported("numpy", "ndarray"), *find_imported("torch", "Tensor"))
        kinds = {kind for kind in set(map(type, output)) if issubclass(kind, columns)}
        if kinds and any(getattr(each, "ndim", 1) for each in output if type(each) in kinds):
            raise BatchFunctionError(
                f"{self._name} returned a tuple of lists, arrays or tensors, which is several "
                "outputs, not one entry per item; return list(zip(*output)), or list(output) if it "
                "has one entry per item"
            )


def owned(value: Any) -> Any:
    """Return a result, an array or a tensor as a copy, because its memory may be used again."""
    return value if type(value) in PLAIN else _own_memory(value, [value], alone=False)[0]


def _first_error(request: Request, start: int, part: list[Any]) -> BaseException | None:
    """Return the exception in `part` for the item that comes first in the call; None if none.

    `part` begins at position `start` of `request`.
    """
    places = range(request.size) if request.order is None else request.order
    errors = {
        places[position]: row
        for position, row in enumerate(part, start)
        if issubclass(type(row), BaseException)  # `__class__` may be user code
    }
    return errors[min(errors)] if errors else None


def _restore_order(results: list[Any], order: list[int]) -> list[Any]:
    """Return `results` of sorted items in the order of the call: `order` has their places."""
    places = results.copy()
    for place, result in zip(order, results, strict=True):
        places[place] = result
    return places


def _count_padding(slices: list[Slice], size: int, batch: Batch) -> None:
    """Add the cells of `slices` (items times longest length) and their padding to `batch`."""
    longest = total = 0
    for request, start, stop in slices:
        assert request.lengths is not None
        lengths = request.lengths[start:stop]  # longest first
        total += sum(lengths)
        longest = max(longest, lengths[0])
    batch.cells += size * longest
    batch.padding += size * longest - total


def _own_memory(output: Any, rows: list[Any], *, alone: bool) -> list[Any]:
    """Return `rows` of `output` with arrays and tensors copied.

    The function may reuse their memory. For a caller that is `alone`, an array of rows is copied as
    a whole.
    """
    whole = alone and is_array(output) and not getattr(output.dtype, "hasobject", False)
    tensors = find_imported("torch", "Tensor")
    # numpy.void: records of structured arrays
    kinds = (*find_imported("numpy", "ndarray"), *find_imported("numpy", "void"), *tensors)
    owned = [
        # not `isinstance`: `__class__` of an object may be user code
        copy_array(each) if issubclass(type(each), kinds) else each
        for each in ([output] if whole else rows)
    ]
    if copied := [each for each in owned if issubclass(type(each), tensors)]:
        synchronize(copied)  # the caller may read them on another stream
    return list(owned[0]) if whole else owned
