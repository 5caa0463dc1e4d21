"""Features of a call: named arrays or tensors with one row per item on axis 0."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ..._core.checks import suggest
from ...errors import CollationError
from ..arrays import Array, find_imported, is_array, is_dense, ready_events
from ..lengths import validate_lengths
from .devices import Devices
from .settings import FeatureSettings
from .spec import CACHE_LIMIT, CallSpec, FeatureSpec, Widths, make_spec

logger = logging.getLogger("batched")

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
    arrays: dict[str, Array]  # passed to the function if the call is alone in its batch
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
        self._devices = devices
        # by names, classes, dtypes, devices and axes: specs of a call, and the features to make
        # plain
        self._calls: dict[Hashable, tuple[CallSpec, list[str]]] = {}
        # two threads that are the first at the same moment may get two objects, and share no batch
        self._intern = intern = lru_cache(CACHE_LIMIT)(CallSpec)
        self._fix = lru_cache(CACHE_LIMIT)(lambda spec, widths: intern(spec.fix_lengths(widths)))

    def parse(self, given: Mapping[str, Any]) -> Features:
        """Return the features of one call.

        Raises:
            CollationError: the call has no feature, a feature of an unknown type, no rows, or
                features with different numbers of rows.
        """
        arrays: dict[str, Array] = dict(given.items())
        ragged: dict[str, list[int]] = {}  # lengths of the rows of features that are lists
        for name, value in given.items():
            if isinstance(value, list) and value:
                arrays[name], ragged[name] = self._stack(name, value)
        key: list[Any] = []
        lengths: list[int] = []
        sizes: set[int] = set()
        try:
            for name, array in arrays.items():
                shape = array.shape
                rank = len(shape)
                lengths.append(shape[1] if rank > 1 else 1)
                sizes.add(shape[0])
                key += name, type(array), array.dtype, rank, shape[2:]
                key += getattr(array, "device", None), getattr(array, "layout", None)
            known = self._calls.get(tuple(key))
        except Exception:  # some are no arrays: `_inspect` refuses them
            known = None
        spec, unplain = known or self._add_call(tuple(key), arrays)
        if len(sizes) != 1 or 0 in sizes:
            shapes = ", ".join(f"{name} {_describe(value)}" for name, value in given.items())
            raise CollationError(
                f"{self._name} needs at least one feature, and all with the same number of rows, "
                f"at least one, on their first axis, got {shapes or 'an empty mapping'}"
            )
        for name in unplain:
            arrays[name] = _make_plain(arrays[name])
        widths = tuple(lengths)
        if spec.is_fixed:
            if ragged:
                self._check_ragged(spec, ragged)
            spec = self._fix(spec, widths)
        padding = sum([len(own) * max(own) - sum(own) for own in ragged.values()])
        columns = arrays.values()
        if self._length is None:
            step = self._settings.pad_to_multiple_of
            longest = -(-max(map(widths.__getitem__, spec.measured)) // step) * step
        else:
            rows = [dict(zip(arrays, row, strict=True)) for row in zip(*columns, strict=True)]
            longest = max(validate_lengths(self._name, list(map(self._length, rows))))
        return Features(spec, arrays, widths, sizes.pop(), padding, longest, ready_events(columns))

    def _add_call(self, key: Hashable, arrays: dict[str, Array]) -> tuple[CallSpec, list[str]]:
        """Return the specs of a call, and the features that `_make_plain` changes.

        Raises:
            CollationError: a feature is no array of rows.
        """
        self._devices.resolve()
        specs: list[FeatureSpec] = []
        unplain: list[str] = []
        for name, array in arrays.items():
            if not isinstance(name, str):
                raise CollationError(f"{self._name}: features are named by strings, got {name!r}")
            spec, plain = self._inspect(name, array)
            specs.append(spec)
            if type(plain) is not type(array) or (hasattr(array, "is_conj") and spec.kind in "fc"):
                unplain.append(name)
        pads = self._settings.pad_token.keys()
        for pad in pads - arrays.keys():
            if hint := suggest(pad, arrays.keys() - pads):
                logger.warning("%s: pad_token has %r, which a call lacks%s", self._name, pad, hint)
        if len(self._calls) >= CACHE_LIMIT:
            self._calls.clear()
        self._calls[key] = found = self._intern(tuple(specs)), unplain
        return found

    def _inspect(self, name: str, array: Any) -> tuple[FeatureSpec, Array]:
        """Return the spec of `array`, and the plain array."""
        is_dense_array = is_array(array) and is_dense(array)
        if not is_dense_array or not (hasattr(array, "layout") or type(array).__name__ in PLAIN):
            raise CollationError(
                f"{self._name}: {name} must be a dense array or tensor, or a list of them, one for "
                f"each row, got {_describe(array)}; leave out a feature that is None, and "
                'tokenizers return arrays if told return_tensors="np" or "pt"'
            )
        if not array.ndim:
            raise CollationError(
                f"{self._name}: {name} must have one row per item on its first axis, got a single "
                f"value of {array.dtype}; a value for all rows goes next to the features, "
                f"(features, {name}=...)"
            )
        if name == "input_ids" and array.ndim == 1 and len(array) > 1:
            raise CollationError(
                f"{self._name}: input_ids of one text need an axis for rows, input_ids[None], got "
                f"{_describe(array)}"
            )
        plain = _make_plain(array)
        device, pad = getattr(array, "device", None), self._settings.pad_token.get(name)
        try:
            return make_spec(name, plain.dtype, device, plain.ndim, plain.shape[2:], pad), plain
        # or torch raised it, for quantized numbers or numbers of less than a byte
        except (RuntimeError, TypeError, ValueError) as error:
            raise CollationError(
                f"{self._name}: {name} is of {array.dtype}, of which no batch can be made: {error}"
            ) from None

    def _check_ragged(self, spec: CallSpec, ragged: dict[str, list[int]]) -> None:
        """Raise a CollationError if rows of a feature that is never padded differ in length."""
        padded = [ragged.get(each.name) for each in spec.specs if not each.is_fixed]
        for each in spec.specs:
            own = ragged.get(each.name, [0])
            if each.is_fixed and len({*own}) > 1 and (each.is_image or own not in padded):
                raise CollationError(
                    f"{self._name}: rows of {each.name} differ in length ({min(own)} and "
                    f"{max(own)}), and only sequences are padded: features that are as long as "
                    f"token ids, and those with a pad_token={{{each.name!r}: ...}}"
                )

    def _stack(self, name: str, rows: list[Any]) -> tuple[Array, list[int]]:
        """Return the array [rows, longest, ...] of `rows`, and their lengths."""
        blocks: list[Array] = []
        specs: list[FeatureSpec] = []
        generic = find_imported("numpy", "generic")
        for row in rows:
            is_row = isinstance(row, generic) or (is_array(row) and is_dense(row))
            spec, block = self._inspect(name, row[None] if is_row else row)
            specs.append(spec)
            blocks.append(block)
            if spec != specs[0]:
                raise CollationError(
                    f"{self._name}: the rows of {name} must agree in dtype, device and all axes "
                    f"but the first, got {_describe(rows[0])} and {_describe(row)}"
                )
        widths = [(*block.shape, 1)[1] for block in blocks]
        left = self._settings.padding_side == "left"
        return specs[0].join(blocks, len(rows), max(widths), left=left), widths


def _make_plain(array: Array) -> Array:
    """Return `array` without a graph of gradients, and as of no subclass."""
    if not hasattr(array, "requires_grad"):
        return array.view(sys.modules["numpy"].ndarray)
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
