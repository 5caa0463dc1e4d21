"""Collator of plain objects: a batch is a list of items, and the output has one entry per item."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, Final

from .._core.scheduler import Batch, Request, Slice
from ..errors import BatchFunctionError, BatchSizeMismatch
from .arrays import copy_array, find_imported, is_array, synchronize
from .collator import UNAWAITED, Call, Collator, is_unawaited

IMMUTABLE: Final = {bool, bytes, complex, float, int, str, type(None)}
"""Types of results that callers may share."""
PLAIN: Final = {dict, list, tuple, *IMMUTABLE}
"""Types of results that are neither exceptions nor arrays."""


class ItemCollator(Collator):
    """Collator of calls of plain objects."""

    def __init__(self, name: str, *, unpack: bool = False) -> None:
        self._name = name  # name of the batch function, for error messages
        self._unpack = unpack  # whether the function takes a list for each part of its items

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
            _count_padding(slices, len(items), batch)
        places = None
        if leader.keys is not None:
            keys = chain.from_iterable([request.keys[a:b] for request, a, b in slices])  # type: ignore[index]  # as the leader
            items, places = distinct(items, keys)
        batch.computed = len(items)
        group: Any = leader.group_key  # its `Arguments`
        args, kwargs = (group.args, group.kwargs) if group.is_plain else group.unpack()
        if self._unpack:
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
            if error is None and request.places is not None and stop - start == request.size:
                try:
                    part = self._restore(part, request.places)
                except BatchFunctionError as without_copy:
                    error = without_copy
            parts.append(part if error is None else error)
        return parts

    def join(self, request: Request, parts: list[list[Any]]) -> list[Any]:
        """Return the results of a list call, in the order of its items."""
        results = list(chain.from_iterable(parts))
        return results if request.places is None else self._restore(results, request.places)

    def _restore(self, results: list[Any], places: list[int]) -> list[Any]:
        """Return the results of a list call, by the place of each in `results`.

        Raises:
            BatchFunctionError: a result cannot be copied.
        """
        restored = self._repeat(results, places)
        for result in restored:
            if type(result) is BatchFunctionError:
                raise result
        return restored

    def _check_size(self, rows: list[Any], size: int) -> None:
        if len(rows) != size:
            raise BatchSizeMismatch.between(self._name, size, len(rows))

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
                f"{self._name}: with dedupe, callers of equal items get copies of one result, and "
                f"copy.deepcopy of this {type(row).__name__} raised {error!r}"
            )

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
        columns = (list, *find_imported("numpy", "ndarray"), *find_imported("torch", "Tensor"))
        kinds = {kind for kind in set(map(type, output)) if issubclass(kind, columns)}
        several = any(getattr(each, "ndim", 1) for each in output if type(each) in kinds)
        if hasattr(output, "_make") or hasattr(output, "n_fields") or several:
            raise BatchFunctionError(
                f"{self._name} returned a {type(output).__name__} of several outputs, not one "
                "entry per item; return list(zip(*output)), or list(output) if it has one entry "
                "per item"
            )


def distinct(items: list[Any], keys: Any) -> tuple[list[Any], list[int]]:
    """Return the first item of each key, and for each item its place among them."""
    found: dict[Hashable, int] = {}
    places = [found.setdefault(key, len(found)) for key in keys]
    first = dict(zip(reversed(places), reversed(items), strict=True))
    return [first[place] for place in range(len(found))], places


def owned(value: Any) -> Any:
    """Return a result, an array or a tensor as a copy, because its memory may be used again."""
    return value if type(value) in PLAIN else _own_memory(value, [value], alone=False)[0]


def _first_error(request: Request, start: int, part: list[Any]) -> BaseException | None:
    """Return the exception in `part` for the item that comes first in the call; None if none.

    `part` begins at position `start` of `request`.
    """
    order = range(request.size) if request.order is None else request.order
    errors = {
        order[position]: row
        for position, row in enumerate(part, start)
        if issubclass(type(row), BaseException)  # `__class__` may be user code
    }
    return errors[min(errors)] if errors else None


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
