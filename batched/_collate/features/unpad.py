"""Evidence of the feature that each axis of an output follows, so that axes are cut for callers.

An axis either has one size at all times (that of hidden states) or follows a feature: the axis is
as long as the rows of that feature were padded. The evidence are outputs of runs that were padded
to different widths.

1. Callers with rows of different widths share a run under three conditions. All explanations of an
   axis give the same size for each caller. A run as short as each caller was seen, so that an axis
   that changes, in steps or up to some length only, has changed. If an axis follows a feature, a
   run was seen with features in the caller's order of lengths, so that an axis that follows the
   longer of two features has shown it.
2. Until then, rows of some width run apart. Nothing has to be known about these runs, since nothing
   in them is padded, and their outputs are evidence.
3. A run that contradicts the evidence replaces the evidence. Until a run of other widths agrees
   with it, rows of each width run apart.
4. An axis that contradicts the evidence, and was as long as the batch had rows in both runs, causes
   a warning: the function lets rows see each other.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Mapping
from functools import lru_cache
from itertools import chain
from operator import le
from typing import Any, Final, NamedTuple

from ...errors import BatchFunctionError
from .outputs import Path, describe, dotted_path
from .settings import FeatureSettings

Widths = tuple[int, ...]
"""Length of the rows of each feature of a group, in the order of its specs."""

Callers = Mapping[Widths, Widths]
"""Widths of the rows of callers, the shortest first, with the widths padded to in runs alone."""

Cuts = tuple[tuple[int, int], ...]
"""Axes of one array to be cut, each with the number of the feature that it follows."""

CACHE_LIMIT: Final = 256
"""Limit of kinds of calls with evidence."""

logger = logging.getLogger("batched")


class _Axis(NamedTuple):
    """Explanations of the sizes that one axis had in all runs."""

    size: int | None  # the only size; None: there were several
    follows: frozenset[int]  # features that were always padded to its size

    def is_open(self, callers: Collection[Widths]) -> bool:
        """Return whether the explanations differ for a caller, by the widths of its rows."""
        widths = list(zip(*callers, strict=True))  # by feature
        possible = {widths[feature] for feature in self.follows}
        if self.size is not None:
            possible.add((self.size,) * len(callers))
        return len(possible) > 1


class _Evidence(NamedTuple):
    """Evidence from runs of one kind of calls that do not contradict each other."""

    structure: tuple[tuple[Path, int], ...]  # of each array, its path and number of axes
    axes: list[_Axis]  # behind the first, array by array
    shortest: list[Widths]  # padded widths of runs: a run is at least as long as one of them
    orders: frozenset[Widths]  # orders of the features by length, ties included
    padded: Widths  # of the last run
    rows: int  # of the last run
    sizes: Widths  # of all axes in the last run
    contradiction: str = ""  # of the last run with earlier ones


class Unpadding:
    """Evidence from the outputs of one batch function, and the rule by which to cut them."""

    def __init__(self, name: str, settings: FeatureSettings, warned: set[str]) -> None:
        self._name = name  # of the batch function, for messages
        self._unpad = settings.unpad
        self._warned = warned  # warnings that have been logged
        self._evidence: dict[Hashable, _Evidence] = {}  # by kind of calls

    def warn(self, text: str) -> None:
        """Log, once, that the axes of the output are not learned as they should be."""
        if "unpad" not in self._warned:
            self._warned.add("unpad")
            logger.warning(
                "%s: %s. unpad={...} declares the feature that an axis follows, unpad=False keeps "
                "all axes whole",
                self._name,
                text,
            )

    def find_apart(self, group: Any, callers: Callers) -> Collection[Widths]:
        """Return widths of callers that have to run apart with any output; often empty."""
        evidence = self._evidence.get((frozenset(group.arguments), group.specs))
        return () if evidence is None else self._find_apart(evidence, (), callers)

    def find_cuts(
        self, group: Any, arrays: list[tuple[Path, Any]], padded: Widths, callers: Callers
    ) -> tuple[list[Cuts], Collection[Widths]]:
        """Return the cuts of each array of an output, and widths of callers that must run apart.

        The run was `padded` to these widths, for these callers; there are none if nothing was
        padded. Callers must run apart if the output leaves their share open.

        Raises:
            BatchFunctionError: an axis is not as declared.
        """
        if self._unpad is False:
            return [()] * len(arrays), ()
        if self._unpad != "auto":
            return self._apply_declared(group, arrays, padded), ()
        evidence = self._observe(group, arrays, padded)
        apart = self._find_apart(evidence, set(evidence.axes), callers)
        axes = iter(evidence.axes)
        return [
            tuple(
                (number, min(axis.follows))
                for number, axis in zip(range(1, array.ndim), axes, strict=False)
                if axis.size is None
            )
            for _, array in arrays
        ], apart

    def _find_apart(
        self, evidence: _Evidence, axes: Collection[_Axis], callers: Callers
    ) -> Collection[Widths]:
        """Return widths of callers that have to run apart if the output has these axes."""
        if not callers or not evidence.axes:
            return ()
        if evidence.contradiction:
            self.warn(f"{evidence.contradiction}, so calls of different length run apart")
            return callers
        least = tuple(map(min, zip(*callers.values(), strict=True)))
        covered = _is_covered(least, evidence.shortest)
        follows = any(axis.follows for axis in axes)
        unclear = [axis for axis in axes if axis.is_open(callers)]
        # the evidence with the runs of these callers: the rest runs once
        shortest, orders = [*evidence.shortest], {*evidence.orders}
        apart = []
        for own, alone in callers.items():
            opened = [axis for axis in unclear if axis.is_open([own])]
            if (
                not (covered or _is_covered(alone, shortest))
                or (follows and order(own) not in orders)
                or opened
            ):
                apart.append(own)
                shortest.append(alone)
                orders.add(order(own))
                unclear = [axis for axis in unclear if axis not in opened]
        return apart

    def _observe(self, group: Any, arrays: list[tuple[Path, Any]], padded: Widths) -> _Evidence:
        """Return the evidence after a run `padded` to these widths."""
        key = frozenset(group.arguments), group.specs  # keeps no argument alive
        sizes = tuple(chain.from_iterable([array.shape[1:] for _, array in arrays]))
        equal = {
            size: frozenset([number for number, width in enumerate(padded) if width == size])
            for size in set(sizes)
        }
        found = _Evidence(
            structure=tuple([(path, array.ndim) for path, array in arrays]),
            axes=[_Axis(size, equal[size]) for size in sizes],
            shortest=[padded],
            orders=frozenset([order(padded)]),
            padded=padded,
            rows=len(arrays[0][1]),
            sizes=sizes,
        )
        known = self._evidence.get(key)
        if known is None:
            if len(self._evidence) >= CACHE_LIMIT:
                self._evidence.clear()
        elif known.structure != found.structure:
            found = found._replace(contradiction="its output changes its structure")
        else:
            found = self._combine(known, found, group, arrays)
        self._evidence[key] = found
        return found

    def _combine(
        self, known: _Evidence, found: _Evidence, group: Any, arrays: list[tuple[Path, Any]]
    ) -> _Evidence:
        """Return the evidence of one more run, alone if it contradicts the `known` runs."""
        axes = [
            _Axis(one.size if one.size == other.size else None, one.follows & other.follows)
            for one, other in zip(known.axes, found.axes, strict=True)
        ]
        explained = [axis.size is not None or bool(axis.follows) for axis in axes]
        if all(explained):
            shortest = known.shortest
            if not _is_covered(found.padded, shortest):
                kept = [run for run in shortest if not _is_covered(run, [found.padded])]
                shortest = [found.padded, *kept]
            return found._replace(
                axes=axes,
                shortest=shortest,
                orders=known.orders | found.orders,
                contradiction=known.contradiction if found.padded == known.padded else "",
            )
        odd = explained.index(False)
        path, number = [
            (path, number) for path, array in arrays for number in range(1, array.ndim)
        ][odd]
        axis = f"axis {number} of {describe(path)}"
        pairs = (known.sizes[odd], known.rows), (found.sizes[odd], found.rows)
        if all(size == rows for size, rows in pairs) and "rows" not in self._warned:
            self._warned.add("rows")
            logger.warning(
                "%s: %s is as long as the batch has rows: %d of %d, %d of %d. Rows that see each "
                "other get results that depend on other callers; a result must depend on its own "
                "row alone",
                *(self._name, axis, *pairs[0], *pairs[1]),
            )
        widths = ", ".join(
            f"{spec.name} to {width}"
            for spec, width in zip(group.specs, found.padded, strict=True)
            if spec.is_sequence
        )
        return found._replace(
            contradiction=f"{axis} varies but follows no feature: it has {found.sizes[odd]} "
            f"entries where rows were padded, {widths}"
        )

    def _apply_declared(
        self, group: Any, arrays: list[tuple[Path, Any]], padded: Widths
    ) -> list[Cuts]:
        """Return the cuts that the setting `unpad` declares."""
        assert isinstance(self._unpad, Mapping)
        names = [spec.name for spec in group.specs]
        found: list[dict[int, int]] = [{} for _ in arrays]
        for place, axes in self._unpad.items():
            under = [
                number
                for number, (path, _) in enumerate(arrays)
                if not place or f"{dotted_path(path)}.".startswith(f"{place}.")
            ]
            if not under:
                raise BatchFunctionError(
                    f"{self._name}: unpad speaks of {place!r}, which is not "
                    "in the output: " + ", ".join(repr(dotted_path(path)) for path, _ in arrays)
                )
            for number in under:
                path, array = arrays[number]
                for declared, name in axes.items():
                    axis = declared if declared >= 0 else declared + array.ndim
                    if name not in names:
                        raise BatchFunctionError(
                            f"{self._name}: unpad speaks of a feature "
                            f"{name!r}; there are {', '.join(names)}"
                        )
                    feature = names.index(name)
                    if not 0 < axis < array.ndim or array.shape[axis] != padded[feature]:
                        raise BatchFunctionError(
                            f"{self._name}: unpad says that axis {declared} of {describe(path)} "
                            f"follows {name}, which was padded to "
                            f"{padded[feature]}, but its shape is {tuple(array.shape)}"
                        )
                    found[number][axis] = feature
        return [tuple(cuts.items()) for cuts in found]


def _is_covered(widths: Widths, runs: list[Widths]) -> bool:
    """Return whether one of `runs` was padded to no more than `widths` in each feature."""
    return any(all(map(le, run, widths)) for run in runs)


@lru_cache(CACHE_LIMIT)
def order(widths: Widths) -> Widths:
    """Return the place of each feature among all lengths, the shortest first."""
    lengths = sorted(set(widths))
    return tuple(map(lengths.index, widths))
