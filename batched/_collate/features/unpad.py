"""Removal of padding from outputs: the rule learns which axes follow which feature.

A run is one call of the batch function. The rows of each feature are padded to one width in a run.
An axis of the output either has one size in all runs (the size of hidden states, say) or follows a
feature: in each run, the axis is as long as the padded width of that feature. An axis that follows
a feature is cut to each caller's own width.

1. Each run leaves the explanations of an axis that fit its size. Callers with rows of different
   widths share a run only if all explanations that can be left after it give each caller the same
   size. Otherwise the callers with the shortest rows run apart. Nothing is padded in their run, so
   nothing must be cut, and its output is evidence.
2. If no explanation of an axis is left, rows of each width run apart from then on, and a warning
   says so.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import compress, count
from typing import Any

from ...errors import BatchFunctionError
from .outputs import Path, describe, dotted_path
from .settings import Unpad
from .spec import GroupKey, Widths

Cuts = list[tuple[int, int]]
"""Axes of one array that are cut, each with the number of the feature that it follows."""

Evidence = Mapping[tuple[Path, int], frozenset[int]]
"""Explanations of each axis, by the path of its array and its number, that fit all runs so far.

An explanation is the number of a feature or, for an axis of one size, `~size`, which is negative.
"""

NOTHING: frozenset[int] = frozenset()

logger = logging.getLogger("batched")


@dataclass
class Unpadding:
    """Rule by which the outputs of one batch function are cut."""

    name: str
    """Name of the batch function, for messages."""
    unpad: Unpad
    warned: set[str]
    """Names of the warnings that were logged."""

    def is_open(
        self, evidence: Evidence | None, callers: Collection[Widths], padded: Widths
    ) -> bool:
        """Return whether an output for `callers`, padded to these widths, cannot be split."""
        if evidence is None:
            return True
        columns = list(zip(padded, *callers, strict=True))  # widths of each feature
        for (path, axis), explanations in evidence.items():
            if not explanations and "unpad" not in self.warned:
                self.warned.add("unpad")
                logger.warning(
                    "%s: axis %d of %s varies and follows no feature, so calls of different length "
                    "run apart. unpad=False keeps all axes whole, for callers to cut; unpad={...} "
                    "declares the feature that an axis follows. If an axis is as long as the batch "
                    "has rows, callers get data of each other",
                    self.name,
                    axis,
                    describe(path),
                )
            sizes = {
                columns[each] if each >= 0 else (~each,) * len(columns[0]) for each in explanations
            }
            if not sizes or len(sizes) > len({size for size, *_ in sizes}):
                return True
        return False

    def find_cuts(
        self,
        group: GroupKey,
        arrays: list[tuple[Path, Any]],
        padded: Widths,
        callers: Collection[Widths],
    ) -> list[Cuts] | None:
        """Return the cuts of each array of an output, or None if it cannot be split.

        Raises:
            BatchFunctionError: an axis is not as declared.
        """
        if self.unpad != "auto":
            return self._apply_declared(group, arrays, padded)
        known: Evidence | None = group.evidence
        evidence = dict.fromkeys(known or (), NOTHING)
        found: list[Cuts] = []
        for path, array in arrays:
            cuts: Cuts = []
            for axis, size in enumerate(array.shape):
                if axis:
                    followed = compress(count(), map(size.__eq__, padded))
                    fitting = frozenset([~size, *followed])
                    if known is not None:
                        fitting &= known.get((path, axis), NOTHING)
                    evidence[path, axis] = fitting
                    feature = min(fitting, default=-1)
                    if feature >= 0:
                        cuts.append((axis, feature))
            found.append(cuts)
        group.evidence = evidence
        return None if callers and self.is_open(evidence, callers, padded) else found

    def _apply_declared(
        self, group: GroupKey, arrays: list[tuple[Path, Any]], padded: Widths
    ) -> list[Cuts]:
        """Return the cuts that the setting `unpad` declares."""
        declared: Any = self.unpad or {}
        widths = dict(zip(group.spec.names, padded, strict=True))
        found: list[dict[int, int]] = [{} for _ in arrays]
        for place, axes in declared.items():
            under = [
                (array, cuts)
                for (path, array), cuts in zip(arrays, found, strict=True)
                if f"{dotted_path(path)}.".startswith(place and f"{place}.")
            ]
            for axis, name in axes.items():
                sizes = {
                    array.shape[axis] if -array.ndim < axis < array.ndim else None
                    for array, _ in under
                }
                if sizes != {widths.get(name, -1)}:
                    shapes = {dotted_path(path): tuple(array.shape) for path, array in arrays}
                    raise BatchFunctionError(
                        f"{self.name}: unpad says that axis {axis} of {place!r} follows {name!r}, "
                        f"but the output has the shapes {shapes}, and features were padded to "
                        f"{widths}; '' is the path of the whole output"
                    )
                for array, cuts in under:
                    cuts[axis % array.ndim] = group.spec.names.index(name)
        return [list(cuts.items()) for cuts in found]
