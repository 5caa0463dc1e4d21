"""Collator of features: a batch is a dict of features, each padded to one width.

Each caller gets its own rows of the output, without padding.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ..._core.scheduler import Batch, Request, Slice
from ...errors import BatchFunctionError, BatchSizeMismatch
from ..arrays import Array, copy_array, find_imported, synchronize
from ..collator import Call, Collator, GroupsNeeded
from .devices import Devices, stream_wait
from .outputs import dotted_path, tree_flatten, tree_unflatten
from .settings import FeatureSettings
from .spec import Widths
from .unpad import Cuts, Unpadding, logger

Plan = tuple[int, Widths, Collection[Widths]]
"""Context of one call of the function: rows, widths to which the features were padded, and widths
of the callers' rows, of which there are none if nothing was padded, or no axis is learned.
"""


class FeatureCollator(Collator):
    """Collator of calls of features."""

    def __init__(self, name: str, settings: FeatureSettings, warned: set[str]) -> None:
        self._name = name  # of the batch function, for error messages
        self._warned = warned  # warnings that have been logged
        self._left = settings.padding_side == "left"
        self._settings = settings
        self._unpadding = Unpadding(name, settings.unpad, warned)
        self.devices = Devices(settings.device, settings.output_device)

    def collate(self, slices: list[Slice], batch: Batch) -> Call:
        """Return the call with one array [rows, width, ...] for each feature.

        The array has the rows of all slices, in their order. Each feature has a width of its own.
        The context is a `Plan`.
        """
        group: Any = slices[0][0].group_key  # a `GroupKey`, of all these requests
        callers = {request.items.widths for request, _, _ in slices}
        padded = tuple(map(max, zip(*callers, strict=True)))
        step = self._settings.pad_to_multiple_of
        if step > 1:
            least = map(min, zip(*callers, strict=True))
            padded = tuple(
                [
                    -(-width // step) * step if spec.is_rounded or own < width else width
                    for spec, own, width in zip(group.spec.specs, least, padded, strict=True)
                ]
            )
        if self._settings.unpad != "auto" or callers == {padded}:
            callers = set()
        elif self._unpadding.is_open(group.evidence, callers, padded):
            raise self._split_off(slices)
        return self._build_call(slices, batch, padded, callers)

    def split(self, output: Any, slices: list[Slice], context: Plan) -> Sequence[Any]:
        """Return one tree like `output` for each slice.

        Its arrays have the rows of the slice only. Axes that follow a feature are as long as the
        rows of its request.
        """
        try:
            arrays = tree_flatten(output)
        except BatchFunctionError as error:
            raise BatchFunctionError(f"{self._name}: {error}") from None
        rows, padded, callers = context
        for path, array in arrays:
            if array.shape[0] != rows:
                raise BatchSizeMismatch.between(
                    self._name, rows, array.shape[0], where=dotted_path(path)
                )
        group: Any = slices[0][0].group_key
        cuts = self._unpadding.find_cuts(group, arrays, padded, callers)
        if cuts is None:
            raise self._split_off(slices)
        columns: list[list[Array]] = []
        for (_, array), axes in zip(arrays, cuts, strict=True):
            columns.append(self._split_array(self.devices.to_callers(array), slices, axes))
        synchronize(list(zip(*columns, strict=True))[-1])
        if not arrays[0][0]:  # the output is an array
            return columns[0]
        return [tree_unflatten(output, iter(part)) for part in zip(*columns, strict=True)]

    def join(self, _: Request, parts: list[Any]) -> Any:
        """Return a tree like each of `parts`, with their arrays joined in order."""
        arrays = [tree_flatten(part) for part in parts]
        try:
            if len({tuple([path for path, _ in each]) for each in arrays}) > 1:
                raise TypeError("they differ in structure")
            joined = [
                _concatenate([array for _, array in part]) for part in zip(*arrays, strict=True)
            ]
        except (TypeError, ValueError, RuntimeError) as error:
            raise BatchFunctionError(
                f"{self._name} returned outputs for parts of one call that cannot be joined: "
                f"{error}"
            ) from error
        synchronize(joined)  # the caller may read them on another stream
        return tree_unflatten(parts[0], iter(joined))

    def _split_off(self, slices: list[Slice]) -> GroupsNeeded:
        """Return the request to run the shortest rows apart, without padding, and then the rest."""
        least = min([request.items.widths for request, _, _ in slices], key=sum)
        groups: list[list[Slice]] = [[], []]
        for each in slices:
            groups[each[0].items.widths != least].append(each)
        alone = partial(self._build_call, padded=least, callers=())
        return GroupsNeeded([(groups[0], alone), (groups[1], self.collate)])

    def _build_call(
        self, slices: list[Slice], batch: Batch, padded: Widths, callers: Collection[Widths]
    ) -> Call:
        group: Any = slices[0][0].group_key  # a `GroupKey`
        spec, width = group.spec, sum(padded)
        rows = short = 0
        parts: list[dict[str, Array]] = []  # features of each slice
        for request, start, stop in slices:
            features = request.items
            part = features.arrays
            if stop - start < request.size:
                part = {name: array[start:stop] for name, array in part.items()}
            parts.append(part)
            rows += stop - start
            short += (width - sum(features.widths)) * (stop - start)
            batch.padding += features.padding * (stop - start) // features.rows
            if features.ready_events:
                stream_wait(features.ready_events)
        batch.cells += width * rows
        batch.padding += short
        if batch.padding and spec.unmasked and "mask" not in self._warned:
            self._warned.add("mask")
            logger.warning(
                "%s: %s is padded, and no mask among the features tells the function so: "
                "results may depend on the calls that share a batch. Pass one, such as "
                "attention_mask",
                self._name,
                " and ".join(spec.unmasked),
            )
        given = dict(parts[0])  # the function may change it
        if len(slices) > 1 or short:
            for each, size in zip(spec.specs, padded, strict=True):
                blocks = [part[each.name] for part in parts]
                given[each.name] = each.join(blocks, rows, size, left=self._left)
        given = self.devices.to_function(given)
        args, kwargs = group.arguments.unpack()
        plan = rows, padded, callers
        if self._settings.spread_kwargs:
            return args, {**given, **kwargs}, plan
        return (given, *args), kwargs, plan

    def _split_array(self, array: Array, slices: list[Slice], cuts: Cuts) -> list[Array]:
        """Return the rows of `array` [rows, ...] for each slice, in memory of their own.

        Axes with a cut are as long as the rows of the slice's request.
        """
        wrap: Any = None
        # numpy slices and copies four times faster
        if type(array) in find_imported("torch", "Tensor") and array.is_cpu:
            with suppress(TypeError, RuntimeError):  # no dtype of numpy, or a conjugate
                array, wrap = array.numpy(), sys.modules["torch"].from_numpy
        kept = [slice(None)] * array.ndim
        shares: list[Array] = []
        end = 0
        for request, start, stop in slices:
            kept[0] = slice(end, end + stop - start)
            end += stop - start
            for axis, feature in cuts:
                own = request.items.widths[feature]
                kept[axis] = slice(array.shape[axis] - own, None) if self._left else slice(own)
            share = array[tuple(kept)]
            shares.append(wrap(share.copy()) if wrap else copy_array(share))
        return shares


def _concatenate(arrays: list[Array]) -> Array:
    """Return one array [all rows, ...] with the rows of `arrays`."""
    masked = "numpy.ma" if hasattr(arrays[0], "mask") else "numpy"
    library = "torch" if hasattr(arrays[0], "layout") else masked
    return sys.modules[library].concatenate(arrays)
