"""Arrays and tensors: a batch is a dict of features, padded to one length each, and each caller
gets its own rows of the output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from .._core.scheduler import Batch, Request, Slice
from ..errors import BatchFunctionError, BatchSizeMismatch
from .arguments import Arguments
from .collator import Call, ProbeNeeded
from .devices import Devices, wait_for, wait_here
from .features import Features
from .fields import Array, Field, loaded
from .outputs import Path, leaves, rebuilt, said
from .settings import FeatureSettings
from .unpadding import Ambiguous, Cuts, Unpadding, Widths

IMAGE_AXES: Final = 2
"""Axes behind the length of rows from which on they are taken for images: channels, height and
width, in any order.
"""

PROBES: Final = 3
"""Rows of one length that are run alone for one batch: one tells, unless another thread has just
forgotten what was known.
"""


class Group(NamedTuple):
    """Calls with equal ones may share a batch."""

    arguments: Arguments
    fields: tuple[Field, ...]


class Padded:
    """How the features of a call of the function were padded."""

    __slots__ = ("probed", "refused", "unclear", "widths")

    def __init__(self, widths: Widths) -> None:
        self.widths = widths  # the length of the rows of each feature
        # callers with rows of these lengths had one of them run alone
        self.probed: list[Widths] = []
        # what these callers are told instead of their part of the output
        self.refused: dict[Widths, BaseException] = {}
        # what the function raised where it was to tell how to cut it for these callers
        self.unclear: dict[Widths, BaseException] = {}


class FeatureCollator:
    """Collates calls of features."""

    def __init__(self, name: str, settings: FeatureSettings) -> None:
        self._name = name  # of the batch function, for error messages
        self._left = settings.padding_side == "left"
        self._settings = settings
        self._unpadding = Unpadding(name, settings)
        self._devices = Devices(settings.device, settings.output_device)

    def collate(self, slices: list[Slice], batch: Batch) -> Call:
        calls: list[Features] = [request.items for request, _, _ in slices]
        # what the request was made with
        group: Group = slices[0][0].group_key  # type: ignore[assignment]
        every = list(zip(*[call.widths for call in calls], strict=True))
        padded = self._padded(group.fields, every)
        self._count(slices, padded, batch)
        return self._call(slices, group, padded)

    def split(self, output: Any, slices: list[Slice], note: Padded) -> Sequence[Any]:
        request, start, stop = slices[0]
        group: Any = request.group_key
        arrays = self._leaves(output, sum([stop - start for _, start, stop in slices]))
        # what it gets alone
        if (
            len(slices) == 1
            and stop - start == request.size
            and note.widths == request.items.widths
        ):
            self._unpadding.learn(group, arrays, note.widths)
            whole = self._devices.outward([array for _, array in arrays])
            wait_for(whole)
            unchanged = all(moved is array for moved, (_, array) in zip(whole, arrays, strict=True))
            return [output if unchanged else rebuilt(output, iter(whole))]
        rows = {request.items.widths: (request, start, start + 1) for request, start, _ in slices}
        while True:
            callers = sorted(rows.keys() - note.refused.keys(), key=_as_probe)
            if not callers:
                return [note.refused[request.items.widths] for request, _, _ in slices]
            try:
                cuts = self._unpadding.cuts(group, arrays, note.widths, callers, note.unclear)
                break
            except Ambiguous as ambiguous:
                own = ambiguous.widths
            if own not in note.unclear:
                # out here, where it holds no other error and so no frames
                raise self._probe(rows[own], note, output, arrays)
            note.refused[own] = self._unpadding.unclear(group, note.widths, note.unclear[own])
        moved = self._devices.outward([array for _, array in arrays])
        columns = [self._shares(array, slices, cut) for array, cut in zip(moved, cuts, strict=True)]
        wait_for([column[-1] for column in columns])
        parts = [rebuilt(output, iter(share)) for share in zip(*columns, strict=True)]
        return [
            note.refused.get(request.items.widths, part)
            for part, (request, _, _) in zip(parts, slices, strict=True)
        ]

    def joined(self, _: Request, parts: list[Any]) -> Any:
        arrays = [leaves(part) for part in parts]
        if len({tuple([path for path, _ in each]) for each in arrays}) > 1:
            raise BatchFunctionError(
                f"{self._name} returned outputs of different structure for "
                "parts of one call, which cannot be joined"
            )
        try:
            return rebuilt(
                parts[0],
                iter([_joined([array for _, array in part]) for part in zip(*arrays, strict=True)]),
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise BatchFunctionError(
                f"{self._name} returned outputs for parts of one call that "
                f"cannot be joined: {error}"
            ) from error

    def _probe(
        self, row: Slice, note: Padded, output: Any, arrays: list[tuple[Path, Array]]
    ) -> ProbeNeeded:
        """What shows how `arrays`, which are of a batch padded so, would look for the caller of
        `row` alone.
        """
        request = row[0]
        group: Any = request.group_key
        own: Widths = request.items.widths
        tried = note.probed.count(own)
        if tried == PROBES:
            raise BatchFunctionError(
                f"{self._name}: what its output has to do with the length of "
                "rows changes from call to call"
            )
        note.probed.append(own)
        others = self._settings.other_lengths(own, note.widths, apart=tried > 0)
        alone = self._padded(group.fields, [(width,) for width in own])
        tries = [others] if alone in (others, note.widths) else [others, alone]
        calls = [self._call([row], group, widths, probe=True) for widths in tries]

        def learn(output: Any, call: Call) -> None:
            probed = self._leaves(output, 1)
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
            (note.refused if refused else note.unclear)[own] = error
            return refused

        return ProbeNeeded(
            rebuilt(output, iter([_copied(array) for _, array in arrays])), calls, learn, failed
        )

    def _padded(self, fields: tuple[Field, ...], every: list[Widths]) -> Widths:
        """To what length the rows of each feature are padded, for calls with rows of `every` of
        these lengths.

        Rounded up are tokens, what is padded anyway, and what is as long as tokens are in every
        call (boxes, embeddings), unless it looks like images.
        """
        tokens = {widths for field, widths in zip(fields, every, strict=True) if field.is_token}
        padded: list[int] = []
        for field, widths in zip(fields, every, strict=True):
            longest = max(widths)
            beside = widths in tokens and len(field.trailing) < IMAGE_AXES
            padded.append(
                self._settings.rounded(longest)
                if field.is_sequence and (beside or min(widths) < longest)
                else longest
            )
        return tuple(padded)

    def _call(
        self, slices: list[Slice], group: Group, padded: Widths, *, probe: bool = False
    ) -> Call:
        for request, _, _ in slices:
            wait_here(request.items.made)
        request, start, stop = slices[0]
        features: dict[str, Array] = {}
        if (
            len(slices) == 1
            and stop - start == request.size
            and padded == request.items.widths
            and not probe
        ):
            for field, array in zip(group.fields, request.items.arrays, strict=True):
                features[field.name] = self._devices.inward(array)
        else:
            rows = sum([stop - start for _, start, stop in slices])
            for number, (field, width) in enumerate(zip(group.fields, padded, strict=True)):
                blocks = [
                    request.items.views[number]
                    if stop - start == request.size
                    else request.items.views[number][start:stop]
                    for request, start, stop in slices
                ]
                array, out = self._devices.blank(field, field.shape(rows, width))
                field.fill(out, blocks, width, left=self._left)
                features[field.name] = self._devices.inward(array)
        args, kwargs = group.arguments.fresh()
        if self._settings.spread_kwargs:
            return args, {**features, **kwargs}, Padded(padded)
        return (features, *args), kwargs, Padded(padded)

    def _count(self, slices: list[Slice], padded: Widths, batch: Batch) -> None:
        """Adds to `batch` how many positions its rows have, and how many of them are padding."""
        group: Any = slices[0][0].group_key
        sequences = [number for number, field in enumerate(group.fields) if field.is_sequence]
        widest = sum([padded[number] for number in sequences])
        for request, start, stop in slices:
            features: Features = request.items
            batch.cells += widest * (stop - start)
            batch.padding += (widest - sum([features.widths[number] for number in sequences])) * (
                stop - start
            )
            if features.padding:
                batch.padding += sum(features.padding[start:stop])

    def _leaves(self, output: Any, rows: int) -> list[tuple[Path, Array]]:
        try:
            arrays = leaves(output)
        except BatchFunctionError as error:
            raise BatchFunctionError(f"{self._name}: {error}") from None
        for path, array in arrays:
            if len(array) != rows:
                raise BatchSizeMismatch.between(self._name, rows, len(array), where=said(path))
        return arrays

    def _shares(self, array: Array, slices: list[Slice], cuts: Cuts) -> list[Array]:
        """The part of an array that belongs to each slice, in memory of its own."""
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
            shares.append(_copied(share))
            position = end
        return shares


def _as_probe(widths: Widths) -> tuple[bool, int]:
    """Short rows make cheap probes; some functions choke on empty ones."""
    return 0 in widths, sum(widths)


def _copied(array: Array) -> Array:
    return array.clone() if hasattr(array, "clone") else array.copy()


def _joined(arrays: list[Array]) -> Array:
    torch = sys.modules.get("torch")
    if torch is not None and all(isinstance(array, torch.Tensor) for array in arrays):
        return torch.cat(arrays)
    first, others = arrays[0], arrays[1:]
    if isinstance(first, loaded("numpy.ma", "MaskedArray")):
        return sys.modules["numpy.ma"].concatenate(arrays)
    # then it is kept, to the order of its bytes
    same = all(other.dtype == first.dtype for other in others)
    joined = sys.modules["numpy"].concatenate(arrays, dtype=first.dtype if same else None)
    return joined if type(joined) is type(first) else joined.view(type(first))
