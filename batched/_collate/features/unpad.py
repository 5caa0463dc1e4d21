"""Evidence of the feature that each axis of an output follows, so that axes are cut for callers.

An axis either has one size at all times (that of hidden states) or follows a feature: the axis is
as long as the rows of that feature were padded. The evidence are outputs of runs that were padded
to different widths.

1. Callers with rows of different widths share a run under two conditions. All explanations of an
   axis give the same size for each caller. And a run as short as the shortest caller was seen: an
   axis of one size in both has this size for every caller, and an axis that changes, in steps or up
   to some length only, has changed.
2. Until then, rows of some width run apart. Nothing has to be known about these runs, since nothing
   in them is padded, and their outputs are evidence.
3. A run that contradicts the evidence replaces the evidence. Until another run agrees with it, the
   explanation of an axis is unknown, and rows of each width run apart.
4. Evidence is forgotten after a number of runs.
5. An axis that was as long as the batch had rows, in two runs of the same widths, causes a warning:
   the function lets rows see each other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Hashable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from operator import ge, le
from typing import Any, Final, NamedTuple

from ...errors import BatchFunctionError
from .outputs import Path, describe, dotted_path
from .settings import FeatureSettings

Widths = tuple[int, ...]
"""Length of the rows of each feature of a group, in the order of its specs."""

Sizes = tuple[int, ...]
"""Sizes of one axis in several runs; or of all axes behind the first, array by array, in one."""

Callers = Mapping[Widths, Widths]
"""Widths of the rows of callers, the shortest first, with the widths padded to in runs alone."""

Cuts = tuple[tuple[int, int], ...]
"""Axes of one array to be cut, each with the number of the feature that it follows."""

CACHE_LIMIT: Final = 256
"""Limit of kinds of calls with evidence, and of axes with explanations."""

LIFETIME: Final = 1000
"""Runs after which evidence is gathered anew, which takes one or two more runs.

That is rare enough to cost nothing, and often enough for a model that was replaced in silence.
"""

logger = logging.getLogger("batched")


class _Axis(NamedTuple):
    """Explanations of the sizes that one axis had in several runs."""

    size: int | None  # the only size; None: there were several
    follows: tuple[int, ...]  # features that were always padded to its size
    longest: tuple[int, ...]  # features of which the longest was always padded to its size
    shortest: tuple[int, ...]  # features of which the shortest was always padded to its size
    divisor: int  # of all its sizes, which may be rounded up to multiples of it

    @property
    def is_explained(self) -> bool:
        return self.size is not None or bool(self.follows)

    def find_undecided(self, own: list[Widths], alone: list[Widths]) -> Iterator[int]:
        """Yield positions of callers with explanations that differ.

        For each feature, `own` holds the widths of all callers, and `alone` the widths padded to.
        """
        possible = {own[feature] for feature in self.follows}
        if self.size is not None:
            possible.add((self.size,) * len(own[0]))
        for pick, features in ((max, self.longest), (min, self.shortest)):
            if features != self.follows:
                widths = zip(*[own[feature] for feature in features], strict=True)
                possible.add(tuple(map(pick, widths)))
        if len(possible) > 1:
            yield [len(set(sizes)) > 1 for sizes in zip(*possible, strict=True)].index(True)
        if self.size is None and self.divisor > 1:
            for position, width in enumerate(alone[self.follows[0]]):
                if width % self.divisor:
                    yield position


@lru_cache(CACHE_LIMIT)
def _explain(sizes: Sizes, padded: tuple[Widths, ...]) -> _Axis:
    """Return explanations of an axis that had these sizes in runs `padded` to these widths."""
    features = list(enumerate(zip(*padded, strict=True)))  # each with its widths in the runs
    below = tuple([number for number, widths in features if all(map(le, widths, sizes))])
    above = tuple([number for number, widths in features if all(map(ge, widths, sizes))])
    most = map(max, zip(*[features[number][1] for number in below], strict=True))
    least = map(min, zip(*[features[number][1] for number in above], strict=True))
    return _Axis(
        size=sizes[0] if len(set(sizes)) == 1 else None,
        follows=tuple([number for number in below if number in above]),
        longest=below if tuple(most) == sizes else (),
        shortest=above if tuple(least) == sizes else (),
        divisor=math.gcd(*sizes),
    )


class _Evidence:
    """Evidence from runs of one kind of calls that do not contradict each other."""

    __slots__ = ("age", "axes", "contradiction", "rows", "runs", "structure")

    def __init__(
        self,
        structure: tuple[tuple[Path, int], ...],
        runs: dict[Widths, Sizes],
        rows: dict[Widths, int],
        contradiction: str = "",
        age: int = 0,
    ) -> None:
        self.structure = structure  # of each array, its path and number of axes
        self.runs = runs  # by the widths to which features were padded; never changed
        self.rows = rows  # in each of the runs
        self.contradiction = contradiction  # of the only run with earlier runs
        self.age = age  # in runs, also without new evidence
        every = list(zip(*runs.values(), strict=True))
        explained = {sizes: _explain(sizes, tuple(runs)) for sizes in set(every)}  # most are alike
        self.axes = [explained[sizes] for sizes in every]  # behind the first, array by array

    def find_undecided(self, axes: set[_Axis], padded: Widths, callers: Callers) -> Widths | None:
        """Return widths of a caller if the length of these axes is undecided for it, or None.

        The run is `padded` to these widths.
        """
        if not self.axes or not callers:
            return None
        own, alone = list(zip(*callers, strict=True)), list(zip(*callers.values(), strict=True))
        seen = [padded, *self.runs]
        below: list[int] = []
        if not any(all(map(le, run, map(min, alone))) for run in seen):  # shorter than all callers
            below = [
                position
                for position, widths in enumerate(callers.values())
                if not any(all(map(le, run, widths)) for run in seen)
            ]
        position = next(chain(below, *[axis.find_undecided(own, alone) for axis in axes]), None)
        return None if position is None else list(callers)[position]


class Unpadding:
    """Evidence from the outputs of one batch function, and the rule by which to cut them."""

    def __init__(self, name: str, settings: FeatureSettings, told: set[str]) -> None:
        self._name = name  # of the batch function, for messages
        self._unpad = settings.unpad
        self._told = told  # warnings that have been given
        self._evidence: dict[Hashable, _Evidence] = {}  # by kind of calls; keeps none alive

    def find_apart(self, group: Any, padded: Widths, callers: Callers) -> Collection[Widths]:
        """Return widths of callers that have to run apart; often empty.

        An output for all callers, `padded` to these widths, is known to leave their shares open.
        """
        evidence = self._evidence.get((group.arguments.key, group.specs))
        if evidence is None:  # it may have no axes at all
            return ()
        if evidence.contradiction:
            self._warn(f"{evidence.contradiction}, so calls of different length run apart")
            return callers
        axes = set(evidence.axes) if padded in evidence.runs else set()
        found = evidence.find_undecided(axes, padded, callers)
        return () if found is None else (found,)

    def find_cuts(
        self,
        group: Any,
        arrays: list[tuple[Path, Any]],
        padded: Widths,
        callers: Callers,
        *,
        alone: bool = False,
    ) -> tuple[list[Cuts], Collection[Widths]]:
        """Return the cuts of each array of an output, and widths of callers that must run apart.

        The run was `padded` to these widths, for these callers; there are none if nothing was
        padded. Callers must run apart if the output leaves their share open. If they ran `alone`,
        their output is not cut.

        Raises:
            BatchFunctionError: an axis is not as declared.
        """
        if self._unpad is False:
            return [()] * len(arrays), ()
        if self._unpad != "auto":
            return self._apply_declared(group, arrays, padded), ()
        evidence = self._observe(group, arrays, padded)
        found = evidence.find_undecided(set(evidence.axes), padded, callers)
        if found is not None and not alone:
            return [], callers if evidence.contradiction else (found,)
        if found is not None:
            self._warn(
                "what its output has to do with the length of rows is unknown, for it fails where "
                "they are padded in another way; so some of them are not cut"
            )
        axes = iter(evidence.axes)
        return [
            tuple(
                (number, axis.follows[0])
                for number, axis in zip(range(1, array.ndim), axes, strict=False)
                if axis.size is None
            )
            for _, array in arrays
        ], ()

    def _observe(self, group: Any, arrays: list[tuple[Path, Any]], padded: Widths) -> _Evidence:
        """Return the evidence after a run `padded` to these widths."""
        key = group.arguments.key, group.specs
        structure = tuple([(path, array.ndim) for path, array in arrays])
        run = {padded: tuple(chain.from_iterable([array.shape[1:] for _, array in arrays]))}
        rows = {padded: len(arrays[0][1])} if arrays else {}
        known = self._evidence.get(key)
        if known is not None:
            known.age += 1
        if known is None or known.age > LIFETIME:
            if len(self._evidence) >= CACHE_LIMIT:
                self._evidence.clear()
            found = _Evidence(structure, run, rows)
        elif known.structure != structure:
            found = _Evidence(structure, run, rows, "its output changes its structure")
        elif known.runs.get(padded) == run[padded]:
            return known
        else:
            self._warn_of_rows(known, arrays, padded, run[padded])
            found = _Evidence(
                structure, {**known.runs, **run}, {**known.rows, **rows}, age=known.age
            )
            explained = [axis.is_explained for axis in found.axes]
            least = [min(widths) for widths in zip(*known.runs, strict=True)]
            if not all(explained):
                odd = _describe_odd_axis(group, arrays, padded, explained.index(False))
                found = _Evidence(structure, run, rows, odd)
            elif (
                not known.contradiction and found.axes == known.axes and all(map(ge, padded, least))
            ):
                return known  # it tells nothing new
        self._evidence[key] = found
        return found

    def _warn_of_rows(
        self, known: _Evidence, arrays: list[tuple[Path, Any]], padded: Widths, sizes: Sizes
    ) -> None:
        """Warn once of an axis that is as long as the batch has rows, alone and in company."""
        if "rows" in self._told or padded not in known.runs:
            return
        rows, before = len(arrays[0][1]), known.rows[padded]
        for position, pair in enumerate(zip(known.runs[padded], sizes, strict=True)):
            if rows != before and pair == (before, rows):
                self._told.add("rows")
                path, number, _ = _axes(arrays)[position]
                logger.warning(
                    "%s: axis %d of %s is as long as the batch has rows: %d of %d, %d of %d. Rows "
                    "that see each other get results that depend on other callers; a result must "
                    "depend on its own row alone",
                    *(self._name, number, describe(path), before, before, rows, rows),
                )
                return

    def _warn(self, text: str) -> None:
        if "unpad" not in self._told:
            self._told.add("unpad")
            logger.warning(
                "%s: %s. unpad={...} declares what an axis follows, unpad=False keeps all axes "
                "whole",
                self._name,
                text,
            )

    def _apply_declared(
        self, group: Any, arrays: list[tuple[Path, Any]], padded: Widths
    ) -> list[Cuts]:
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
                    f"in the output: {_describe_paths(arrays)}"
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


def _axes(arrays: list[tuple[Path, Any]]) -> list[tuple[Path, int, int]]:
    """Return path, number and size of all axes behind the first, array by array."""
    return [
        (path, number, size)
        for path, array in arrays
        for number, size in enumerate(array.shape)
        if number
    ]


def _describe_odd_axis(
    group: Any, arrays: list[tuple[Path, Any]], padded: Widths, position: int
) -> str:
    """Return a phrase for the axis that no feature explains, by its position among all axes."""
    path, number, size = _axes(arrays)[position]
    return (
        f"axis {number} of {describe(path)} varies but follows no feature: it has {size} entries "
        f"where rows were padded, {_describe_widths(group, padded)}"
    )


def _describe_widths(group: Any, padded: Widths) -> str:
    return ", ".join(
        f"{spec.name} to {width}"
        for spec, width in zip(group.specs, padded, strict=True)
        if spec.is_sequence
    )


def _describe_paths(arrays: list[tuple[Path, Any]]) -> str:
    return ", ".join(repr(dotted_path(path)) for path, _ in arrays)
