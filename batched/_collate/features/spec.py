"""Specs of features: the properties that all calls of a group share, and the padding of blocks.

Tensors on the CPU are read and written through numpy, where a slice costs a third of the time,
unless numpy lacks their dtype (bfloat16).
"""

from __future__ import annotations

import copy
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Final

from ...errors import CollationError
from ..arrays import Array

WHOLE = "biu"
"""Kinds of dtypes of bools and integers, in the letters of numpy."""

TEXT = "US"
"""Kinds of dtypes of texts."""

_MASK: Final = re.compile("mask|length", re.IGNORECASE)
"""Names of features of any dtype that mark padding."""

CACHE_LIMIT: Final = 1024
"""Limit of specs of one kind. Images of many sizes have as many specs."""


class FeatureSpec(ABC):
    """Name, dtype, device and shape of the rows of a feature. Specs are equal if all of these are.

    The length of rows that are padded, axis 1 of the arrays, is no part of the spec. Nor is the
    length of texts.
    """

    __slots__ = (
        "_key",
        "_with_length",
        "device",
        "dtype",
        "is_fixed",
        "is_mask",
        "is_rounded",
        "is_sequence",
        "is_token",
        "kind",
        "name",
        "pad",
        "trailing",
    )

    def __init__(self, name: str, array: Array, pad: Any) -> None:
        """Make the spec of `array` [rows, length, ...], with shorter rows filled with `pad`, or 0.

        Raises:
            CollationError: no element of the array can be `pad`.
        """
        self.name = name
        self.dtype = array.dtype
        self.device = array.device if isinstance(self, TensorSpec) else None
        self.kind = self._kind()  # of the dtype, in the letters of numpy: b, i, u, f, c and more
        self.is_sequence = array.ndim > 1  # rows have a length
        # a row is a sequence of integers or bools: [rows, length]
        self.is_token = array.ndim == 2 and self.kind in WHOLE
        # the feature shows the function which tokens are padding
        self.is_mask = (self.is_sequence and self.kind == "b") or bool(_MASK.search(name))
        # rows are padded only with a feature of the same lengths: see `with_length`
        self.is_fixed = self.is_sequence and not self.is_token and pad is None
        # the length of rows is rounded up to a multiple even if nothing is padded
        self.is_rounded = self.is_token
        self.trailing = tuple(array.shape[2:])  # shape of rows after their length
        # texts of different size share a batch
        dtype = self.dtype.str[:2] if self.kind in TEXT else self.dtype
        self._key: tuple[Any, ...] = name, dtype, self.device, array.ndim, self.trailing
        self._with_length: dict[Any, FeatureSpec] = {}  # results of `with_length`
        self.pad = self._fit_pad(pad)  # element of the views

    def with_length(self, length: int | FeatureSpec) -> FeatureSpec:
        """Return the spec of rows of this length or, in every call, as long as that feature."""
        known: Any = length
        if isinstance(length, FeatureSpec):
            known = length.name, length.is_rounded
        found = self._with_length.get(known)
        if found is None:
            found = copy.copy(self)
            found._key, found._with_length = (*self._key, known), {}
            found.is_rounded = isinstance(length, FeatureSpec) and length.is_rounded
            if len(self._with_length) >= CACHE_LIMIT:
                self._with_length.clear()
            found = self._with_length.setdefault(known, found)
        return found

    def widest(self, specs: Iterable[FeatureSpec]) -> FeatureSpec:
        """Return the one of `specs`, equal to this one, with room for the elements of all."""
        return max(specs, key=lambda each: each.dtype.itemsize) if self.kind in TEXT else self

    @abstractmethod
    def _kind(self) -> str: ...

    @abstractmethod
    def _convert_pad(self, pad: Any) -> Any: ...

    @abstractmethod
    def allocate(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Return an uninitialized array of this shape, and the view through which it is written."""

    def view(self, array: Array) -> Array:
        """Return the view of `array` through which blocks of rows are read and written."""
        return array

    def concatenate(self, blocks: list[Array], out: Array) -> None:
        """Write views of blocks, each [rows of the block, width, ...], to the view `out`."""
        sys.modules["numpy"].concatenate(blocks, out=out)

    def shape(self, rows: int, width: int) -> tuple[int, ...]:
        """Return the shape of an array: [rows, width, ...], or [rows] if rows have no length."""
        return (rows, width, *self.trailing) if self.is_sequence else (rows,)

    def fill(self, out: Array, blocks: list[Array], width: int, *, left: bool) -> None:
        """Write views of blocks [rows of the block, length, ...] to the view `out`.

        Rows shorter than `width` are padded, on the `left` or on the right.
        """
        if not self.is_sequence or all(block.shape[1] == width for block in blocks):
            self.concatenate(blocks, out)
            return
        out[...] = self.pad
        start = 0
        for block in blocks:
            stop = start + len(block)
            own = block.shape[1]
            if left:
                out[start:stop, width - own :] = block
            else:
                out[start:stop, :own] = block
            start = stop

    def _fit_pad(self, pad: Any) -> Any:
        """Return `pad`, or 0, as an element of the views."""
        if pad is None:
            return self._convert_pad(None)
        try:
            element = self._convert_pad(pad)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            fits = element = False
        else:
            fits = (
                element == pad
                if self.kind in WHOLE
                else self.kind != "f" or math.isinf(pad) or not math.isinf(element)
            )
        if not fits:
            raise CollationError(
                f"{self.name} is of {self.dtype} and cannot be padded with {pad!r}"
            )
        return element

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, FeatureSpec) and self._key == other._key)


class NumpySpec(FeatureSpec):
    """Spec of arrays of numpy."""

    __slots__ = ()

    def _kind(self) -> str:
        kind: str = self.dtype.kind
        return kind

    def _convert_pad(self, pad: Any) -> Any:
        numpy = sys.modules["numpy"]
        if pad is None:
            return numpy.zeros((), self.dtype)[()]  # of texts, the empty text
        with numpy.errstate(over="ignore"):
            return numpy.asarray(pad, self.dtype)[()]

    def allocate(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        array = sys.modules["numpy"].empty(shape, self.dtype)
        return array, array


class TensorSpec(FeatureSpec):
    """Spec of tensors."""

    __slots__ = ()

    def _kind(self) -> str:
        if self.dtype is sys.modules["torch"].bool:
            return "b"
        return "f" if self.dtype.is_floating_point else "c" if self.dtype.is_complex else "i"

    def _convert_pad(self, pad: Any) -> Any:
        return sys.modules["torch"].tensor(pad or 0, dtype=self.dtype, device="cpu").item()

    def allocate(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        array = sys.modules["torch"].empty(shape, dtype=self.dtype, device=self.device)
        return array, self.view(array)

    def concatenate(self, blocks: list[Array], out: Array) -> None:
        sys.modules["torch"].cat(blocks, out=out)


class CpuTensorSpec(TensorSpec):
    """Spec of tensors on the CPU with a dtype of numpy. Their views are arrays of numpy."""

    __slots__ = ()
    concatenate = FeatureSpec.concatenate

    def view(self, array: Array) -> Array:
        return array.numpy()
