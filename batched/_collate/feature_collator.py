"""Arrays and tensors: a batch is a dict of features, each padded to one width, and each caller gets
its own rows of the output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from .._core.scheduler import Batch, Request, Slice
from ..errors import BatchFunctionError, BatchSizeMismatch
from .arguments import Arguments
from .collator import Call, ProbeNeeded
from .devices import Devices, stream_wait, synchronize
from .feature_spec import Array, FeatureSpec, find_imported
from .features import Features
from .outputs import Path, copy_array, dotted_path, tree_flatten, tree_unflatten
from .settings import FeatureSettings
from .unpadding import Ambiguous, Cuts, Unpadding, Widths

IMAGE_AXES: Final = 2
"""Least number of axes behind the length of rows that are taken for images: channels, height and
width, in any order.
"""

PROBES: Final = 3
"""Most probes of rows of the same widths for one batch: one tells, unless another thread has just
forgotten what was known.
"""


class GroupKey(NamedTuple):
    """Key of the calls that may share a batch: the same extra arguments and features."""

    arguments: Arguments
    specs: tuple[FeatureSpec, ...]


class PaddingPlan:
    """Widths to which the features of one call of the function were padded, and what its probes
    came to: the context of the call.
    """

    __slots__ = ("probed", "refused", "unclear", "whole", "widths")

    def __init__(self, widths: Widths, whole: bool) -> None:
        self.widths = widths
        # the batch is one call as it came: its output is what the caller gets alone
        self.whole = whole
        # of callers' own rows, one of which was run alone
        self.probed: list[Widths] = []
        # errors that callers with rows of these widths get instead of their part of the output
        self.refused: dict[Widths, BaseException] = {}
        # errors of probes of rows of these widths, after which nothing shows how to cut theirs
        self.unclear: dict[Widths, BaseException] = {}


class FeatureCollator:
    """Collator of calls of features."""

    def __init__(self, name: str, settings: FeatureSettings) -> None:
        self._name = name  # of the batch function, for error messages
        self._left = settings.padding_side == "left"
        self._settings = settings
        self._unpadding = Unpadding(name, settings)
        self._devices = Devices(settings.device, settings.output_device)

    def collate(self, slices: list[Slice], batch: Batch) -> Call:
        """The call whose features, by name, are arrays [rows, width, ...] of the rows of all slices
        below each other; each feature has a width of its own. The context is a `PaddingPlan`.
        """
        group: Any = slices[0][0].group_key  # a `GroupKey`
        widths = list(zip(*[request.items.widths for request, _, _ in slices], strict=True))
        padded = self._plan_widths(group.specs, widths)
        self._count_padding(slices, padded, batch)
        return self._build_call(slices, group, padded)

    def split(self, output: Any, slices: list[Slice], context: PaddingPlan) -> Sequence[Any]:
        """One tree like `output` per slice, whose arrays have its rows only and, on the axes that
        follow a feature, the width of its request.
        """
        group: Any = slices[0][0].group_key
        arrays = self._flatten(output, _count_rows(slices))
        if context.whole:
            self._unpadding.learn(group, arrays, context.widths)
            moved = self._devices.to_callers([array for _, array in arrays])
            synchronize(moved)
            unchanged = all(to is array for to, (_, array) in zip(moved, arrays, strict=True))
            return [output if unchanged else tree_unflatten(output, iter(moved))]
        rows = {request.items.widths: (request, start, start + 1) for request, start, _ in slices}
        while True:
            callers = sorted(rows.keys() - context.refused.keys(), key=_probe_order)
            if not callers:
                return [context.refused[request.items.widths] for request, _, _ in slices]
            try:
                cuts = self._unpadding.find_cuts(
                    group, arrays, context.widths, callers, context.unclear
                )
                break
            except Ambiguous as ambiguous:
                own = ambiguous.widths
            if own not in context.unclear:
                # out here, where it holds no other error and so no frames
                raise self._probe(rows[own], context, output, arrays)
            context.refused[own] = self._unpadding.unclear_error(
                group, context.widths, context.unclear[own]
            )
        moved = self._devices.to_callers([array for _, array in arrays])
        columns = [
            self._split_array(array, slices, cut) for array, cut in zip(moved, cuts, strict=True)
        ]
        synchronize([column[-1] for column in columns])
        parts = [tree_unflatten(output, iter(part)) for part in zip(*columns, strict=True)]
        return [
            context.refused.get(request.items.widths, part)
            for part, (request, _, _) in zip(parts, slices, strict=True)
        ]

    def join(self, _: Request, parts: list[Any]) -> Any:
        """Tree like each of `parts`, whose arrays are theirs below each other."""
        arrays = [tree_flatten(part) for part in parts]
        if len({tuple([path for path, _ in each]) for each in arrays}) > 1:
            raise BatchFunctionError(
                f"{self._name} returned outputs of different structure for "
                "parts of one call, which cannot be joined"
            )
        try:
            return tree_unflatten(
                parts[0],
                iter(
                    [
                        _concatenate([array for _, array in part])
                        for part in zip(*arrays, strict=True)
                    ]
                ),
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise BatchFunctionError(
                f"{self._name} returned outputs for parts of one call that "
                f"cannot be joined: {error}"
            ) from error

    def _probe(
        self, row: Slice, context: PaddingPlan, output: Any, arrays: list[tuple[Path, Array]]
    ) -> ProbeNeeded:
        """Request for a call with `row` alone, to see how `arrays` would look for its caller."""
        request = row[0]
        group: Any = request.group_key
        own: Widths = request.items.widths
        tried = context.probed.count(own)
        if tried == PROBES:
            raise BatchFunctionError(
                f"{self._name}: what its output has to do with the length of "
                "rows changes from call to call"
            )
        context.probed.append(own)
        others = self._settings.probe_widths(own, context.widths, apart=tried > 0)
        alone = self._plan_widths(group.specs, [(width,) for width in own])
        tries = [others] if alone in (others, context.widths) else [others, alone]
        calls = [self._build_call([row], group, widths, probe=True) for widths in tries]

        def learn(output: Any, call: Call) -> None:
            probed = self._flatten(output, 1)
            if [(path, array.ndim) for path, array in probed] != [
                (path, array.ndim) for path, array in arrays
            ]:
                raise BatchFunctionError(
                    f"{self._name} returned an output of another structure "
                    "for one row than for several"
                )
            self._unpadding.learn(group, probed, call[2].widths)

        def failed(error: BaseException, call: Call) -> bool:
            refused: bool = call[2].widths == alone
            (context.refused if refused else context.unclear)[own] = error
            return refused

        return ProbeNeeded(
            tree_unflatten(output, iter([copy_array(array) for _, array in arrays])),
            calls,
            learn,
            failed,
        )

    def _plan_widths(self, specs: tuple[FeatureSpec, ...], every: list[Widths]) -> Widths:
        """Width to which each feature is padded; `every` has, for each, its widths in the calls.

        It is rounded up for tokens, for what is padded anyway, and for what is as long as tokens
        are in every call (boxes, embeddings), unless it looks like images.
        """
        tokens = {widths for spec, widths in zip(specs, every, strict=True) if spec.is_token}
        padded: list[int] = []
        for spec, widths in zip(specs, every, strict=True):
            longest = max(widths)
            beside = widths in tokens and len(spec.trailing) < IMAGE_AXES
            padded.append(
                self._settings.round_up(longest)
                if spec.is_sequence and (beside or min(widths) < longest)
                else longest
            )
        return tuple(padded)

    def _build_call(
        self, slices: list[Slice], group: GroupKey, padded: Widths, *, probe: bool = False
    ) -> Call:
        for request, _, _ in slices:
            stream_wait(request.items.ready_events)
        features: dict[str, Array] = {}
        first, start, stop = slices[0]
        whole = (
            len(slices) == 1
            and stop - start == first.size
            and padded == first.items.widths
            and not probe
        )
        plan = PaddingPlan(padded, whole)
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
                array, out = self._devices.allocate(spec, spec.shape(rows, width))
                spec.fill(out, blocks, width, left=self._left)
            features[spec.name] = self._devices.to_function(array)
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


def _probe_order(widths: Widths) -> tuple[bool, int]:
    """Sort key by which short rows are probed first, being cheap, and empty ones, on which some
    functions choke, last.
    """
    return 0 in widths, sum(widths)


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
