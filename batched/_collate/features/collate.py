"""Arrays and tensors: a batch is a dict of features, each padded to one width, and each caller gets
its own rows of the output.
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
from ..collator import Call, Collate, GroupsNeeded, Part
from .devices import Devices, keep_for_stream, stream_wait
from .outputs import Path, dotted_path, tree_flatten, tree_unflatten
from .parse import Features
from .settings import FeatureSettings
from .spec import FeatureSpec
from .unpad import Callers, Cuts, Unpadding, Widths

logger = logging.getLogger("batched")


class GroupKey(NamedTuple):
    """Key of the calls that may share a batch: the same extra arguments and features."""

    arguments: Arguments
    specs: tuple[FeatureSpec, ...]


class PaddingPlan(NamedTuple):
    """Padding of one call of the function: the context of the call."""

    widths: Widths  # to which the features were padded
    callers: Callers  # empty if nothing was padded, or no axis is cut


class FeatureCollator:
    """Collator of calls of features."""

    def __init__(self, name: str, settings: FeatureSettings, told: set[str]) -> None:
        self._name = name  # of the batch function, for error messages
        self._told = told  # warnings that have been given
        self._left = settings.padding_side == "left"
        self._settings = settings
        self._unpadding = Unpadding(name, settings, told)
        self.devices = Devices(settings.device, settings.output_device)

    def collate(self, slices: list[Slice], batch: Batch) -> Call:
        """The call whose features, by name, are arrays [rows, width, ...] of the rows of all slices
        below each other; each feature has a width of its own. The context is a `PaddingPlan`.
        """
        group: Any = slices[0][0].group_key  # a `GroupKey`
        every = [request.items.widths for request, _, _ in slices]
        padded = self._plan_widths(group.specs, list(zip(*every, strict=True)))
        callers = self._list_callers(group.specs, padded, set(every))
        if len(set(callers.values())) > 1:
            apart = self._unpadding.find_apart(group, callers)
            if apart:
                raise self._group_by_width(slices, callers, apart)
        return self._build_call(slices, batch, padded, callers)

    def _collate_unpadded(self, slices: list[Slice], batch: Batch) -> Call:
        """Return the call for slices with rows of one width, which is not rounded up."""
        return self._build_call(slices, batch, slices[0][0].items.widths, {})

    def _collate_uncut(self, slices: list[Slice], batch: Batch) -> Call:
        """Return the call for such slices if the function fails for rows that are not rounded up.

        Axes that may follow a feature or may have one size are not cut.
        """
        self._unpadding.warn(
            "it fails for rows that are not padded to a multiple of "
            f"{self._settings.pad_to_multiple_of}, so some axes of its output are not cut"
        )
        first: Request = slices[0][0]
        group: Any = first.group_key
        padded = self._plan_widths(group.specs, [(width,) for width in first.items.widths])
        return self._build_call(slices, batch, padded, {})

    def split(self, output: Any, slices: list[Slice], context: PaddingPlan) -> Sequence[Any]:
        """One tree like `output` per slice, whose arrays have its rows only and, on the axes that
        follow a feature, the width of its request.
        """
        group: Any = slices[0][0].group_key
        arrays = self._flatten(output, _count_rows(slices))
        cuts, apart = self._unpadding.find_cuts(group, arrays, context.widths, context.callers)
        if apart:
            raise self._group_by_width(slices, context.callers, apart)
        moved = self.devices.to_callers([array for _, array in arrays])
        columns = [
            self._split_array(array, slices, cut) for array, cut in zip(moved, cuts, strict=True)
        ]
        synchronize([column[-1] for column in columns])
        return [tree_unflatten(output, iter(part)) for part in zip(*columns, strict=True)]

    def enter_thread(self) -> None:
        """Has this thread send features on a stream of its own, beside what the GPU computes."""
        self.devices.enter_stream()

    def hand_over(self, call: Call) -> list[Any]:
        """Events of the arrival of its features on GPUs."""
        return ready_events(self._features_of(call))

    def take_over(self, call: Call | None, arrivals: list[Any]) -> None:
        """Has the current streams wait for these events, and their memory be kept for them."""
        assert call is not None
        stream_wait(arrivals)
        keep_for_stream(self._features_of(call))

    def _features_of(self, call: Call) -> list[Array]:
        args, kwargs, _ = call
        return list((kwargs if self._settings.spread_kwargs else args[0]).values())

    def join(self, _: Request, parts: list[Any]) -> Any:
        """Tree like each of `parts`, whose arrays are theirs below each other."""
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
            synchronize(joined)  # the caller may read them on another stream
            return tree_unflatten(parts[0], iter(joined))
        except (TypeError, ValueError, RuntimeError) as error:
            raise BatchFunctionError(
                f"{self._name} returned outputs for parts of one call that "
                f"cannot be joined: {error}"
            ) from error

    def _group_by_width(
        self, slices: list[Slice], callers: Callers, apart: Collection[Widths]
    ) -> GroupsNeeded:
        """Return the request to run rows of the widths `apart` first, and the rest after them.

        Rows that are padded alike run in one batch. If all rows of `slices` are, rows of each width
        run without padding.
        """
        alike = len(set(callers.values())) == 1
        keys = {own: own if alike else alone for own, alone in callers.items()}
        wanted = {keys[own] for own in apart}
        groups: dict[Widths, list[Slice]] = {}
        for each in slices:
            key = keys[each[0].items.widths]
            groups.setdefault(key if key in wanted else (), []).append(each)
        unpadded: tuple[Collate, ...] = (self._collate_unpadded, self._collate_uncut)
        parts: list[Part] = [
            (groups[key], unpadded if alike and key else (self.collate,))
            for key in sorted(groups, key=sum, reverse=True)
        ]
        return GroupsNeeded(parts)

    def _list_callers(
        self, specs: tuple[FeatureSpec, ...], padded: Widths, every: set[Widths]
    ) -> Callers:
        """All widths that rows have in a batch `padded` to some, if that is known to matter."""
        if every == {padded} or self._settings.unpad != "auto":
            return {}
        rounds = self._settings.pad_to_multiple_of > 1
        return {
            own: self._plan_widths(specs, [(width,) for width in own]) if rounds else own
            for own in sorted(every, key=sum)
        }

    def _plan_widths(self, specs: tuple[FeatureSpec, ...], every: list[Widths]) -> Widths:
        """Width to which each feature is padded; `every` has, for each, its widths in the calls.

        It is rounded up for tokens, for what is as long as they are in every call (boxes,
        embeddings), and for what is padded anyway.
        """
        return tuple(
            [
                self._settings.round_up(max(widths))
                if spec.is_rounded or min(widths) < max(widths)
                else max(widths)
                for spec, widths in zip(specs, every, strict=True)
            ]
        )

    def _build_call(
        self,
        slices: list[Slice],
        batch: Batch,
        padded: Widths,
        callers: Callers,
    ) -> Call:
        self._count_padding(slices, padded, batch)
        for request, _, _ in slices:
            stream_wait(request.items.ready_events)
        features: dict[str, Array] = {}
        first, start, stop = slices[0]
        group: Any = first.group_key
        whole = (
            len(batch.slices) == 1 and stop - start == first.size and padded == first.items.widths
        )
        plan = PaddingPlan(padded, callers)
        rows = _count_rows(slices)
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
        if self._settings.spread_kwargs:
            return args, {**features, **kwargs}, plan
        return (features, *args), kwargs, plan

    def _count_padding(self, slices: list[Slice], padded: Widths, batch: Batch) -> None:
        """Adds to `batch` the positions of rows in its sequences, and those that are padding."""
        group: Any = slices[0][0].group_key
        sequences = [number for number, spec in enumerate(group.specs) if spec.is_sequence]
        widest = sum([padded[number] for number in sequences])
        for request, start, stop in slices:
            features: Features = request.items
            batch.cells += widest * (stop - start)
            batch.padding += (widest - sum([features.widths[number] for number in sequences])) * (
                stop - start
            )
            if features.padding:
                batch.padding += sum(features.padding[start:stop])
        if batch.padding and "mask" not in self._told:
            self._warn_of_padding(slices, padded)

    def _warn_of_padding(self, slices: list[Slice], padded: Widths) -> None:
        """Warns if token ids are padded and no other feature shows which of them are padding."""
        group: Any = slices[0][0].group_key
        if any(spec.is_mask for spec in group.specs):
            return
        for number, spec in enumerate(group.specs):
            shortest = min([request.items.widths[number] for request, _, _ in slices])
            if spec.is_token and shortest < padded[number]:
                self._told.add("mask")
                logger.warning(
                    "%s: %s is padded, and no mask among the features tells the function so: "
                    "results may depend on the calls that share a batch. Pass one, such as "
                    "attention_mask",
                    self._name,
                    spec.name,
                )
                return

    def _flatten(self, output: Any, rows: int) -> list[tuple[Path, Array]]:
        """Leaves of an output, each of which must be an array [rows, ...]."""
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
        """Rows of `array` [rows, ...] that belong to each slice, cut to their own widths, in memory
        of their own.
        """
        if len(slices) == 1 and not cuts:
            return [copy_array(array)]
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
    """Array [all rows, ...] of the rows of `arrays`, of their kind."""
    first, *others = arrays
    if isinstance(first, find_imported("torch", "Tensor")):
        return sys.modules["torch"].cat(arrays)
    if isinstance(first, find_imported("numpy.ma", "MaskedArray")):
        return sys.modules["numpy.ma"].concatenate(arrays)
    same = all(other.dtype == first.dtype for other in others)
    # dtype=: numpy would not keep an unusual order of bytes
    joined = sys.modules["numpy"].concatenate(arrays, dtype=first.dtype if same else None)
    return joined if type(joined) is type(first) else joined.view(type(first))
