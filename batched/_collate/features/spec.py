"""Specs of features: the properties that all calls of a group share, and the padding of blocks.

Tensors on the CPU are read and written through numpy, where a slice costs a third of the time,
unless numpy lacks their dtype (bfloat16).
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final

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

MASKS: Final = "mask", "length"
"""Parts of names of features that mark padding, of any dtype."""

CACHE_LIMIT: Final = 256
"""Most entries of a cache. Images of many sizes have as many specs."""


@dataclass(unsafe_hash=True)
class FeatureSpec:
    """Name, dtype, device and shape of the rows of a feature.

    The length of rows that are padded, axis 1 of the arrays, is no part of the spec. Nor is the
    length of texts.

    Raises:
        RuntimeError: torch cannot make a tensor of the dtype.
        TypeError: the same.
        ValueError: no element of the arrays can be `pad`.
    """

    name: str
    dtype: Any  # of torch only if numpy lacks it, or for another device than the CPU
    device: Any
    rank: int
    trailing: tuple[int, ...]
    """Shape of rows after their length."""
    pad: Any = field(compare=False)
    """Value that fills shorter rows; None: 0."""
    follows: int | str = ""
    """Length of rows that are not padded, or a feature that is as long in every call."""

    def __post_init__(self) -> None:
        is_tensor = hasattr(self.dtype, "is_complex")
        if is_tensor and self.device.type == "cpu":
            with suppress(TypeError):
                empty = sys.modules["torch"].empty(0, dtype=self.dtype, device="cpu")
                self.dtype = empty.numpy().dtype
        self._in_torch = hasattr(self.dtype, "is_complex")  # torch joins tensors
        self._in_views = is_tensor and not self._in_torch  # numpy joins them
        self.kind = getattr(self.dtype, "kind", "")  # in the letters of numpy
        if self._in_torch:
            whole = "b" if self.dtype is sys.modules["torch"].bool else "i"
            number = "c" if self.dtype.is_complex else whole
            self.kind = "f" if self.dtype.is_floating_point else number
        if self.kind in TEXT:  # texts of different size share a batch
            self.dtype = self.dtype.str[:2]
        self.is_sequence = self.rank > 1  # rows have a length
        # a row is a sequence of integers or bools: [rows, length]
        self.is_token = self.rank == 2 and self.kind in WHOLE
        # the feature shows the function which tokens are padding
        is_named = any(part in self.name.lower() for part in MASKS)
        self.is_mask = is_named or (self.is_sequence and self.kind == "b")
        # rows are padded only with a feature of the same lengths: see `CallSpec.fix_lengths`
        self.is_fixed = self.is_sequence and not self.is_token and self.pad is None
        self.is_image = len(self.trailing) >= IMAGE_AXES
        # the length of rows is rounded up to a multiple even if nothing is padded
        self.is_rounded = self.is_token
        self._element = self._fit_pad()

    def join(self, blocks: Sequence[Array], rows: int, width: int, *, left: bool) -> Array:
        """Return blocks of rows [rows of the block, length, ...] as one array [rows, width, ...].

        Rows shorter than `width` are padded, on the `left` or on the right.
        """
        shape = (rows, width, *self.trailing) if self.is_sequence else (rows,)
        dtype = self.dtype
        if self._in_views:
            blocks = [block.numpy() for block in blocks]
        if self.kind in TEXT:
            dtype = max([block.dtype for block in blocks], key=lambda each: each.itemsize)
        if self._in_torch:
            library = sys.modules["torch"]
            out = library.empty(shape, dtype=dtype, device=self.device)
        else:
            library = sys.modules["numpy"]
            out = library.empty(shape, dtype)
        if not self.is_sequence or {block.shape[1] for block in blocks} == {width}:
            library.concatenate(blocks, out=out)
        else:
            out[...] = self._element
            start = 0
            for block in blocks:
                size, own = block.shape[:2]
                low = width - own if left else 0
                out[start : start + size, low : low + own] = block
                start += size
        return sys.modules["torch"].from_numpy(out) if self._in_views else out

    def _fit_pad(self) -> Any:
        """Return `pad`, or 0, as an element of the arrays that are joined."""
        numpy, pad = sys.modules["numpy"], self.pad
        with (
            suppress(TypeError, ValueError, OverflowError, RuntimeError),
            numpy.errstate(over="ignore"),
        ):
            if self._in_torch:
                tensor = sys.modules["torch"].tensor
                element = tensor(pad or 0, dtype=self.dtype, device="cpu").item()
            elif pad is None:
                return numpy.zeros((), self.dtype)[()]  # of texts, the empty text
            else:
                element = numpy.asarray(pad, self.dtype)[()]
            overflows = self.kind == "f" and math.isinf(element) and not math.isinf(pad or 0)
            if not overflows and (self.kind not in WHOLE or element == (pad or 0)):
                return element
        raise ValueError(f"it cannot be padded with {pad!r}")


class CallSpec:
    """Specs of all features of a call, in order: one object for all calls with equal specs."""

    def __init__(self, specs: tuple[FeatureSpec, ...]) -> None:
        self.specs = specs
        self.names = tuple([spec.name for spec in specs])
        # features of tokens, if no mask shows which of them are padding
        masked = any(spec.is_mask for spec in specs)
        self.unmasked = [spec.name for spec in specs if spec.is_token and not masked]
        self.is_fixed = any(spec.is_fixed for spec in specs)
        # numbers of the features with the length of a call
        self.measured = [at for at, spec in enumerate(specs) if spec.is_token] or range(len(specs))
        # the key of the calls with equal specs and these extra arguments
        self.group = lru_cache(CACHE_LIMIT)(partial(GroupKey, self))

    def fix_lengths(self, widths: Widths) -> tuple[FeatureSpec, ...]:
        """Return the specs of calls with rows of these lengths.

        If a feature is never padded, the length of its rows becomes part of its spec.
        """
        pairs = list(zip(self.specs, widths, strict=True))
        # by length, the first feature
        padded = {
            size: spec for spec, size in pairs[::-1] if spec.is_sequence and not spec.is_fixed
        }
        specs: list[FeatureSpec] = []
        for spec, width in pairs:
            if spec.is_fixed:
                spec = copy.copy(spec)
                other = None if spec.is_image else padded.get(width)
                spec.is_rounded = bool(other and other.is_rounded)
                spec.follows = other.name if other else width
            specs.append(spec)
        return tuple(specs)


@dataclass(eq=False)
class GroupKey:
    """Key of the calls that may share a batch, one object for all of them: see `CallSpec.group`."""

    spec: CallSpec
    arguments: Arguments
    evidence: Any = None
    """What earlier outputs showed of the axes to cut (`Unpadding`); None before the first one."""


make_spec = lru_cache(CACHE_LIMIT, typed=True)(FeatureSpec)
