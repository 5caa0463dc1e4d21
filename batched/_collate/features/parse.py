"""Features of a call: named arrays or tensors with one row per item on axis 0."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ...errors import CollationError
from ..arrays import Array, find_imported, is_array, is_dense, ready_events
from ..lengths import validate_lengths
from .devices import Devices
from .settings import FeatureSettings
from .spec import (
    CACHE_LIMIT,
    CpuTensorSpec,
    FeatureSpec,
    NumpySpec,
    TensorSpec,
)

IMAGE_AXES: Final = 2
"""Least number of axes after the length of a row for which rows are treated as images.

The axes are channels, height and width, in any order. They match the length of tokens only by
accident.
"""

logger = logging.getLogger("batched")

if TYPE_CHECKING:
    import numpy
    import torch

    Feature: TypeAlias = numpy.ndarray[Any, Any] | torch.Tensor | list[Any]
else:
    Feature = Any


@dataclass(slots=True, eq=False)
class Features:
    """Features of one call: arrays [rows], [rows, width] or [rows, width, ...].

    Each feature has its own width.
    """

    specs: tuple[FeatureSpec, ...]
    arrays: tuple[Array, ...]  # passed to the function if the call is alone in its batch
    views: tuple[Array, ...]  # views of the arrays, used to read blocks of rows
    widths: tuple[int, ...]  # length of the rows of each array; 1 if they have none
    rows: int
    # padded positions of each row, if the caller passed rows of different lengths
    padding: list[int]
    longest: int  # length of the rows in the batch function
    # events that mark the end of pending GPU computations of the arrays
    ready_events: list[Any]


class FeatureParser:
    """Parser of the features that callers of one function pass, to `Features`."""

    def __init__(
        self,
        name: str,
        settings: FeatureSettings,
        length: Callable[[Any], Any] | None,
        devices: Devices,
        warned: set[str],
    ) -> None:
        self._name = name  # name of the batch function, for error messages
        self._settings = settings
        self._length = length  # of one row: a dict of features without their first axis
        # devices of the function, not resolved yet; None after a call
        self._devices: Devices | None = devices
        self._warned = warned  # warnings that have been logged
        self._specs: dict[Hashable, FeatureSpec] = {}  # by name, dtype, device and axes

    def parse(self, given: Mapping[str, Any]) -> Features:
        """Return the features of one call.

        Raises:
            CollationError: the call has no feature, a feature of an unknown type, no rows, or
                features with different numbers of rows.
        """
        if not given:
            raise CollationError(f"{self._name} needs at least one feature, got an empty mapping")
        devices = self._devices
        if devices is not None:
            devices.resolve()
            self._devices = None
            self._warn_of_unknown(given)
        parsed: list[tuple[FeatureSpec, Array, Array, int]] = []
        padding: list[list[int]] = []
        fixed = False  # whether rows of some feature are never padded
        for name, value in given.items():
            if not isinstance(name, str):
                raise CollationError(f"{self._name}: features are named by strings, got {name!r}")
            array = value
            if isinstance(value, list):
                array, padded = self._stack(name, value)
                padding.append(padded)
            feature = self._inspect(name, array)
            fixed = fixed or feature[0].is_fixed
            parsed.append(feature)
        columns: Any = zip(*parsed, strict=True)
        specs, arrays, views, widths = columns
        rows = set(map(len, views))
        if len(rows) != 1 or 0 in rows:
            shapes = ", ".join(f"{name} {_describe(value)}" for name, value in given.items())
            need = (
                " needs at least one row"
                if rows == {0}
                else ": all features need the same number of rows on their first axis"
            )
            raise CollationError(f"{self._name}{need}, got {shapes}")
        if fixed:
            specs = _with_lengths(specs, widths)
        return Features(
            specs,
            arrays,
            views,
            widths,
            rows=len(views[0]),
            padding=[sum(positions) for positions in zip(*padding, strict=True)],
            longest=self._measure(specs, arrays, widths),
            ready_events=ready_events(arrays) if TensorSpec in map(type, specs) else [],
        )

    def _warn_of_unknown(self, given: Mapping[str, Any]) -> None:
        """Warn if `pad_token` names a feature that the first call does not have."""
        unknown = [name for name in self._settings.pad_token if name not in given]
        if unknown and "pad_token" not in self._warned:
            self._warned.add("pad_token")
            logger.warning(
                "%s: pad_token names %s, which the first call does not pass: its features are %s",
                self._name,
                ", ".join(unknown),
                ", ".join(map(str, given)),
            )

    def _inspect(self, name: str, array: Any) -> tuple[FeatureSpec, Array, Array, int]:
        """Return the spec of `array`, the plain array, its view, and the length of its rows.

        The plain array has no gradient graph. The length is 1 for rows without an axis.
        """
        # a module that another thread is importing may not have its type yet
        tensor: Any = getattr(sys.modules.get("torch"), "Tensor", ())
        ndarray: Any = getattr(sys.modules.get("numpy"), "ndarray", ())
        kind: type[FeatureSpec]
        if isinstance(array, tensor) and is_dense(array):
            device = array.device
            kind = CpuTensorSpec if device.type == "cpu" else TensorSpec
            if array.requires_grad or array.is_conj() or array.is_neg():
                array = array.detach().resolve_conj().resolve_neg()
            if type(array) is not tensor:
                array = array.as_subclass(tensor)  # its type in a batch
        elif isinstance(array, ndarray) and _is_plain(array):
            device, kind = None, NumpySpec
            if type(array) is not ndarray:
                array = array.view(ndarray)
        else:
            raise CollationError(
                f"{self._name}: {name} must be a dense array or tensor, or a list of them, one for "
                "each row, "
                f"got {_describe(array)}{_hint(array)}"
            )
        if not array.ndim:
            raise CollationError(
                f"{self._name}: {name} must have one row per item on its first axis, got a single "
                f"value of {array.dtype}; a value for all rows goes next to the features, "
                f"(features, {name}=...)"
            )
        shape = array.shape
        rank = len(shape)
        key = name, array.dtype, device, rank, shape[2:] if rank > 2 else ()
        spec = self._specs.get(key)
        if spec is None:
            if len(self._specs) >= CACHE_LIMIT:
                self._specs.clear()
            try:
                if kind is CpuTensorSpec and not _has_numpy_dtype(array):
                    kind = TensorSpec
                spec = self._specs.setdefault(
                    key, kind(name, array, self._settings.pad_token.get(name))
                )
            # from torch, for quantized numbers or numbers of less than a byte
            except (RuntimeError, TypeError):
                raise CollationError(
                    f"{self._name}: {name} is of {array.dtype}, of which no batch can be made"
                ) from None
            except CollationError as error:
                raise CollationError(f"{self._name}: {error}") from None
        return spec, array, spec.view(array), shape[1] if rank > 1 else 1

    def _stack(self, name: str, rows: list[Any]) -> tuple[Array, list[int]]:
        """Return the array [rows, longest, ...] of `rows`, and the padded positions of each row."""
        if not rows:
            raise CollationError(
                f"{self._name}: {name} is an empty list; a feature has one row per item"
            )
        parsed = [
            self._inspect(
                name,
                row[None]
                if isinstance(row, find_imported("numpy", "generic"))
                or (is_array(row) and is_dense(row))
                else row,
            )
            for row in rows
        ]
        spec = parsed[0][0].widest([each for each, *_ in parsed])
        for number, (other, *_) in enumerate(parsed):
            if other != spec:
                raise CollationError(
                    f"{self._name}: the rows of {name} must agree in dtype, device and all axes "
                    "but the first, "
                    f"got {_describe(rows[0])} and, as row {number}, {_describe(rows[number])}"
                )
        blocks = [view for _, _, view, _ in parsed]
        widths = [width for *_, width in parsed]
        width = max(widths)
        array, out = spec.allocate(spec.shape(len(rows), width))
        spec.fill(out, blocks, width, left=self._settings.padding_side == "left")
        return array, [width - own for own in widths]

    def _measure(
        self, specs: tuple[FeatureSpec, ...], arrays: tuple[Array, ...], widths: tuple[int, ...]
    ) -> int:
        """Return the length of the longest row in the batch function.

        Without the user's `length` it is the greatest width of token features or, if there are
        none, of all features, rounded up by the settings.
        """
        if self._length is not None:
            names = [spec.name for spec in specs]
            rows = (dict(zip(names, row, strict=True)) for row in zip(*arrays, strict=True))
            return max(validate_lengths(self._name, list(map(self._length, rows))))
        tokens = [width for spec, width in zip(specs, widths, strict=True) if spec.is_token]
        return self._settings.round_up(max(tokens or widths))


def _with_lengths(
    specs: tuple[FeatureSpec, ...], widths: tuple[int, ...]
) -> tuple[FeatureSpec, ...]:
    """Return `specs` of features with rows of these lengths, `widths`.

    If a feature is never padded, the length of its rows becomes part of its spec.
    """
    padded: dict[int, FeatureSpec] = {}  # by length
    for spec, width in zip(specs, widths, strict=True):
        if spec.is_sequence and not spec.is_fixed:
            padded.setdefault(width, spec)
    return tuple(
        [
            spec.with_length(
                width if len(spec.trailing) >= IMAGE_AXES else padded.get(width, width)
            )
            if spec.is_fixed
            else spec
            for spec, width in zip(specs, widths, strict=True)
        ]
    )


def _hint(value: Any) -> str:
    if value is None:
        return "; leave it out"
    hint = '; tokenizers return arrays if told return_tensors="np" or "pt"'
    return hint if isinstance(value, (list, int)) else ""


def _describe(value: Any) -> str:
    """Return type and shape of a value, for a message."""
    kind = type(value)
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if not is_array(value) and not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return f"{value!r:.40} of type {kind.__qualname__}"
    name = "" if kind.__name__ in ("ndarray", "Tensor") else f" {kind.__qualname__}"
    dtype = str(value.dtype).replace("torch.", "")
    shape = "(nested)" if getattr(value, "is_nested", False) else tuple(value.shape)
    text = f"{kind.__module__.partition('.')[0]}{name} {dtype} {shape}"
    if is_array(value) and not is_dense(value):
        text += f" of layout {value.layout}"
    if str(getattr(value, "device", "cpu")) != "cpu":
        text += f" on {value.device}"
    return text


def _has_numpy_dtype(tensor: Any) -> bool:
    try:
        tensor[:0].numpy()
    except TypeError:
        return False
    return True


def _is_plain(array: Any) -> bool:
    """Return whether a numpy array can be concatenated without loss.

    Masked arrays cannot, nor can subclasses with rules of their own.
    """
    numpy = sys.modules["numpy"]
    if type(array) is numpy.ndarray:
        return True
    special = (numpy.matrix, *find_imported("numpy.ma", "MaskedArray"))
    return type(array).__array_function__ is numpy.ndarray.__array_function__ and not isinstance(
        array, special
    )
