"""What the calls of one group agree on in one feature, and how blocks of its rows become one array.

Tensors on the CPU are read and written through numpy: a slice costs a third of what one of a tensor
costs. What numpy has no dtype for (bfloat16) passes as integers of its size.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any, cast

from ..errors import CollationError

Array = Any
"""A `numpy.ndarray` or a `torch.Tensor`."""


def loaded(module: str, name: str) -> tuple[Any, ...]:
    """The class of that name, if the module has been imported: a function that returns its
    instances has done so.
    """
    found = getattr(sys.modules.get(module), name, None)
    return (found,) if isinstance(found, type) else ()


class Field(ABC):
    """Name, dtype, device and shape of rows, but for their length; equal if all of them are."""

    __slots__ = ("_key", "device", "dtype", "is_sequence", "is_token", "name", "pad", "trailing")

    def __init__(self, name: str, array: Array, pad: Any) -> None:
        """The field of `array`, whose shorter rows `pad` fills, 0 if it is None.

        Raises:
            CollationError: no element of the array can be `pad`.
        """
        self.name = name
        self.dtype = array.dtype
        # of a tensor
        self.device = getattr(array, "device", None) if type(self) is not NumpyField else None
        self.is_sequence = array.ndim > 1  # rows have a length
        # a row is one integer or bool after another
        self.is_token = array.ndim == 2 and self._is_whole
        self.trailing = tuple(array.shape[2:])  # the shape of rows behind their length
        self._key = name, self.dtype, self.device, array.ndim, self.trailing
        self.pad = self._stored(self._checked(pad))  # what fills short rows, as views hold it

    @property
    @abstractmethod
    def _is_whole(self) -> bool:
        """Whether elements are integers or bools."""

    @abstractmethod
    def _limits(self) -> tuple[float, float] | None:
        """The least and the greatest real number that an element can be; None if elements are
        none.
        """

    @abstractmethod
    def _stored(self, pad: Any) -> Any: ...

    @abstractmethod
    def view(self, array: Array) -> Array:
        """`array` as blocks are read from."""

    @abstractmethod
    def blank(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """A fresh array, and the view that it is written through."""

    @abstractmethod
    def join(self, blocks: list[Array], out: Array) -> None:
        """Writes `blocks`, whose rows are of one shape, to the view `out`, one after another."""

    def shape(self, rows: int, width: int) -> tuple[int, ...]:
        """The shape of so many rows, `width` long if they have a length."""
        return (rows, width, *self.trailing) if self.is_sequence else (rows,)

    def fill(self, out: Array, blocks: list[Array], width: int, *, left: bool) -> None:
        """Writes the views `blocks` to the view `out`, short rows padded to `width`, on the `left`
        or on the right.
        """
        if not self.is_sequence or all(block.shape[1] == width for block in blocks):
            self.join(blocks, out)
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

    def _checked(self, pad: Any) -> Any:
        limits = self._limits()
        if pad is None or limits is None:
            return pad
        least, greatest = limits
        if isinstance(pad, Real):
            pad = cast("Any", pad)
            if self._is_whole and pad == pad and least <= pad <= greatest and int(pad) == pad:
                return int(pad)
            if not self._is_whole and (not math.isfinite(pad) or least <= pad <= greatest):
                return float(pad)
        raise CollationError(f"{self.name} is of {self.dtype} and cannot be padded with {pad!r}")

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Field) and self._key == other._key)

    def __repr__(self) -> str:
        return f"<field {self.name} of {self.dtype}>"


class NumpyField(Field):
    """Arrays of numpy."""

    __slots__ = ()

    @property
    def _is_whole(self) -> bool:
        return self.dtype.kind in "biu"

    def _limits(self) -> tuple[float, float] | None:
        numpy, kind = sys.modules["numpy"], self.dtype.kind
        if kind == "b":
            return 0, 1
        if kind not in "iuf":
            return None
        if kind == "f":
            return float(numpy.finfo(self.dtype).min), float(numpy.finfo(self.dtype).max)
        return int(numpy.iinfo(self.dtype).min), int(numpy.iinfo(self.dtype).max)

    def _stored(self, pad: Any) -> Any:
        numpy = sys.modules["numpy"]
        try:
            return (
                numpy.zeros((), self.dtype)[()]
                if pad is None
                else numpy.asarray(pad, self.dtype)[()]
            )
        except (TypeError, ValueError) as error:
            raise CollationError(
                f"{self.name} is of {self.dtype} and cannot be padded with {pad!r}: {error}"
            ) from None

    def view(self, array: Array) -> Array:
        return array

    def blank(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        array = sys.modules["numpy"].empty(shape, self.dtype)
        return array, array

    def join(self, blocks: list[Array], out: Array) -> None:
        sys.modules["numpy"].concatenate(blocks, out=out)


class TensorField(Field):
    """Tensors on any device but the CPU."""

    __slots__ = ()

    @property
    def _is_whole(self) -> bool:
        return not (self.dtype.is_floating_point or self.dtype.is_complex)

    def _limits(self) -> tuple[float, float] | None:
        torch = sys.modules["torch"]
        if self.dtype is torch.bool:
            return 0, 1
        if self.dtype.is_complex:
            return None
        info = torch.iinfo(self.dtype) if self._is_whole else torch.finfo(self.dtype)
        return info.min, info.max

    def _stored(self, pad: Any) -> Any:
        return pad or 0

    def view(self, array: Array) -> Array:
        return array

    def blank(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        array = sys.modules["torch"].empty(shape, dtype=self.dtype, device=self.device)
        return array, array

    def join(self, blocks: list[Array], out: Array) -> None:
        sys.modules["torch"].cat(blocks, out=out)


class CpuTensorField(TensorField):
    """Tensors on the CPU, whose views are arrays of numpy."""

    __slots__ = ("_carrier",)

    def __init__(self, name: str, array: Array, pad: Any) -> None:
        torch = sys.modules["torch"]
        try:
            torch.empty(0, dtype=array.dtype, device="cpu").numpy()
            self._carrier = None
        except TypeError:
            self._carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
                array.dtype.itemsize
            ]
        super().__init__(name, array, pad)

    def _stored(self, pad: Any) -> Any:
        return self.view(sys.modules["torch"].tensor(pad or 0, dtype=self.dtype, device="cpu"))[()]

    def view(self, array: Array) -> Array:
        return (array if self._carrier is None else array.view(self._carrier)).numpy()

    def blank(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        array = sys.modules["torch"].empty(shape, dtype=self.dtype, device="cpu")
        return array, self.view(array)

    def join(self, blocks: list[Array], out: Array) -> None:
        sys.modules["numpy"].concatenate(blocks, out=out)
