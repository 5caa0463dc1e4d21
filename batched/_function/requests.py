"""Parsers that make requests of calls: items or features, extra arguments, and the waker."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, MappingView
from typing import Any, Final, TypeAlias

from .._collate.arguments import Binder
from .._collate.features.parse import FeatureParser
from .._collate.items import distinct
from .._collate.lengths import validate_lengths
from .._core.scheduler import Request
from ..errors import CollationError
from .settings import Options

Args: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING: Final[Any] = _Missing()
"""Placeholder for items that are not passed by position."""
SINGLE: Final = {str, bytes, int, float, bool, dict, tuple, type(None)}
"""Types of most items."""
ITERABLES: Final = (Iterator, AsyncIterator, MappingView, deque, range, set)
"""Classes of objects that are more likely many items than one."""
TABLES: Final = {"DataFrame", "Dataset", "Index", "Series", "Column", "Array", "ChunkedArray"}
"""More of these classes, of the libraries `OF_TABLES`."""
OF_TABLES: Final = ("pandas", "polars", "datasets", "pyarrow")


def take_item(name: str, binder: Binder, kwargs: Keywords) -> Any:
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

    def __init__(self, name: str, binder: Binder, options: Options, parts: tuple[str, ...]) -> None:
        self._name = name  # of the batch function, for error messages
        self._short = name.rpartition(".")[2]
        self.binder = binder
        binder.hint = f"; many items are passed as one list, {self._short}([...])"
        if parts:
            binder.hint = f"; one item is a tuple, {self._short}.submit(({', '.join(parts)}))"
        self._length = options.item_length
        self._key = _by_value if options.dedupe is True else options.dedupe
        self._most = options.policy.batch_size
        self._parts = parts  # with `unpack`, names of the parts of an item

    def read(
        self, item: Any, args: Args, kwargs: Keywords, single: bool, /
    ) -> tuple[Any, Args, bool]:
        """Return the item or list of items, the other positional arguments, and whether it is one.

        Remove an item that is passed by keyword from `kwargs`.

        Raises:
            TypeError: there is no item, or it is more likely many.
        """
        by_keyword = item is MISSING
        if self._parts:
            if single:
                return item, args, True
            if isinstance(item, list) and not args:
                return item, args, False
            given = [] if by_keyword else [item, *args]
            names = self._parts[len(given) :]
            given += [kwargs.pop(name) for name in names if name in kwargs]
            if any(isinstance(part, list) for part in given):
                raise TypeError(
                    f"{self._name} was given a list and further arguments: many items are one list "
                    f"of tuples, {self._short}([({', '.join(self._parts)}), ...]); one tuple with "
                    f"a list in it is submitted, {self._short}.submit((...))"
                )
            return tuple(given), (), True
        if by_keyword:
            item = take_item(self._name, self.binder, kwargs)
        if single or type(item) in SINGLE:
            return item, args, True
        if not isinstance(item, list):
            self._refuse_many(item)
            return item, args, True
        if args or kwargs:
            named = kwargs if by_keyword else self.binder.named if len(item) > self._most else ()
            for other in (*args, *(kwargs[name] for name in named if name in kwargs)):
                if isinstance(other, list) and len(other) == len(item) > 0:
                    raise TypeError(
                        f"{self._name} was given two lists of {len(item)}, and extra arguments are "
                        "shared by all items. If each item is a pair, decorate with unpack=True "
                        f"and pass {self._short}([(..., ...), ...]); if the second list is shared, "
                        "pass a tuple, or make it keyword-only"
                    )
        return item, args, False

    def parse(
        self,
        item: Any,
        args: Args,
        kwargs: Keywords,
        owner: object,
        waker: Any,
        single: bool,
        /,
    ) -> Request:
        """Return the call `fn(item, *args, **kwargs)`; a list is many items unless `single`.

        Raises:
            TypeError: the arguments do not fit the function.
            Exception: the exception of `length` or `dedupe` for an item.
        """
        if type(item) in SINGLE and not self._parts:  # without a call of `read`
            single = True
        else:
            item, args, single = self.read(item, args, kwargs, single)
        group = self.binder.bind(args, kwargs)
        items: list[Any] = [item] if single else list(item)
        if self._parts:
            self._check_parts(items)
        lengths = order = places = keys = None
        if self._key:
            keys = self._find_keys(items)
            if not single:
                items, places = distinct(items, keys)
                keys = list(dict.fromkeys(keys))
        if self._length is not None:
            lengths = validate_lengths(self._name, list(map(self._length, items)))
        if single:
            return Request(item, 1, group, waker, False, owner, lengths, keys=keys)
        if lengths is not None:  # the longest first
            ranks = sorted(range(len(items)), key=lengths.__getitem__, reverse=True)
            positions = {rank: position for position, rank in enumerate(ranks)}
            places = [positions[place] for place in places or range(len(items))]
            items, lengths = [items[rank] for rank in ranks], [lengths[rank] for rank in ranks]
            keys = keys and [keys[rank] for rank in ranks]
        if places is not None:
            first = {position: place for place, position in reversed([*enumerate(places)])}
            order = [first[position] for position in range(len(items))]
        return Request(items, len(items), group, waker, True, owner, lengths, order, places, keys)

    def _check_parts(self, items: list[Any]) -> None:
        size, parts = len(self._parts), ", ".join(self._parts)
        for item in items:
            if not isinstance(item, tuple) or len(item) != size:
                raise TypeError(
                    f"{self._name} takes items of {size} parts, {self._short}({parts}) or "
                    f"{self._short}([({parts}), ...]), got {item!r:.60}"
                )

    def _find_keys(self, items: list[Any]) -> list[Hashable]:
        keys: list[Any] = list(map(self._key, items))  # type: ignore[arg-type]  # a function here
        for item, key in zip(items, keys, strict=True):
            try:
                hash(key)
            except TypeError:
                raise TypeError(
                    f"{self._name}: dedupe needs items that have a hash, got {item!r:.60}; dedupe "
                    "may be a function that returns a key of an item that has one"
                ) from None
        return keys

    def _refuse_many(self, item: Any) -> None:
        """Raise a TypeError if `item` is more likely many items than one."""
        kind = type(item)
        classes = kind.__mro__
        tables = {each.__name__ for each in classes if each.__module__.startswith(OF_TABLES)}
        if hasattr(kind, "read") or not (issubclass(kind, ITERABLES) or tables & TABLES):
            return
        items = 'xs["column"]' if tables & {"DataFrame", "Dataset"} else "xs"
        raise TypeError(
            f"{self._name} was given one {kind.__name__}, which is more likely many items: pass "
            f"list({items}) or use {self._short}.map({items}); one item is {self._short}.submit(xs)"
        )


def _by_value(item: Any) -> Hashable:
    """Return the key of an item for `dedupe=True`: 1, 1.0 and True differ, also within tuples."""
    kind = type(item)
    return kind, tuple(map(_by_value, item)) if kind is tuple else item


class FeatureRequestParser:
    """Parser of features, as one mapping or by keyword."""

    def __init__(self, name: str, binder: Binder, parser: FeatureParser, *, spread: bool) -> None:
        self._name = name  # of the batch function, for error messages
        self.binder = binder
        self._parser = parser
        self._spread = spread

    def read(self, item: Any, args: Args, kwargs: Keywords, _: bool, /) -> tuple[Any, Args, bool]:
        """Return the argument in place of features, the other arguments, and True."""
        item = take_item(self._name, self.binder, kwargs) if item is MISSING else item
        return item, args, True

    def parse(
        self,
        item: Any,
        args: Args,
        kwargs: Keywords,
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
                f"{self._name} takes a mapping of features, or features by keyword, got "
                f"{item!r:.60}; one mapping has the rows of all items, and prepare= makes features "
                "of other arguments"
            )
        try:
            features = self._parser.parse(item)
            names = features.spec.names if self._spread else ()
            group = features.spec.group(self.binder.bind(args, kwargs, names))
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
        return Request(features, features.rows, group, waker, False, owner, lengths)


RequestParser = ItemRequestParser | FeatureRequestParser
