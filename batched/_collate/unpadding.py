"""Which axes of an output follow which feature, so that each caller gets them as long as its own
rows were.

An axis either has always the same size (that of hidden states) or follows a feature (as long as its
rows were padded). Each batch rules out what it contradicts. An output is split among callers with
rows of different lengths once

1. batches have been padded to different lengths, one of them as short as the shortest caller's:
   what always had one size then has it for all of them, and what changes, be it in steps or up to
   some length only, has shown it. The same goes for the number of rows, if an axis is as large;
2. all that is still possible of an axis comes to the same size for every caller.

Where that is not so, a row of such a caller is run alone: what the function makes of it is what the
caller would have got.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import BatchFunctionError
from .outputs import Path, named, said
from .settings import FeatureSettings

Widths = tuple[int, ...]
"""The length of rows of each feature."""

Shape = tuple[int, ...]

Cuts = tuple[tuple[int, int], ...]
"""The axes of one array to be cut, each with the number of the feature that it follows."""

REMEMBERED: Final = 256
"""Kinds of outputs, by group and structure, of which the axes are known at a time."""


class Ambiguous(Exception):
    """More than one thing is possible; a row of a caller whose rows are of these lengths tells them
    apart.
    """

    def __init__(self, widths: Widths) -> None:
        super().__init__(widths)
        self.widths = widths


@dataclass(frozen=True)
class _Axis:
    """What is still possible of one axis."""

    size: int  # that it had first
    fixed: bool  # whether it never had another
    follows: frozenset[int]  # features that were always padded to its size

    def seen(self, size: int, padded: Widths) -> _Axis:
        """With what is ruled out by this size in a batch padded to these lengths."""
        fixed = self.fixed and size == self.size
        follows = self.follows
        if follows and any(padded[number] != size for number in follows):
            follows = frozenset(number for number in follows if padded[number] == size)
        return (
            self
            if fixed is self.fixed and follows is self.follows
            else _Axis(self.size, fixed, follows)
        )

    def follower(self, size: int, callers: Sequence[Widths]) -> int | None:
        """The feature to cut it by, for all these callers; None: it is not to be cut.

        Raises:
            Ambiguous: what is possible does not come to the same for all of them.
            LookupError: nothing is possible.
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


class _Known:
    """What is known of outputs of one structure."""

    __slots__ = ("_latest", "_longest", "_rows", "_shortest", "axes")

    def __init__(self, shapes: list[Shape], padded: Widths, features: frozenset[int]) -> None:
        # those of each array behind the first
        self.axes = [[_Axis(size, True, features) for size in shape] for shape in shapes]
        # to what each feature was padded at least and at most
        self._shortest = self._longest = padded
        self._rows: set[int] = set()  # how many rows batches had: two numbers are enough
        self._latest: Any = None  # what was seen last

    def see(self, rows: int, shapes: list[Shape], padded: Widths) -> None:
        """Rules out what a batch contradicts that was padded to these lengths and gave arrays of
        these shapes behind the first axis.
        """
        latest = rows, shapes, padded
        if latest == self._latest:
            return
        if len(self._rows) < 2:
            self._rows = {*self._rows, rows}
        self.axes = [
            [axis.seen(size, padded) for axis, size in zip(axes, shape, strict=True)]
            for axes, shape in zip(self.axes, shapes, strict=True)
        ]
        self._shortest = tuple(map(min, self._shortest, padded))
        self._longest = tuple(map(max, self._longest, padded))
        self._latest = latest

    def check(
        self, padded: Widths, callers: Sequence[Widths], rounded: Callable[[int], int]
    ) -> None:
        """Passes if batches have told what becomes of the lengths in which these callers differ.

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
                if own != long and (least == most or least > rounded(own)):
                    raise Ambiguous(widths)


class Unpadding:
    """What is known of the outputs of one batch function."""

    def __init__(self, name: str, settings: FeatureSettings) -> None:
        self._name = name  # of the batch function, for error messages
        self._unpad = settings.unpad
        self._rounded = settings.rounded
        self._known: dict[Hashable, _Known] = {}  # by group and structure; keeps no arguments alive

    def cuts(
        self,
        group: Any,
        arrays: list[tuple[Path, Any]],
        padded: Widths,
        callers: Sequence[Widths],
        unclear: Container[Widths] = (),
    ) -> list[Cuts]:
        """For each array of an output, what is to be cut of it, for callers with rows of these
        lengths.

        For those that are `unclear`, no probe can tell: an axis that is as long as no feature was
        padded is taken for fixed.

        Raises:
            Ambiguous: a probe has to tell.
            BatchFunctionError: an axis depends on the batch in a way that no feature explains, or
                not as declared.
        """
        if self._unpad is False:
            return [()] * len(arrays)
        if self._unpad != "auto":
            return self._declared(group, arrays, padded)
        known = self._seen(group, arrays, padded)
        known.check(padded, [widths for widths in callers if widths not in unclear], self._rounded)
        cuts: list[Cuts] = []
        for (path, array), axes in zip(arrays, known.axes, strict=True):
            found: list[tuple[int, int]] = []
            for number, axis in enumerate(axes, 1):
                try:
                    feature = axis.follower(array.shape[number], callers)
                except LookupError:
                    raise BatchFunctionError(
                        f"{self._name}: axis {number} of {named(path)} varies but follows no "
                        f"feature: it has {array.shape[number]} entries "
                        f"where rows were padded, {_lengths(group, padded)}; so no caller's share "
                        f"of it can be told. unpad={{...}} "
                        "declares what an axis follows, unpad=False keeps all axes whole"
                    ) from None
                if feature is not None:
                    found.append((number, feature))
            cuts.append(tuple(found))
        return cuts

    def learn(self, group: Any, arrays: list[tuple[Path, Any]], padded: Widths) -> None:
        """Takes notice of what the function made of a batch padded to these lengths."""
        if self._unpad == "auto":
            self._seen(group, arrays, padded)
        elif self._unpad:
            self._declared(group, arrays, padded)

    def unclear(self, group: Any, padded: Widths, error: BaseException) -> BatchFunctionError:
        """What callers are told of whom no probe can tell, because of `error`, how to cut an output
        padded to these lengths.
        """
        found = BatchFunctionError(
            f"{self._name}: what its output has to do with the length of rows, "
            f"{_lengths(group, padded)}, cannot be told: for a row of "
            f"another length it raised {error!r}. unpad={{...}} declares what an axis follows, "
            "unpad=False keeps all axes whole"
        )
        found.__cause__ = error
        return found

    def _seen(self, group: Any, arrays: list[tuple[Path, Any]], padded: Widths) -> _Known:
        key = (
            group.arguments.key,
            group.fields,
            tuple([(path, len(array.shape)) for path, array in arrays]),
        )
        shapes = [tuple(array.shape[1:]) for _, array in arrays]
        known = self._known.get(key)
        if known is None:
            features = frozenset(
                [number for number, field in enumerate(group.fields) if field.is_sequence]
            )
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            known = self._known.setdefault(key, _Known(shapes, padded, features))
        known.see(len(arrays[0][1]), shapes, padded)
        return known

    def _declared(self, group: Any, arrays: list[tuple[Path, Any]], padded: Widths) -> list[Cuts]:
        assert isinstance(self._unpad, Mapping)
        names = [field.name for field in group.fields]
        found: list[dict[int, int]] = [{} for _ in arrays]
        for place, axes in self._unpad.items():
            under = [
                number
                for number, (path, _) in enumerate(arrays)
                if not place or f"{said(path)}.".startswith(f"{place}.")
            ]
            if not under:
                raise BatchFunctionError(
                    f"{self._name}: unpad speaks of {place!r}, which is not "
                    f"in the output: {_paths(arrays)}"
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
                            f"{self._name}: unpad says that axis {declared} of {named(path)} "
                            f"follows {name}, which was padded to "
                            f"{padded[feature]}, but its shape is {tuple(array.shape)}"
                        )
                    found[number][axis] = feature
        return [tuple(cuts.items()) for cuts in found]


def _lengths(group: Any, padded: Widths) -> str:
    return ", ".join(
        f"{field.name} to {width}"
        for field, width in zip(group.fields, padded, strict=True)
        if field.is_sequence
    )


def _paths(arrays: list[tuple[Path, Any]]) -> str:
    return ", ".join(repr(said(path)) for path, _ in arrays)
