"""Features of a call: named arrays or tensors with one row per item."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ..errors import CollationError
from .devices import made
from .fields import Array, CpuTensorField, Field, NumpyField, TensorField, loaded
from .outputs import is_array, is_dense, is_scalar
from .settings import FeatureSettings

REMEMBERED: Final = 1024
"""Kinds of features that are known again; only shapes of rows can be more, in images of all
sizes.
"""

if TYPE_CHECKING:
    import numpy
    import torch

    Feature: TypeAlias = numpy.ndarray[Any, Any] | torch.Tensor | list[Any]
else:
    Feature = Any


class Features:
    """The features of one call, all with the same number of rows, and each with rows of one
    length.
    """

    __slots__ = ("arrays", "fields", "longest", "made", "padding", "rows", "views", "widths")

    def __init__(
        self,
        fields: tuple[Field, ...],
        arrays: tuple[Array, ...],
        views: tuple[Array, ...],
        widths: tuple[int, ...],
    ) -> None:
        self.fields = fields
        self.arrays = arrays  # as the function gets them, if no other call is with this one
        self.views = views  # of the arrays, as blocks of rows are read from
        self.widths = widths  # the length of the rows of each; 1 if they have none
        self.rows = len(views[0])
        # padded positions of each row, if rows came with lengths of their own
        self.padding: list[int] = []
        self.longest = 1  # what the batch function will see as the length of the rows
        # when those on a GPU will have been computed
        self.made = made(arrays) if TensorField in map(type, fields) else []


class Reader:
    """Turns what callers of one function pass into `Features`."""

    def __init__(
        self,
        name: str,
        settings: FeatureSettings,
        length: Callable[[Any], Any] | None,
    ) -> None:
        self._name = name  # of the batch function, for error messages
        self._pads = settings.pad_token
        self._settings = settings
        self._length = length  # of one row, a dict of features without their first axis
        self._fields: dict[Hashable, Field] = {}  # by what they have in common

    def features(self, given: Mapping[str, Any]) -> Features:
        """The features of one call.

        Raises:
            CollationError: they are none, of an unknown type, or have no rows or different numbers
                of them.
        """
        fields: list[Field] = []
        arrays: list[Array] = []
        views: list[Array] = []
        widths: list[int] = []
        padding: list[list[int]] = []
        for name, value in given.items():
            if not isinstance(name, str):
                raise CollationError(f"{self._name}: features are named by strings, got {name!r}")
            array = value
            if isinstance(value, list):
                array, short = self._stacked(name, value)
                padding.append(short)
            field, array, view = self._described(name, array)
            fields.append(field)
            arrays.append(array)
            views.append(view)
            widths.append(view.shape[1] if field.is_sequence else 1)
        rows = set(map(len, views))
        if len(rows) != 1 or 0 in rows:
            raise CollationError(self._complaint(given, views))
        found = Features(tuple(fields), tuple(arrays), tuple(views), tuple(widths))
        found.padding = [sum(positions) for positions in zip(*padding, strict=True)]
        found.longest = self._longest(found)
        return found

    def _described(self, name: str, array: Any) -> tuple[Field, Array, Array]:
        """The field of `array`, the plain array without the graph of its gradients, and a view of
        it.
        """
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        kind: type[Field]
        if torch is not None and isinstance(array, torch.Tensor) and is_dense(array):
            device = array.device
            kind = CpuTensorField if device.type == "cpu" else TensorField
            if array.requires_grad or array.is_conj() or array.is_neg():
                array = array.detach().resolve_conj().resolve_neg()
            if type(array) is not torch.Tensor:
                array = array.as_subclass(torch.Tensor)  # as it will be in a batch
        elif numpy is not None and isinstance(array, numpy.ndarray) and _is_plain(array):
            device, kind = None, NumpyField
            if type(array) is not numpy.ndarray:
                array = array.view(numpy.ndarray)
        else:
            raise CollationError(
                f"{self._name}: {name} must be a dense array or tensor, or a list of them, one for "
                "each row, "
                f"got {_said(array)}{_hint(array)}"
            )
        if not array.ndim:
            raise CollationError(
                f"{self._name}: {name} must have one row per item on its first "
                f"axis, got a single value of {array.dtype}"
            )
        shape = array.shape
        rank = len(shape)
        key = name, array.dtype, device, rank, shape[2:] if rank > 2 else ()
        field = self._fields.get(key)
        if field is None:
            if len(self._fields) >= REMEMBERED:
                self._fields.clear()
            try:
                field = self._fields.setdefault(key, kind(name, array, self._pads.get(name)))
            # of torch, for numbers of less than a byte or quantized ones
            except (RuntimeError, TypeError):
                raise CollationError(
                    f"{self._name}: {name} is of {array.dtype}, of which no batch can be made"
                ) from None
            except CollationError as error:
                raise CollationError(f"{self._name}: {error}") from None
        return field, array, field.view(array)

    def _stacked(self, name: str, rows: list[Any]) -> tuple[Array, list[int]]:
        """`rows` as one array, and how much each was padded."""
        if not rows:
            raise CollationError(
                f"{self._name}: {name} is an empty list; a feature has one row per item"
            )
        described = [
            self._described(
                name, row[None] if is_scalar(row) or (is_array(row) and is_dense(row)) else row
            )
            for row in rows
        ]
        field = described[0][0]
        for number, (other, _, _) in enumerate(described):
            if other != field:
                raise CollationError(
                    f"{self._name}: the rows of {name} must agree in dtype, device and all axes "
                    "but the first, "
                    f"got {_said(rows[0])} and, as row {number}, {_said(rows[number])}"
                )
        blocks = [view for _, _, view in described]
        widths = [block.shape[1] for block in blocks] if field.is_sequence else [1] * len(blocks)
        width = max(widths)
        array, out = field.blank(field.shape(len(rows), width))
        field.fill(out, blocks, width, left=self._settings.padding_side == "left")
        return array, [width - own for own in widths]

    def _longest(self, features: Features) -> int:
        if self._length is not None:
            names = [field.name for field in features.fields]
            rows = (
                dict(zip(names, row, strict=True)) for row in zip(*features.arrays, strict=True)
            )
            return max(whole_length(self._name, self._length(row)) for row in rows)
        tokens = [
            width
            for field, width in zip(features.fields, features.widths, strict=True)
            if field.is_token
        ]
        return self._settings.rounded(max(tokens or features.widths))

    def _complaint(self, given: Mapping[str, Any], views: list[Array]) -> str:
        if not given:
            return f"{self._name} needs at least one feature, got an empty mapping"
        shapes = ", ".join(f"{name} {_said(value)}" for name, value in given.items())
        if all(len(view) == 0 for view in views):
            return f"{self._name} needs at least one row, got {shapes}"
        need = "all features need the same number of rows on their first axis"
        return f"{self._name}: {need}, got {shapes}"


def whole_length(name: str, length: Any) -> int:
    """What `length` returned for an item of a call of `name`, as an integer rounded up.

    Raises:
        TypeError, ValueError: it is no length.
    """
    try:
        whole = length if type(length) is int else math.ceil(length)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"{name}: length must return a number of at least 0, got {length!r}"
        ) from None
    if whole < 0:
        raise ValueError(f"{name}: length must return a number of at least 0, got {length!r}")
    if whole > sys.maxsize:
        raise ValueError(
            f"{name}: length must return a number of at most {sys.maxsize}, got one "
            f"of {whole.bit_length()} bits"
        )
    return whole


def _hint(value: Any) -> str:
    if value is None:
        return "; leave it out"
    return (
        '; tokenizers return arrays if told return_tensors="np" or "pt"'
        if isinstance(value, (list, int))
        else ""
    )


def _said(value: Any) -> str:
    """Type and shape, for a message."""
    kind = type(value)
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if not is_array(value) and not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return f"{value!r:.40} of type {kind.__qualname__}"
    words = [kind.__module__.partition(".")[0], str(value.dtype).replace("torch.", "")]
    if kind.__name__ not in ("ndarray", "Tensor"):
        words.insert(1, kind.__qualname__)
    words.append(str(tuple(value.shape)) if not getattr(value, "is_nested", False) else "(nested)")
    if is_array(value) and not is_dense(value):
        words.append(f"of layout {value.layout}")
    if str(getattr(value, "device", "cpu")) != "cpu":
        words.append(f"on {value.device}")
    return " ".join(words)


def _is_plain(array: Any) -> bool:
    """Whether an array of numpy can be joined with others as what it is: not if some are masked, or
    its type has rules of its own.
    """
    numpy = sys.modules["numpy"]
    if type(array) is numpy.ndarray:
        return True
    special = (numpy.matrix, *loaded("numpy.ma", "MaskedArray"))
    return type(array).__array_function__ is numpy.ndarray.__array_function__ and not isinstance(
        array, special
    )
