"""Parsers that make requests of calls: items or features, extra arguments, and the waker."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MappingView
from functools import lru_cache
from typing import Any, Final

from .._collate.arguments import Binder
from .._collate.features.collate import GroupKey
from .._collate.features.parse import FeatureParser
from .._collate.lengths import validate_lengths
from .._core.scheduler import Request
from ..errors import CollationError


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING: Final[Any] = _Missing()
"""Placeholder for items that are not passed by position."""

SINGLE: Final = frozenset({str, bytes, int, float, bool, dict, tuple, type(None)})
"""Types of most items."""

ITERABLES: Final = (Iterator, AsyncIterator, MappingView, deque, range, set)
"""Classes of instances that are more likely many items than one."""

TABLES: Final = {
    "numpy.ndarray",
    "pandas.DataFrame",
    "pandas.Index",
    "pandas.Series",
    "polars.DataFrame",
    "polars.Series",
}
"""More of these classes, by package and name.

A tensor is not among them: there are no tensors of texts, and a tensor is a usual item.
"""


def take_item(name: str, binder: Binder, kwargs: dict[str, Any]) -> Any:
    """Remove the item, or the list of items, of a call of `name` from its keyword arguments.

    Raises:
        TypeError: there is none.
    """
    items = binder.items_name
    if items is None or items not in kwargs:
        got = f", got only {', '.join(kwargs)}" if kwargs else ""
        raise TypeError(
            f"{name} needs an item, or a list of items{f' ({items})' if items else ''}{got}"
        )
    return kwargs.pop(items)


class ItemRequestParser:
    """Parser of one item, or a list of items."""

    def __init__(self, name: str, binder: Binder, length: Callable[[Any], Any] | None) -> None:
        self._name = name  # of the batch function, for error messages
        self.binder = binder
        self._bare = binder.bare
        short = name.rpartition(".")[2]
        binder.hint = f"; many items are passed as one list, {short}([...])"
        self._length = length

    def parse(
        self,
        item: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        owner: object,
        waker: Any,
        single: bool,
        /,
    ) -> Request:
        """Return the call `fn(item, *args, **kwargs)`; a list is many items unless `single`.

        Raises:
            TypeError: the arguments do not fit the function.
            Exception: the exception of `length` for an item.
        """
        if item is MISSING:
            item = take_item(self._name, self.binder, kwargs)
        group = (
            self._bare
            if not args and not kwargs and self._bare is not None
            else self.binder.bind(args, kwargs)
        )
        lengths: list[int] | None = None
        if not single and type(item) not in SINGLE:
            if isinstance(item, list):
                items, order = list(item), None
                if self._length is not None:
                    lengths = validate_lengths(self._name, list(map(self._length, items)))
                    order = sorted(range(len(items)), key=lengths.__getitem__, reverse=True)
                    items = list(map(items.__getitem__, order))
                    lengths = list(map(lengths.__getitem__, order))
                return Request(items, len(items), group, waker, True, owner, lengths, order)
            kind: Any = type(item)
            if _is_many(kind, self.binder.items_annotation):
                self._refuse_many(item)
        if self._length is not None:
            lengths = validate_lengths(self._name, [self._length(item)])
        return Request(item, 1, group, waker, False, owner, lengths)

    def _refuse_many(self, item: Any) -> None:
        """Raise a TypeError, unless `item` is an array without axes."""
        kind = type(item)
        if getattr(item, "ndim", 1) == 0:
            return
        name, short = self._name, self._name.rpartition(".")[2]
        entries = 'xs["column"]' if kind.__name__.endswith("DataFrame") else "xs"
        parameter = self.binder.items_name or "items"
        example = "Iterator" if issubclass(kind, Iterator) else kind.__name__
        raise TypeError(
            f"{name} was given one {kind.__name__}, which is more likely many items: pass "
            f"list({entries}) or use {short}.map({entries}); if it is one item, use "
            f"{short}.submit(xs), or say so where the function is defined, "
            f"`{parameter}: list[{example}]`"
        )


class FeatureRequestParser:
    """Parser of features, as one mapping or by keyword."""

    def __init__(self, name: str, binder: Binder, parser: FeatureParser, *, spread: bool) -> None:
        self._name = name  # of the batch function, for error messages
        self.binder = binder
        self._parser = parser
        self._spread = spread

    def parse(
        self,
        item: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        owner: object,
        waker: Any,
        _: bool,
        /,
    ) -> Request:
        """Return the call with the features of a mapping, or with features by keyword.

        Raises:
            TypeError: the arguments do not fit the function.
            CollationError: the features are no arrays with one row per item.
        """
        by_keyword = False
        if item is MISSING:
            name = self.binder.items_name or ""
            by_keyword = not isinstance(kwargs.get(name), Mapping)
            item, kwargs = (kwargs, {}) if by_keyword else (kwargs.pop(name), kwargs)
        elif not isinstance(item, Mapping):
            raise CollationError(
                f"{self._name} takes a mapping of features, or features by "
                f"keyword, got {item!r:.60}"
            )
        try:
            features = self._parser.parse(item)
            names = tuple([spec.name for spec in features.specs]) if self._spread else ()
            arguments = self.binder.bind(args, kwargs, names)
        except CollationError as error:
            if not by_keyword or not item:
                raise
            raise CollationError(
                f"{error} (keywords are features; other arguments go next to a mapping of features)"
            ) from None
        except TypeError as error:
            if self._spread or not any(repr(name) in str(error) for name in item):
                raise
            raise TypeError(
                f"{error}; it gets one dict of features, or, with spread_kwargs=True, each by name"
            ) from None
        lengths = [features.longest] * features.rows
        return Request(
            features,
            features.rows,
            GroupKey(arguments, features.specs),
            waker,
            False,
            owner,
            lengths,
        )


RequestParser = ItemRequestParser | FeatureRequestParser


@lru_cache
def _is_many(kind: type, annotation: str) -> bool:
    """Return whether an instance of `kind` is more likely many items than one.

    It is one item if `annotation`, of the parameter for the items, is a list of these.
    """
    if issubclass(kind, ITERABLES):
        if hasattr(kind, "read"):  # a file
            return False
    elif TABLES.isdisjoint(
        f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in kind.__mro__
    ):
        return False
    # further names of arrays, and of iterators
    names = {"NDArray", "Iterator", "Generator", *(each.__name__ for each in kind.__mro__)}
    return not any(name in annotation.partition("[")[2] for name in names - {"object"})
