"""Specs of features: the properties that all calls of a group share, and the padding of blocks.

Tensors on the CPU are read and written through numpy, where a slice costs a third of the time,
unless numpy lacks their dtype (bfloat16).
"""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, Final, TypeVar

from ..arguments import Arguments
from ..arrays import Array

Widths = tuple[int, ...]
"""Length of the rows of each feature of a call, in the order of its specs; 1 without a length."""

IMAGE_AXES: Final = 2
"""Least number of axes after the length of a row for which rows are treated as images.

The axes are channels, height and width, in any order. They match the length of tokens only by
accident.
"""

WHOLE: Final = "biu"
"""Kinds of dtypes of bools and integers, in the letters of numpy."""

TEXT: Final = "US"
"""Kinds of dtypes of texts."""

_MASK: Final = re.compile("mask|length", re.IGNORECASE)
"""Names of features of any dtype that mark padding."""

CACHE_LIMIT: Final = 256
"""Most entries of a cache. Images of many sizes have as many specs."""


Value = TypeVar("Value")


class FeatureSpec:
    """Name, dtype, device and shape of the rows of a feature. Specs are equal if all of these are.

    The length of rows that are padded, axis 1 of the arrays, is no part of the spec. Nor is the
    length of texts. This class is the spec of arrays of numpy.
    """

    library = "numpy"  # module that joins blocks

    def __init__(self, name: str, array: Array, pad: Any) -> None:
        """Make the spec of `array` [rows, length, ...], with shorter rows filled with `pad`, or 0.

        Raises:
            ValueError: no element of the array can be `pad`.
        """
        self.name = name
        self.dtype = array.dtype
        self.device = array.device if self.library == "torch" else None
        self.kind = _find_kind(
            array.dtype
        )  # of the dtype, in the letters of numpy: b, i, u, f, c and more
        self.is_sequence = array.ndim > 1  # rows have a length
        # a row is a sequence of integers or bools: [rows, length]
        self.is_token = array.ndim == 2 and self.kind in WHOLE
        # the feature shows the function which tokens are padding
        self.is_mask = bool(_MASK.search(name)) or (self.is_sequence and self.kind == "b")
        # rows are padded only with a feature of the same lengths: see `with_length`
        self.is_fixed = self.is_sequence and not self.is_token and pad is None
        # the length of rows is rounded up to a multiple even if nothing is padded
        self.is_rounded = self.is_token
        self.trailing = tuple(array.shape[2:])  # shape of rows after their length
        # texts of different size share a batch
        dtype = self.dtype.str[:2] if self.kind in TEXT else self.dtype
        self._key: tuple[Any, ...] = type(self), name, dtype, self.device, array.ndim, self.trailing
        self.pad = self._fit_pad(pad)  # element of the views

    def with_length(self, width: int, other: FeatureSpec | None) -> FeatureSpec:
        """Return the spec of rows of this length or, in every call, as long as another feature."""
        found = copy.copy(self)
        found.is_rounded = bool(other and other.is_rounded)
        found._key = (*self._key, other.name if other else width, found.is_rounded)
        return found

    def join(self, blocks: list[Array], rows: int, width: int, *, left: bool) -> Array:
        """Return blocks of rows [rows of the block, length, ...] as one array [rows, width, ...].

        Rows shorter than `width` are padded, on the `left` or on the right.
        """
        shape = (rows, width, *self.trailing) if self.is_sequence else (rows,)
        out = self._allocate(shape, blocks)
        if not self.is_sequence or {block.shape[1] for block in blocks} == {width}:
            sys.modules[self.library].concatenate(blocks, out=out)
            return out
        out[...] = self.pad
        start = 0
        for block in blocks:
            size, own = block.shape[:2]
            low = width - own if left else 0
            out[start : start + size, low : low + own] = block
            start += size
        return out

    def _convert_pad(self, pad: Any) -> Any:
        numpy = sys.modules["numpy"]
        if pad is None:
            return numpy.zeros((), self.dtype)[()]  # of texts, the empty text
        return numpy.asarray(pad, self.dtype)[()]

    def _allocate(self, shape: tuple[int, ...], blocks: list[Array]) -> Array:
        """Return an array, without values so far, with room for the elements of `blocks`."""
        dtype = self.dtype
        if self.kind in TEXT:
            dtype = max([block.dtype for block in blocks], key=lambda each: each.itemsize)
        return sys.modules["numpy"].empty(shape, dtype)

    def _fit_pad(self, pad: Any) -> Any:
        """Return `pad`, or 0, as an element of the views."""
        if pad is None:
            return self._convert_pad(None)
        element, fits = None, False
        with (
            suppress(TypeError, ValueError, OverflowError, RuntimeError),
            sys.modules["numpy"].errstate(over="ignore"),
        ):
            element = self._convert_pad(pad)
            too_large = self.kind == "f" and math.isinf(element) and not math.isinf(pad)
            fits = not too_large and (self.kind not in WHOLE or element == pad)
        if not fits:
            raise ValueError(f"it cannot be padded with {pad!r}")
        return element

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FeatureSpec) and self._key == other._key


class CpuTensorSpec(FeatureSpec):
    """Spec of tensors on the CPU, made from a view as an array of numpy."""

    def join(self, blocks: list[Array], rows: int, width: int, *, left: bool) -> Array:
        """Return tensors as one tensor."""
        views = [block.numpy() for block in blocks]
        return sys.modules["torch"].from_numpy(super().join(views, rows, width, left=left))


class TensorSpec(FeatureSpec):
    """Spec of tensors on other devices, or of a dtype that numpy lacks."""

    library = "torch"

    def _convert_pad(self, pad: Any) -> Any:
        return sys.modules["torch"].tensor(pad or 0, dtype=self.dtype, device="cpu").item()

    def _allocate(self, shape: tuple[int, ...], blocks: list[Array]) -> Array:  # noqa: ARG002  of the base
        return sys.modules["torch"].empty(shape, dtype=self.dtype, device=self.device)


class CallSpec:
    """Specs of all features of a call, in order: one object for all calls with equal specs."""

    def __init__(self, specs: tuple[FeatureSpec, ...]) -> None:
        self.specs = specs
        self.names = tuple([spec.name for spec in specs])
        # features of tokens, if no mask shows which of them are padding
        self.unmasked = [spec.name for spec in specs if spec.is_token]
        if any(spec.is_mask for spec in specs):
            self.unmasked = []
        self.is_fixed = any(spec.is_fixed for spec in specs)
        # numbers of the features with the length of a call
        self.measured = [at for at, spec in enumerate(specs) if spec.is_token] or range(len(specs))
        # if rows of a feature are never padded: the specs for rows of these lengths
        self.by_widths: dict[Widths, CallSpec] = {}
        self._groups: dict[Arguments, GroupKey] = {}

    def group(self, arguments: Arguments) -> GroupKey:
        """Return the key of the calls with equal specs and extra arguments."""
        return self._groups.get(arguments) or cache(
            self._groups, arguments, GroupKey(self, arguments)
        )

    def fix_lengths(self, widths: Widths) -> tuple[FeatureSpec, ...]:
        """Return the specs of calls with rows of these lengths.

        If a feature is never padded, the length of its rows becomes part of its spec.
        """
        padded: dict[int, FeatureSpec] = {}  # by length
        specs: list[FeatureSpec] = []
        for spec, width in zip(self.specs, widths, strict=True):
            if spec.is_sequence and not spec.is_fixed:
                padded.setdefault(width, spec)
        for spec, width in zip(self.specs, widths, strict=True):
            if spec.is_fixed:
                image = len(spec.trailing) >= IMAGE_AXES
                spec = spec.with_length(width, None if image else padded.get(width))
            specs.append(spec)
        return tuple(specs)


class GroupKey:
    """Key of the calls that may share a batch, one object for all of them: see `CallSpec.group`."""

    def __init__(self, spec: CallSpec, arguments: Arguments) -> None:
        self.spec = spec
        self.arguments = arguments
        # what earlier outputs showed of the axes to cut (`Unpadding`); None before the first one
        self.evidence: Any = None


def _find_kind(dtype: Any) -> Any:
    if not hasattr(dtype, "is_complex"):
        return dtype.kind
    if dtype.is_floating_point or dtype.is_complex:
        return "f" if dtype.is_floating_point else "c"
    return "b" if dtype is sys.modules["torch"].bool else "i"


def cache(known: dict[Any, Value], key: Hashable, value: Value) -> Value:
    """Return the value that `known` has for `key`, which is `value` if it has none."""
    if len(known) >= CACHE_LIMIT:
        known.clear()
    return known.setdefault(key, value)
