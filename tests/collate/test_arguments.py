"""Extra arguments: the calls that may share a batch, and the values that the function gets."""

from __future__ import annotations

import math
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from itertools import combinations
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy
import pytest

from batched._collate.arguments import Arguments, Binder


def embed(
    texts: list[str], prompt: Any = "", *more: Any, scale: Any = 1.0, **options: Any
) -> list[str]:
    return texts


BINDER = Binder(embed, "embed", leading=1)


def bound(*args: Any, **kwargs: Any) -> Arguments:
    """Return the extra arguments of one call of `embed`."""
    return BINDER.bind(args, kwargs)


def same(one: Any, other: Any) -> bool:
    """Return whether calls with these values may share a batch, however they pass them."""
    answers = {
        bound(one) == bound(other),
        bound(scale=one) == bound(scale=other),
        bound("", one) == bound("", other),
        bound(option=one) == bound(option=other),
        bound([one]) == bound([other]),
        bound({"key": (one,)}) == bound({"key": (other,)}),
        len({bound(one): 1, bound(other): 2}) == 1,
    }
    assert len(answers) == 1
    return answers.pop()


Point = namedtuple("Point", "x")  # noqa: PYI024  # as users write them


@dataclass(frozen=True)
class Option:
    value: Any


class Colour(Enum):
    RED = 1


class Config:
    """Object with an equality, a hash and a repr that nothing may call."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it may be large")

    def __hash__(self) -> int:
        raise AssertionError("it may be large")

    def __repr__(self) -> str:
        raise AssertionError("it may be large")

    def method(self) -> None:
        """Do nothing."""


UNEQUAL: list[tuple[Any, ...]] = [
    (0, 0.0, False, None, "0", b"0", 0j, -0.0, -0j, math.nan, numpy.int64(0), numpy.bool_(0)),
    (0.0, numpy.float32(0), numpy.float64(0), numpy.float64(-0.0), numpy.datetime64(0, "s")),
    ([], (), {}, set(), frozenset(), [()]),
    ([1], [True], [1, 1], {1}, {1.0}, {1, 2}, (1,), Point(1), Point(True), Option(1), Option(True)),
    ({1: "a"}, {True: "a"}, [(1, "a")], {1: "b"}, {1: "a", 2: "b"}, {2: "b", 1: "a"}),
    ([[1], 2], [[1, 2]], [1, 2], [2, 1]),
    (Decimal("1.0"), Decimal("1.00"), date(2026, 1, 1), datetime(2026, 1, 1), Path("1.0")),
]
"""Values in rows, each of which differs from the others of its row."""


@pytest.mark.parametrize("values", UNEQUAL, ids=str)
def test_values_of_different_types_or_contents_do_not_share_a_batch(values: Any) -> None:
    for one, other in combinations(values, 2):
        assert not same(one, other), (one, other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [int("1000"), float("nan"), "".join(["que", "ry"]), 1 + 2j, None, numpy.float32(1)],
        lambda: [1, [2, {"a": {3}}], frozenset({float("nan")})],
        lambda: (len, Point([1]), Option([1])),
        lambda: [date(2026, 1, 1), Decimal("1.0"), Path("a"), UUID(int=1), Colour.RED],
    ],
)
def test_values_of_the_same_type_and_content_share_a_batch(make: Callable[[], Any]) -> None:
    assert same(make(), make())


@pytest.mark.model
def test_dtypes_and_devices_of_torch_are_compared_by_value() -> None:
    torch = pytest.importorskip("torch")
    assert same(torch.device("cpu"), torch.device("cpu"))
    assert not same(torch.device("cpu"), torch.device("meta"))
    assert same(torch.int64, torch.long)


@pytest.mark.parametrize(
    "make",
    [
        object,
        Config,
        Counter,
        lambda: numpy.zeros(2),
        lambda: bytearray(b"a"),
        lambda: lambda: None,
        lambda: Config().method,
        pytest.param("tensor", marks=pytest.mark.model),
    ],
)
def test_any_other_object_equals_only_itself_and_none_of_its_code_runs(make: Any) -> None:
    if make == "tensor":
        torch = pytest.importorskip("torch")
        make = lambda: torch.ones(3)  # noqa: E731
    one, other = make(), make()
    assert same(one, one)
    assert not same(one, other)


def test_the_form_of_a_call_does_not_matter_and_each_argument_does() -> None:
    rows = [
        [bound(), bound(""), bound(scale=1.0), bound(prompt="", scale=1.0)],
        [bound("query"), bound(prompt="query")],
        [bound(scale=2.0, beam=3, prompt="a"), bound("a", beam=3, scale=2.0)],
        [bound(scale="query")],
        [bound("", 1, 2)],
        [bound("", 2, 1)],
        [bound("", 1)],
        [bound(beam=3)],
        [bound(beam=4)],
    ]
    assert all(len(set(equal)) == 1 for equal in rows)
    assert len({equal[0] for equal in rows}) == len(rows)


@pytest.mark.parametrize("func", [lambda *args: args[0], dict])
def test_a_function_without_named_parameters_is_bound_by_position(func: Callable[..., Any]) -> None:
    binder = Binder(func, "func", leading=1)
    assert binder.bind((1,), {}) == binder.bind((1,), {})
    assert len({binder.bind(args, {}) for args in ((1,), (2,), ())}) == 3


def test_a_gathered_keyword_may_have_the_name_of_a_positional_parameter() -> None:
    binder = Binder(lambda texts, prompt="", /, **more: texts, "rank", leading=1)
    assert binder.bind(("a",), {"prompt": "z"}) != binder.bind(("b",), {"prompt": "z"})


def test_arguments_that_do_not_fit_are_a_type_error_with_the_name_of_the_function() -> None:
    def translate(texts: list[str], /, language: str, beams: int = 1) -> list[str]:
        return texts

    binder = Binder(translate, "shop.translate", leading=1)
    wrong: list[tuple[Any, Any, str]] = [
        ((), {}, "missing a required argument: 'language'"),
        (("en", 1, 2), {}, "too many positional arguments"),
        (("en",), {"texts": []}, "texts"),
    ]
    for args, kwargs, reason in wrong:
        with pytest.raises(TypeError, match=rf"^shop\.translate: .*{reason}"):
            binder.bind(args, kwargs)
    assert binder.bind(("en",), {}) == binder.bind((), {"language": "en", "beams": 1})


def test_the_function_gets_the_arguments_as_the_caller_passed_them() -> None:
    thing = object()
    args, kwargs = bound(
        "query", ["a"], scale=2.0, beam={"b": [thing, {1}, (2,), frozenset({3}), Point([4])]}
    ).unpack()
    assert args == ("query", ["a"])
    assert kwargs == {"scale": 2.0, "beam": {"b": [thing, {1}, (2,), frozenset({3}), Point([4])]}}
    assert type(kwargs["beam"]["b"][4]) is Point
    assert bound().unpack() == ((), {})


def test_neither_caller_nor_function_changes_the_containers_of_a_batch() -> None:
    mine = {"stop": ["a"]}
    given = bound(mine)
    mine["stop"].append("b")
    assert given == bound({"stop": ["a"]})
    first, _ = given.unpack()
    first[0]["stop"].clear()
    assert given.unpack() == (({"stop": ["a"]},), {})
