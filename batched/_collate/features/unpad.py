"""Removal of padding from outputs: the rule learns which axes follow which feature.

A run is one call of the batch function. The rows of each feature are padded to one width in a run.
An axis of the output either has one size in all runs (the size of hidden states, say) or follows a
feature: in each run, the axis is as long as the padded width of that feature. An axis that follows
a feature is cut to each caller's own width. The evidence is outputs of runs of different widths.

1. Callers with rows of different widths share a run under three conditions:
   a. All possible explanations of an axis give the same size for each caller.
   b. For each caller, a run was seen whose padded widths were at most the caller's own, in every
      feature. Otherwise, an axis that is constant for long rows alone would look constant.
   c. If an axis follows a feature, a run was seen in which the features have the same order by
      length as the caller's. So an axis that follows the longer of two features has shown it.
2. Otherwise, rows of some widths run apart, one width at a time. Nothing is padded in these runs,
   so nothing must be cut, and their outputs are evidence.
3. A run that contradicts the evidence replaces the evidence. Until a run of other widths agrees
   with the new evidence, rows of each width run apart.
4. An axis that contradicts the evidence, and was as long as the batch had rows in all runs, of at
   least three numbers of rows, causes a warning: the function lets rows see each other.
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

PaddedWidths = Mapping[Widths, Widths]
"""Widths of callers' rows, shortest first, each with its padded widths in a run of its own."""

Cuts = tuple[tuple[int, int], ...]
"""Axes of one array that are cut, each with the index of the feature that it follows."""

CACHE_LIMIT: Final = 256
"""Most kinds of calls with evidence. A kind is the extra arguments and the feature specs."""

ROW_COUNTS: Final = 3
"""Numbers of rows after which an axis that was as long as each of them is no coincidence."""

logger = logging.getLogger("batched")


class _Axis(NamedTuple):
    """Explanations of the sizes that one axis had: those that fit all runs."""

    size: int | None  # the size in all runs; None: it varied
    follows: frozenset[int]  # indices of the features that were padded to its size in all runs

    def is_open(self, callers: Collection[Widths]) -> bool:
        """Return whether the explanations give different sizes for one of `callers`."""
        widths = list(zip(*callers, strict=True))  # for each feature, the widths of all callers
        possible = {widths[feature] for feature in self.follows}
        if self.size is not None:
            possible.add((self.size,) * len(callers))
        return len(possible) > 1


class _Evidence(NamedTuple):
    """Evidence from those runs of one kind of calls that agree with each other."""

    structure: tuple[tuple[Path, int], ...]  # of each array, its path and number of axes
    axes: list[_Axis]  # all axes but the first of each array, array by array
    shortest: list[Widths]  # padded widths of the shortest runs
    orders: frozenset[Widths]  # the results of `order` for all runs
    padded: Widths  # padded widths in the last run
    sizes: Widths  # sizes of `axes` in the last run
    # for each axis, the numbers of rows of all runs, if it was as long in each; else empty
    squares: list[frozenset[int]]
    contradiction: str = ""  # how the last run contradicts earlier ones; "": it does not


class Unpadding:
    """Evidence from the outputs of one batch function, and the rule by which to cut them."""

    def __init__(self, name: str, settings: FeatureSettings, warned: set[str]) -> None:
        self._name = name  # of the batch function, for messages
        self._unpad = settings.unpad
        self._warned = warned  # names of the warnings that were logged
        self._evidence: dict[Hashable, _Evidence] = {}  # by kind of calls, see CACHE_LIMIT

    def warn(self, text: str) -> None:
        """Log, once, that axes of the output cannot be learned, and how to declare them."""
        if "unpad" not in self._warned:
            self._warned.add("unpad")
            logger.warning(
                "%s: %s. unpad={...} declares the feature that an axis follows, unpad=False keeps "
                "all axes whole",
                self._name,
                text,
            )

    def find_apart(self, group: Any, callers: PaddedWidths) -> Collection[Widths]:
        """Return the widths of callers that must run apart, as known before the run."""
        evidence = self._evidence.get((frozenset(group.arguments), group.specs))
        return () if evidence is None else self._find_apart(evidence, (), callers)

    def find_cuts(
        self, group: Any, arrays: list[tuple[Path, Any]], padded: Widths, callers: PaddedWidths
    ) -> tuple[list[Cuts], Collection[Widths]]:
        """Return the cuts of each array of an output, and widths of callers that must run apart.

        `padded` are the padded widths of the run. `callers` is empty if nothing was padded. Callers
        must run apart if the sizes of their shares of the output are not certain.

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
        self, evidence: _Evidence, axes: Collection[_Axis], callers: PaddedWidths
    ) -> Collection[Widths]:
        """Return the widths of callers that must run apart if the output has these `axes`."""
        if not callers or not evidence.axes:
            return ()
        if evidence.contradiction:
            self.warn(f"{evidence.contradiction}, so calls of different length run apart")
            return callers
        least = tuple(map(min, zip(*callers.values(), strict=True)))
        covered = _is_covered(least, evidence.shortest)
        follows = any(axis.follows for axis in axes)
        unclear = [axis for axis in axes if axis.is_open(callers)]
        # the evidence as it will be after the runs apart; all other callers share one run
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
        """Return the evidence after a run with the padded widths `padded`."""
        key = frozenset(group.arguments), group.specs  # keeps no argument alive
        sizes = tuple(chain.from_iterable([array.shape[1:] for _, array in arrays]))
        following = {  # for each size, the features that were padded to it
            size: frozenset([number for number, width in enumerate(padded) if width == size])
            for size in set(sizes)
        }
        rows = len(arrays[0][1])
        found = _Evidence(
            structure=tuple([(path, array.ndim) for path, array in arrays]),
            axes=[_Axis(size, following[size]) for size in sizes],
            shortest=[padded],
            orders=frozenset([order(padded)]),
            padded=padded,
            sizes=sizes,
            squares=[frozenset({rows}) if size == rows else frozenset() for size in sizes],
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
        """Return `known` with one more run, or the run alone if it contradicts `known`."""
        axes = [
            _Axis(one.size if one.size == other.size else None, one.follows & other.follows)
            for one, other in zip(known.axes, found.axes, strict=True)
        ]
        squares = [
            one | other if one and other else frozenset[int]()
            for one, other in zip(known.squares, found.squares, strict=True)
        ]
        found = found._replace(squares=squares)
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
        odd = explained.index(False)  # index of the first axis without explanation
        path, number = [
            (path, number) for path, array in arrays for number in range(1, array.ndim)
        ][odd]
        axis = f"axis {number} of {describe(path)}"
        if len(squares[odd]) >= ROW_COUNTS and "rows" not in self._warned:
            self._warned.add("rows")
            logger.warning(
                "%s: %s is as long as the batch has rows, with %s rows. Rows that see each other "
                "get results that depend on other callers; a result must depend on its own row "
                "alone",
                *(self._name, axis, ", ".join(map(str, sorted(squares[odd])))),
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
                    f"{self._name}: unpad names {place!r}, which is not in the output; its paths "
                    "are "
                    + ", ".join(repr(dotted_path(path)) for path, _ in arrays)
                    + "; '' is the whole output"
                )
            for number in under:
                path, array = arrays[number]
                for declared, name in axes.items():
                    axis = declared if declared >= 0 else declared + array.ndim
                    if name not in names:
                        raise BatchFunctionError(
                            f"{self._name}: unpad names the feature {name!r}; "
                            f"the features are {', '.join(names)}"
                        )
                    feature = names.index(name)
                    if not 0 < axis < array.ndim or array.shape[axis] != padded[feature]:
                        raise BatchFunctionError(
                            f"{self._name}: unpad says that axis {declared} of {describe(path)} "
                            f"follows {name}, which was padded to {padded[feature]}, but the "
                            f"output has the shape {tuple(array.shape)}"
                        )
                    found[number][axis] = feature
        return [tuple(cuts.items()) for cuts in found]


def _is_covered(widths: Widths, runs: list[Widths]) -> bool:
    """Return whether some run was at most as wide as `widths` in every feature."""
    return any(all(map(le, run, widths)) for run in runs)


@lru_cache(CACHE_LIMIT)
def order(widths: Widths) -> Widths:
    """Return the rank of each feature by its width, from 0; equal widths have equal ranks."""
    lengths = sorted(set(widths))
    return tuple(map(lengths.index, widths))
