"""Features of a call: named arrays or tensors with one row per item on axis 0."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ...errors import CollationError
from ..arrays import Array, find_imported, is_array, is_dense, ready_events
from ..lengths import validate_lengths
from .devices import Devices
from .settings import FeatureSettings
from .spec import CallSpec, CpuTensorSpec, FeatureSpec, TensorSpec, Widths, cache

PLAIN: Final = {"ndarray", "memmap", "recarray"}
"""Classes of numpy that can be joined without loss, unlike masked arrays and matrices."""

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

    spec: CallSpec
    arrays: list[Array]  # passed to the function if the call is alone in its batch
    widths: Widths
    rows: int
    padding: int  # padded positions of all rows, if the caller passed rows of different lengths
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
    ) -> None:
        self._name = name  # name of the batch function, for error messages
        self._settings = settings
        self._length = length  # of one row: a dict of features without their first axis
        # devices of the function, not resolved yet; None after a call
        self._devices: Devices | None = devices
        self._specs: dict[Hashable, FeatureSpec] = {}  # by name, dtype, device and axes
        # by all of these, and classes: specs of a call, and numbers of the features to make plain
        self._calls: dict[Hashable, tuple[CallSpec, list[int]]] = {}
        self._interned: dict[tuple[FeatureSpec, ...], CallSpec] = {}

    def parse(self, given: Mapping[str, Any]) -> Features:
        """Return the features of one call.

        Raises:
            CollationError: the call has no feature, a feature of an unknown type, no rows, or
                features with different numbers of rows.
        """
        if self._devices is not None:
            self._devices.resolve()
            self._devices = None
        arrays: list[Array] = list(given.values())
        padding = 0
        for number, (name, value) in enumerate(given.items()):
            if isinstance(value, list) and value:
                arrays[number], padded = self._stack(name, value)
                padding += padded
        key: list[Any] = []
        lengths: list[int] = []
        sizes: set[int] = set()
        known = None
        try:
            for name, array in zip(given, arrays, strict=True):
                shape, kind = array.shape, type(array)
                rank = len(shape)
                lengths.append(shape[1] if rank > 1 else 1)
                sizes.add(shape[0])
                key += name, kind, array.dtype, rank, shape[2:]
                key += getattr(array, "device", None), getattr(array, "layout", None)
            known = self._calls.get(tuple(key))
        except Exception:  # some are no arrays: `_inspect` refuses them
            key.clear()
        spec, unplain = known or self._add_call(tuple(key), given, arrays)
        if len(sizes) != 1 or 0 in sizes:
            shapes = ", ".join(f"{name} {_describe(value)}" for name, value in given.items())
            raise CollationError(
                f"{self._name} needs at least one feature, and all with the same number of rows, "
                f"at least one, on their first axis, got {shapes or 'an empty mapping'}"
            )
        for number in unplain:
            arrays[number] = _make_plain(arrays[number])
        widths = tuple(lengths)
        if spec.is_fixed:
            spec = spec.by_widths.get(widths) or cache(
                spec.by_widths, widths, self._intern(spec.fix_lengths(widths))
            )
        if self._length is None:
            longest = 0
            for number in spec.measured:
                longest = max(longest, widths[number])
            step = self._settings.pad_to_multiple_of
            longest = -(-longest // step) * step
        else:
            rows = [dict(zip(given, row, strict=True)) for row in zip(*arrays, strict=True)]
            longest = max(validate_lengths(self._name, list(map(self._length, rows))))
        events = ready_events(arrays)
        return Features(spec, arrays, widths, sizes.pop(), padding, longest, events)

    def _add_call(
        self, key: Hashable, given: Iterable[str], arrays: list[Array]
    ) -> tuple[CallSpec, list[int]]:
        """Return the specs of a call, and the numbers of the features that `_make_plain` changes.

        Raises:
            CollationError: a feature is no array of rows.
        """
        specs: list[FeatureSpec] = []
        unplain: list[int] = []
        for number, (name, array) in enumerate(zip(given, arrays, strict=True)):
            if not isinstance(name, str):
                raise CollationError(f"{self._name}: features are named by strings, got {name!r}")
            spec, plain = self._inspect(name, array)
            specs.append(spec)
            if type(plain) is not type(array) or (hasattr(array, "is_conj") and spec.kind in "fc"):
                unplain.append(number)
        return cache(self._calls, key, (self._intern(tuple(specs)), unplain))

    def _intern(self, specs: tuple[FeatureSpec, ...]) -> CallSpec:
        return self._interned.get(specs) or cache(self._interned, specs, CallSpec(specs))

    def _inspect(self, name: str, array: Any) -> tuple[FeatureSpec, Array]:
        """Return the spec of `array`, and the plain array."""
        kind: type[FeatureSpec]
        if isinstance(array, find_imported("torch", "Tensor")) and is_dense(array):
            kind, device = TensorSpec, array.device
        elif type(array).__name__ in PLAIN and isinstance(array, find_imported("numpy", "ndarray")):
            kind, device = FeatureSpec, None
        else:
            raise CollationError(
                f"{self._name}: {name} must be a dense array or tensor, or a list of them, one for "
                f"each row, got {_describe(array)}; a feature that is None is left out, and "
                'tokenizers return arrays if told return_tensors="np" or "pt"'
            )
        if not array.ndim:
            raise CollationError(
                f"{self._name}: {name} must have one row per item on its first axis, got a single "
                f"value of {array.dtype}; a value for all rows goes next to the features, "
                f"(features, {name}=...)"
            )
        view = plain = _make_plain(array)
        key = name, plain.dtype, device, plain.ndim, plain.shape[2:]
        spec = self._specs.get(key)
        if spec is None:
            if getattr(device, "type", "") == "cpu":
                with suppress(TypeError):  # a dtype that numpy lacks
                    view, kind = plain.numpy(), CpuTensorSpec
            try:
                made = kind(name, view, self._settings.pad_token.get(name))
            # or torch raised it, for quantized numbers or numbers of less than a byte
            except (RuntimeError, TypeError, ValueError) as error:
                raise CollationError(
                    f"{self._name}: {name} is of {array.dtype}, of which no batch can be made: "
                    f"{error}"
                ) from None
            spec = cache(self._specs, key, made)
        return spec, plain

    def _stack(self, name: str, rows: list[Any]) -> tuple[Array, int]:
        """Return the array [rows, longest, ...] of `rows`, and the number of padded positions."""
        blocks: list[Array] = []
        specs: list[FeatureSpec] = []
        generic = find_imported("numpy", "generic")
        for row in rows:
            is_row = isinstance(row, generic) or (is_array(row) and is_dense(row))
            spec, block = self._inspect(name, row[None] if is_row else row)
            if specs and spec != specs[0]:
                raise CollationError(
                    f"{self._name}: the rows of {name} must agree in dtype, device and all axes "
                    f"but the first, got {_describe(rows[0])} and, as row {len(specs)}, "
                    f"{_describe(row)}"
                )
            specs.append(spec)
            blocks.append(block)
        widths = [block.shape[1] if block.ndim > 1 else 1 for block in blocks]
        width = max(widths)
        left = self._settings.padding_side == "left"
        array = specs[0].join(blocks, len(rows), width, left=left)
        return array, width * len(rows) - sum(widths)


def _make_plain(array: Array) -> Array:
    """Return `array` without a graph of gradients, and as of no subclass."""
    if not hasattr(array, "requires_grad"):
        ndarray = sys.modules["numpy"].ndarray
        return array if type(array) is ndarray else array.view(ndarray)
    if array.requires_grad or array.is_conj() or array.is_neg():
        array = array.detach().resolve_conj().resolve_neg()
    tensor = sys.modules["torch"].Tensor
    return array if type(array) is tensor else array.as_subclass(tensor)


def _describe(value: Any) -> str:
    """Return type and shape of a value, for a message."""
    kind = type(value)
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if not is_array(value):
        return f"{value!r:.40} of type {kind.__qualname__}"
    shape = "(nested)" if getattr(value, "is_nested", False) else tuple(value.shape)
    text = f"{kind.__module__}.{kind.__qualname__} of {value.dtype} {shape}"
    return f"{text}, {value.layout}, on {value.device}" if hasattr(value, "layout") else text
