"""Evidence of which axes of an output follow which feature, so that each caller gets them as long
as its own rows were.

An axis either has one size at all times (that of hidden states) or follows a feature: it is as long
as the rows of that were padded. Each batch rules out what it contradicts. An output is split among
callers with rows of different widths once

1. batches have been padded to different widths, one of them as short as the shortest caller's: an
   axis that had one size in all of them then has it for every caller, and one that changes, be it
   in steps or up to some length only, has shown it. The same goes for the number of rows, if an
   axis is as large;
2. all that is still possible of an axis gives the same size for each caller.

Where that is not so, a row of such a caller is run alone: its output is what the caller would have
got.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import BatchFunctionError
from .outputs import Path, describe, dotted_path
from .settings import FeatureSettings

Widths = tuple[int, ...]
"""Length of the rows of each feature of a group, in the order of its specs."""

Shape = tuple[int, ...]

Cuts = tuple[tuple[int, int], ...]
"""Axes of one array that are to be cut, each with the number of the feature that it follows."""

CACHE_LIMIT: Final = 256
"""Most kinds of outputs, by group and structure, of which evidence is kept."""


class Ambiguous(Exception):
    """More than one thing is possible of an axis; the output for a row of `widths` alone tells them
    apart.
    """

    def __init__(self, widths: Widths) -> None:
        super().__init__(widths)
        self.widths = widths


@dataclass(frozen=True)
class _Axis:
    """Possibilities that are left for one axis."""

    size: int  # that it had first
    fixed: bool  # whether it never had another
    follows: frozenset[int]  # features that were always padded to its size

    def narrow(self, size: int, padded: Widths) -> _Axis:
        """The axis without what this size rules out, in a batch `padded` to these widths."""
        fixed = self.fixed and size == self.size
        follows = self.follows
        if follows and any(padded[number] != size for number in follows):
            follows = frozenset(number for number in follows if padded[number] == size)
        return (
            self
            if fixed is self.fixed and follows is self.follows
            else _Axis(self.size, fixed, follows)
        )

    def find_feature(self, size: int, callers: Sequence[Widths]) -> int | None:
        """Feature by which to cut the axis, of this size, for all these callers; None: leave it.

        Raises:
            Ambiguous: the possibilities give different sizes for one of them.
            LookupError: no possibility is left.
        """
        if not self.follows:
            if not self.fixed:
                raise LookupError
            return None
        one, *others = self.follows
        if not self.fixed and not others:
            return one
        for widths in callers:
            own = widths[one]
            if (self.fixed and own != size) or any(widths[other] != own for other in others):
                raise Ambiguous(widths)
        return None if self.fixed else one


class _Evidence:
    """Evidence from outputs of one structure: the possibilities that are left for each axis, and
    the range of widths and rows seen.
    """

    __slots__ = ("_latest", "_longest", "_rows", "_shortest", "axes")

    def __init__(self, shapes: list[Shape], padded: Widths, features: frozenset[int]) -> None:
        # of each array behind its first axis
        self.axes = [[_Axis(size, True, features) for size in shape] for shape in shapes]
        # least and greatest width to which each feature was padded
        self._shortest = self._longest = padded
        self._rows: set[int] = set()  # numbers of rows of batches: two of them are enough
        self._latest: Any = None  # rows, shapes and widths of the latest batch

    def observe(self, rows: int, shapes: list[Shape], padded: Widths) -> None:
        """Rules out what a batch contradicts that was `padded` to these widths and whose output had
        arrays [rows, *shape].
        """
        latest = rows, shapes, padded
        if latest == self._latest:
            return
        if len(self._rows) < 2:
            self._rows = {*self._rows, rows}
        self.axes = [
            [axis.narrow(size, padded) for axis, size in zip(axes, shape, strict=True)]
            for axes, shape in zip(self.axes, shapes, strict=True)
        ]
        self._shortest = tuple(map(min, self._shortest, padded))
        self._longest = tuple(map(max, self._longest, padded))
        self._latest = latest

    def check(
        self, padded: Widths, callers: Sequence[Widths], round_up: Callable[[int], int]
    ) -> None:
        """Returns if batches have shown what becomes of the widths in which these callers differ
        from the batch `padded` so.

        Raises:
            Ambiguous: they have not.
        """
        if not callers or not any(self.axes):
            return
        rows, shapes, _ = self._latest
        if rows > 1 and len(self._rows) < 2 and any(rows in shape for shape in shapes):
            raise Ambiguous(callers[0])
        for widths in callers:
            for own, long, least, most in zip(
                widths, padded, self._shortest, self._longest, strict=True
            ):
                if own != long and (least == most or least > round_up(own)):
                    raise Ambiguous(widths)


class Unpadding:
    """Evidence from the outputs of one batch function, and the rule by which to cut them."""

    def __init__(self, name: str, settings: FeatureSettings) -> None:
        self._name = name  # of the batch function, for error messages
        self._unpad = settings.unpad
        self._round_up = settings.round_up
        self._evidence: dict[
            Hashable, _Evidence
        ] = {}  # by group and structure; keeps no arguments alive

    def find_cuts(
        self,
        group: Any,
        arrays: list[tuple[Path, Any]],
        padded: Widths,
        callers: Sequence[Widths],
        unclear: Container[Widths] = (),
    ) -> list[Cuts]:
        """Cuts of each array of an output of a batch `padded` to these widths, for callers whose
        rows have theirs.

        For those that are `unclear` no probe shows it: an axis that is as long as no feature was
        padded is taken for fixed.

        Raises:
            Ambiguous: a probe has to show it.
            BatchFunctionError: an axis depends on the batch in a way that no feature explains, or
                not as declared.
        """
        if self._unpad is False:
            return [()] * len(arrays)
        if self._unpad != "auto":
            return self._apply_declared(group, arrays, padded)
        evidence = self._observe(group, arrays, padded)
        evidence.check(
            padded, [widths for widths in callers if widths not in unclear], self._round_up
        )
        cuts: list[Cuts] = []
        for (path, array), axes in zip(arrays, evidence.axes, strict=True):
            found: list[tuple[int, int]] = []
            for number, axis in enumerate(axes, 1):
                try:
                    feature = axis.find_feature(array.shape[number], callers)
                except LookupError:
                    raise BatchFunctionError(
                        f"{self._name}: axis {number} of {describe(path)} varies but follows no "
                        f"feature: it has {array.shape[number]} entries "
                        f"where rows were padded, {_describe_widths(group, padded)}; so no "
                        f"caller's share of it can be told. unpad={{...}} "
                        "declares what an axis follows, unpad=False keeps all axes whole"
                    ) from None
                if feature is not None:
                    found.append((number, feature))
            cuts.append(tuple(found))
        return cuts

    def learn(self, group: Any, arrays: list[tuple[Path, Any]], padded: Widths) -> None:
        """Rules out what the output of a batch contradicts that was `padded` to these widths."""
        if self._unpad == "auto":
            self._observe(group, arrays, padded)
        elif self._unpad:
            self._apply_declared(group, arrays, padded)

    def unclear_error(self, group: Any, padded: Widths, error: BaseException) -> BatchFunctionError:
        """Error for callers for whom no probe shows, because it raised `error`, how to cut the
        output of a batch `padded` to these widths.
        """
        found = BatchFunctionError(
            f"{self._name}: what its output has to do with the length of rows, "
            f"{_describe_widths(group, padded)}, cannot be told: for a row of "
            f"another length it raised {error!r}. unpad={{...}} declares what an axis follows, "
            "unpad=False keeps all axes whole"
        )
        found.__cause__ = error
        return found

    def _observe(self, group: Any, arrays: list[tuple[Path, Any]], padded: Widths) -> _Evidence:
        key = (
            group.arguments.key,
            group.specs,
            tuple([(path, len(array.shape)) for path, array in arrays]),
        )
        shapes = [tuple(array.shape[1:]) for _, array in arrays]
        evidence = self._evidence.get(key)
        if evidence is None:
            features = frozenset(
                [number for number, spec in enumerate(group.specs) if spec.is_sequence]
            )
            if len(self._evidence) >= CACHE_LIMIT:
                self._evidence.clear()
            evidence = self._evidence.setdefault(key, _Evidence(shapes, padded, features))
        evidence.observe(len(arrays[0][1]), shapes, padded)
        return evidence

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


def _describe_widths(group: Any, padded: Widths) -> str:
    return ", ".join(
        f"{spec.name} to {width}"
        for spec, width in zip(group.specs, padded, strict=True)
        if spec.is_sequence
    )


def _describe_paths(arrays: list[tuple[Path, Any]]) -> str:
    return ", ".join(repr(dotted_path(path)) for path, _ in arrays)
