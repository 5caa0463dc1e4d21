"""Collator of features: a batch is a dict of features, each padded to one width.

Each caller gets its own rows of the output, without padding.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ..._core.scheduler import Batch, Request, Slice
from ...errors import BatchFunctionError, BatchSizeMismatch
from ..arguments import Arguments
from ..arrays import Array, copy_array, find_imported, ready_events, synchronize
from ..collator import Call, Collate, Collator, GroupsNeeded
from .devices import Devices, keep_for_stream, stream_wait
from .outputs import Path, dotted_path, tree_flatten, tree_unflatten
from .parse import Features
from .settings import FeatureSettings
from .spec import FeatureSpec
from .unpad import Cuts, PaddedWidths, Unpadding, Widths, order

logger = logging.getLogger("batched")


class GroupKey(NamedTuple):
    """Key of the calls that may share a batch: the same extra arguments and features."""

    arguments: Arguments
    specs: tuple[FeatureSpec, ...]


class PaddingPlan(NamedTuple):
    """Padding of one call of the function: the context of the call."""

    widths: Widths  # to which the features were padded
    callers: PaddedWidths  # empty if nothing was padded, or no axis is cut


class FeatureCollator(Collator):
    """Collator of calls of features."""

    def __init__(self, name: str, settings: FeatureSettings, warned: set[str]) -> None:
        self._name = name  # of the batch function, for error messages
        self._warned = warned  # warnings that have been logged
        self._left = settings.padding_side == "left"
        self._settings = settings
        self._unpadding = Unpadding(name, settings, warned)
        self.devices = Devices(settings.device, settings.output_device)

    def collate(self, slices: list[Slice], batch: Batch) -> Call:
        """Return the call with one array [rows, width, ...] for each feature.

        The array has the rows of all slices, in their order. Each feature has a width of its own.
        The context is a `PaddingPlan`.
        """
        group: GroupKey = slices[0][0].group_key  # type: ignore[assignment]  # of all such requests
        every = [request.items.widths for request, _, _ in slices]
        padded = self._plan_widths(group.specs, every)
        callers: PaddedWidths = {}
        if set(every) != {padded} and self._settings.unpad == "auto":
            rounds = self._settings.pad_to_multiple_of > 1
            callers = {
                own: self._plan_widths(group.specs, [own]) if rounds else own
                for own in sorted(set(every), key=sum)
            }
        if len(set(callers.values())) > 1:
            apart = self._unpadding.find_apart(group, callers)
            if apart:
                raise self._group_by_width(slices, callers, apart)
        return self._build_call(slices, batch, padded, callers)

    def _collate_unpadded(self, slices: list[Slice], batch: Batch) -> Call:
        """Return the call for slices with rows of one width, which is not rounded up."""
        return self._build_call(slices, batch, slices[0][0].items.widths, {})

    def _collate_uncut(self, slices: list[Slice], batch: Batch) -> Call:
        """Return the call for rows of one width that the function needs rounded up.

        Axes that may follow a feature or may have one size are not cut.
        """
        self._unpadding.warn(
            "it fails for rows that are not padded to a multiple of "
            f"{self._settings.pad_to_multiple_of}, so some axes of its output are not cut"
        )
        first: Request = slices[0][0]
        group: GroupKey = first.group_key  # type: ignore[assignment]  # as above
        padded = self._plan_widths(group.specs, [first.items.widths])
        return self._build_call(slices, batch, padded, {})

    def split(self, output: Any, slices: list[Slice], context: PaddingPlan) -> Sequence[Any]:
        """Return one tree like `output` for each slice.

        Its arrays have the rows of the slice only. Axes that follow a feature are as long as the
        rows of its request.
        """
        arrays = self._flatten(output, _count_rows(slices))
        cuts, apart = self._unpadding.find_cuts(
            slices[0][0].group_key, arrays, context.widths, context.callers
        )
        if apart:
            raise self._group_by_width(slices, context.callers, apart)
        moved = self.devices.to_callers([array for _, array in arrays])
        columns = [
            self._split_array(array, slices, cut) for array, cut in zip(moved, cuts, strict=True)
        ]
        synchronize([column[-1] for column in columns])
        return [tree_unflatten(output, iter(part)) for part in zip(*columns, strict=True)]

    def enter_thread(self) -> None:
        """Let this thread send features on a stream of its own, while the GPU computes."""
        self.devices.enter_stream()

    def hand_over(self, call: Call) -> list[Any]:
        """Return events of the arrival of the features of `call` on GPUs."""
        return ready_events(self._features_of(call))

    def take_over(self, call: Call | None, arrivals: list[Any]) -> None:
        """Let the current streams wait for `arrivals`, and keep the memory of the features."""
        assert call is not None
        stream_wait(arrivals)
        keep_for_stream(self._features_of(call))

    def _features_of(self, call: Call) -> list[Array]:
        args, kwargs, _ = call
        return list((kwargs if self._settings.spread_kwargs else args[0]).values())

    def join(self, _: Request, parts: list[Any]) -> Any:
        """Return a tree like each of `parts`, with their arrays joined in order."""
        arrays = [tree_flatten(part) for part in parts]
        if len({tuple([path for path, _ in each]) for each in arrays}) > 1:
            raise BatchFunctionError(
                f"{self._name} returned outputs of different structure for "
                "parts of one call, which cannot be joined"
            )
        try:
            joined = [
                _concatenate([array for _, array in part]) for part in zip(*arrays, strict=True)
            ]
        except (TypeError, ValueError, RuntimeError) as error:
            raise BatchFunctionError(
                f"{self._name} returned outputs for parts of one call that "
                f"cannot be joined: {error}"
            ) from error
        synchronize(joined)  # the caller may read them on another stream
        return tree_unflatten(parts[0], iter(joined))

    def _group_by_width(
        self, slices: list[Slice], callers: PaddedWidths, apart: Collection[Widths]
    ) -> GroupsNeeded:
        """Return the request to run rows of the widths `apart` first, and the rest after them.

        Rows that are padded to the same widths run in one batch. Rows of each width run without
        padding if padding would leave their share open: if all rows of `slices` are padded to the
        same widths, or if it changes the order of the features by length.
        """
        alike = len(set(callers.values())) == 1
        keys = {
            own: (own, True) if alike or order(own) != order(alone) else (alone, False)
            for own, alone in callers.items()
        }
        wanted = {keys[own] for own in apart}
        groups: dict[tuple[Widths, bool], list[Slice]] = {}
        for each in slices:
            key = keys[each[0].items.widths]
            groups.setdefault(key if key in wanted else ((), False), []).append(each)
        unpadded: tuple[Collate, ...] = (self._collate_unpadded, self._collate_uncut)
        return GroupsNeeded(
            [
                (groups[key], unpadded if key[1] else (self.collate,))
                for key in sorted(groups, key=lambda key: sum(key[0]), reverse=True)
            ]
        )

    def _plan_widths(self, specs: tuple[FeatureSpec, ...], every: list[Widths]) -> Widths:
        """Return the width to which each feature is padded, from the widths of all calls.

        The width is rounded up for tokens, for features as long as tokens in every call (boxes,
        embeddings), and for features that are padded anyway.
        """
        return tuple(
            [
                self._settings.round_up(max(widths))
                if spec.is_rounded or min(widths) < max(widths)
                else max(widths)
                for spec, widths in zip(specs, zip(*every, strict=True), strict=True)
            ]
        )

    def _build_call(
        self, slices: list[Slice], batch: Batch, padded: Widths, callers: PaddedWidths
    ) -> Call:
        first, start, stop = slices[0]
        group: GroupKey = first.group_key  # type: ignore[assignment]  # as above
        self._count_padding(slices, group.specs, padded, batch)
        for request, _, _ in slices:
            stream_wait(request.items.ready_events)
        whole = (
            len(batch.slices) == 1 and stop - start == first.size and padded == first.items.widths
        )
        rows = _count_rows(slices)
        features: dict[str, Array] = {}
        for number, (spec, width) in enumerate(zip(group.specs, padded, strict=True)):
            if whole:
                array = first.items.arrays[number]
            else:
                blocks = [
                    request.items.views[number]
                    if stop - start == request.size
                    else request.items.views[number][start:stop]
                    for request, start, stop in slices
                ]
                widest = spec.widest([request.items.specs[number] for request, _, _ in slices])
                array, out = self.devices.allocate(widest, spec.shape(rows, width))
                widest.fill(out, blocks, width, left=self._left)
            features[spec.name] = self.devices.to_function(array)
        args, kwargs = group.arguments.unpack()
        plan = PaddingPlan(padded, callers)
        if self._settings.spread_kwargs:
            return args, {**features, **kwargs}, plan
        return (features, *args), kwargs, plan

    def _count_padding(
        self, slices: list[Slice], specs: tuple[FeatureSpec, ...], padded: Widths, batch: Batch
    ) -> None:
        """Add to `batch` the positions of rows in its sequences, and the padding among them.

        Warn once if token ids are padded and no feature shows which of them are padding.
        """
        sequences = [number for number, spec in enumerate(specs) if spec.is_sequence]
        widest = sum([padded[number] for number in sequences])
        for request, start, stop in slices:
            features: Features = request.items
            batch.cells += widest * (stop - start)
            batch.padding += (widest - sum([features.widths[number] for number in sequences])) * (
                stop - start
            )
            if features.padding:
                batch.padding += sum(features.padding[start:stop])
        if not batch.padding or "mask" in self._warned or any(spec.is_mask for spec in specs):
            return
        shortest = map(min, zip(*[request.items.widths for request, _, _ in slices], strict=True))
        for spec, own, width in zip(specs, shortest, padded, strict=True):
            if spec.is_token and own < width:
                self._warned.add("mask")
                logger.warning(
                    "%s: %s is padded, and no mask among the features tells the function so: "
                    "results may depend on the calls that share a batch. Pass one, such as "
                    "attention_mask",
                    self._name,
                    spec.name,
                )
                return

    def _flatten(self, output: Any, rows: int) -> list[tuple[Path, Array]]:
        """Return the leaves of an output, each an array [rows, ...], with their paths."""
        try:
            arrays = tree_flatten(output)
        except BatchFunctionError as error:
            raise BatchFunctionError(f"{self._name}: {error}") from None
        for path, array in arrays:
            if len(array) != rows:
                raise BatchSizeMismatch.between(
                    self._name, rows, len(array), where=dotted_path(path)
                )
        return arrays

    def _split_array(self, array: Array, slices: list[Slice], cuts: Cuts) -> list[Array]:
        """Return the rows of `array` [rows, ...] for each slice, in memory of their own.

        Axes with a cut are as long as the rows of the slice's request.
        """
        shares: list[Array] = []
        position = 0
        for request, start, stop in slices:
            end = position + stop - start
            share = array[position:end]
            for axis, feature in cuts:
                own, size = request.items.widths[feature], array.shape[axis]
                if own < size:
                    kept = slice(size - own, None) if self._left else slice(own)
                    share = share[(slice(None),) * axis + (kept,)]
            shares.append(copy_array(share))
            position = end
        return shares


def _count_rows(slices: list[Slice]) -> int:
    return sum([stop - start for _, start, stop in slices])


def _concatenate(arrays: list[Array]) -> Array:
    """Return one array [all rows, ...] with the rows of `arrays`."""
    first = arrays[0]
    if isinstance(first, find_imported("torch", "Tensor")):
        return sys.modules["torch"].cat(arrays)
    masked = isinstance(first, find_imported("numpy.ma", "MaskedArray"))
    return sys.modules["numpy.ma" if masked else "numpy"].concatenate(arrays)
