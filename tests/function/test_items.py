"""Arguments that are one item, and collections that are refused."""

from __future__ import annotations

import asyncio
import io
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import batched

pytestmark = pytest.mark.once


class _Table:
    def __iter__(self) -> Iterator[str]:
        return iter(["text"])


# classes of tables are recognized by their own names and the names of their libraries
Series = type("Series", (_Table,), {"__module__": "pandas.core.series"})
GeoSeries = type("GeoSeries", (Series,), {"__module__": "geopandas.geoseries"})
Index = type("Index", (_Table,), {"__module__": "pandas"})
Column = type("Column", (_Table,), {"__module__": "datasets.arrow_dataset"})
DataFrame = type("DataFrame", (_Table,), {"__module__": "polars.dataframe.frame"})
Namesake = type("Series", (_Table,), {"__module__": "television"})


async def asynchronously() -> AsyncIterator[str]:
    yield "text"


@batched.dynamically
def embed(texts: list[str]) -> list[Any]:
    return [type(text).__name__ for text in texts]


MANY: list[Callable[[], Any]] = [
    *(Series, GeoSeries, Index, Column, DataFrame, asynchronously, lambda: map(str, (1, 2))),
    *(lambda: range(2), deque, lambda: {"one", "two"}, lambda: {"one": 1}.keys()),
]


@pytest.mark.parametrize("make", MANY)
def test_a_collection_is_refused_as_one_item_with_advice(make: Callable[[], Any]) -> None:
    fn: Any = batched.dynamically(lambda items: items)
    xs = make()
    for call in (fn, lambda xs: asyncio.run(fn.acall(xs))):
        with pytest.raises(TypeError) as caught:
            call(xs)
        sentence = str(caught.value)
        assert f"was given one {type(xs).__name__}, " in sentence
        entries = 'xs["column"]' if type(xs) is DataFrame else "xs"
        for way_out in (f"list({entries})", f".map({entries})", ".submit(xs)"):
            assert way_out in sentence
    assert fn.stats.calls == 0


def test_submit_and_map_accept_any_object_as_one_item() -> None:
    for item in (make() for make in MANY):
        assert embed.submit(item).result() == type(item).__name__
        assert list(embed.map([item])) == [type(item).__name__]
        assert embed([item, item]) == [type(item).__name__] * 2


ONE: list[Any] = [
    *("text", 1, 1.5, b"bytes", None, (1, 2), {"a": 1}, frozenset({1}), object()),
    *(Namesake(), io.BytesIO(), np.array(["one", "two"]), np.zeros((2, 3))),
    *(np.float32(1), np.array(1.0), np.str_("text")),
]


def test_any_other_object_but_a_list_is_one_item() -> None:
    for item in ONE:
        assert embed(item) == type(item).__name__
