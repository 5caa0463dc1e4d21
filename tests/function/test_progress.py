"""The progress bar of `fn.map`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import pytest

import batched
from stage import python

tqdm = pytest.importorskip("tqdm")


class Bar:
    """Stand-in for the bar of tqdm that records its uses."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, *, total: int | None, desc: str) -> None:
        self.total, self.desc = total, desc
        self.shown = 0
        self.closed = False
        self.made.append(self)

    def update(self) -> None:
        assert not self.closed
        self.shown += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    import tqdm.auto

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    monkeypatch.setattr(Bar, "made", [])
    return Bar.made


@pytest.fixture
def double() -> Iterator[Any]:
    @batched.dynamically(name="double")
    def fn(numbers: list[int]) -> list[int | ValueError]:
        return [2 * number if number >= 0 else ValueError(number) for number in numbers]

    with fn:
        yield fn


def test_the_bar_counts_results_and_ends_with_the_last_one(double: Any, bars: list[Bar]) -> None:
    results = double.map([1, 2, 3], progress=True)
    (bar,) = bars
    assert (bar.total, bar.desc, bar.shown) == (3, "double", 0)
    assert next(results) == 2
    assert (bar.shown, bar.closed) == (1, False)
    assert list(results) == [4, 6]
    assert (bar.shown, bar.closed) == (3, True)


def test_the_bar_has_no_total_where_the_length_is_unknown(double: Any, bars: list[Bar]) -> None:
    assert list(double.map(iter([1, 2]), progress=True)) == [2, 4]
    assert (bars[0].total, bars[0].shown) == (None, 2)


def test_the_bar_ends_where_the_results_end(double: Any, bars: list[Bar]) -> None:
    with pytest.raises(ValueError, match="-1"):
        list(double.map([1, -1, 2], progress=True))
    results = double.map([1, 2], progress=True)
    next(results)
    results.close()
    assert [bar.closed for bar in bars] == [True, True]
    assert len(list(double.map([1, -1, 2], progress=True, return_exceptions=True))) == 3
    assert bars[-1].shown == 3


def test_there_is_no_bar_by_default(double: Any, bars: list[Bar]) -> None:
    assert list(double.map([1, 2])) == [2, 4]
    assert bars == []


def test_coroutines_have_the_same_bar(bars: list[Bar]) -> None:
    @batched.aio.dynamically
    async def double(numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    async def numbers() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async def main() -> None:
        for items in ([0, 1, 2], numbers()):
            assert [each async for each in double.map(items, progress=True)] == [0, 2, 4]

    asyncio.run(main())
    assert [(bar.total, bar.shown, bar.closed) for bar in bars] == [(3, 3, True), (None, 3, True)]


def test_the_real_bar_is_shown_on_standard_error() -> None:
    done = python(
        """
        import batched
        fn = batched.dynamically(name="double")(lambda items: items)
        assert list(fn.map([1, 2, 3], progress=True)) == [1, 2, 3]
        """
    )
    assert done.returncode == 0, done.stderr
    assert "double: 100%" in done.stderr
    assert "3/3" in done.stderr


def test_a_missing_tqdm_is_named_at_the_call(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r'pip install "batched-dynamically\[progress\]"'):
        double.map([1], progress=True)
    assert list(double.map([1])) == [2]
