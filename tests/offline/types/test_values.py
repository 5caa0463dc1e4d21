"""Canonical values: their form, their kinds, and their way through Arrow."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, StrEnum
from itertools import permutations
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings

from batched.offline.types.arrow import to_python
from batched.offline.types.values import (
    MAX_FIELDS,
    Unfit,
    arrow_type,
    common_kind,
    describe_kind,
    read,
    to_array,
    unify,
)
from canonical_values import ALL_VALUES, VALUES, same


class Colour(StrEnum):
    RED = "red"


class Range(Enum):
    SHORT = (1, 2)


@dataclass
class Point:
    x: int
    y: float


def readable(value: Any) -> tuple[Any, Any]:
    """Return the canonical form and the kind; a value without a form is no example."""
    try:
        return read(value)
    except (Unfit, pa.ArrowException):
        assume(False)
        raise


def alike(one: Any, other: Any) -> bool:
    """Return whether values are equal but for the types of numbers and for missing fields."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(alike(one.get(name), other.get(name)) for name in one | other)
    if isinstance(one, list | np.ndarray) and isinstance(other, list | np.ndarray):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other or (one != one and other != other))


@settings(max_examples=120, deadline=None)
@given(value=VALUES)
def test_values_come_back_from_arrow_without_loss(value: Any) -> None:
    plain, kind = readable(value)
    assume(kind != "any" and "{}" not in repr(plain))  # which has no type in Parquet
    assert alike(to_python(to_array([plain], arrow_type(kind))), [plain])


@settings(max_examples=120, deadline=None)
@given(value=ALL_VALUES)
def test_a_canonical_value_is_its_own_canonical_form(value: Any) -> None:
    plain, kind = readable(value)
    again, other = read(plain)
    assert same(again, plain)
    assert other == kind


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((1, 2), [1, 2]),
        ([1, 0.5, None], [1, 0.5, None]),
        ([{"b": 1}, {"a": [1]}, {"a": [0.5]}], [{"b": 1}, {"a": [1]}, {"a": [0.5]}]),
        (Decimal("-0.0"), Decimal("-0.0")),
        (Colour.RED, "red"),
        (Range.SHORT, [1, 2]),
        ({Colour.RED: 1}, {"red": 1}),
        (UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (PurePosixPath("a/b"), "a/b"),
        (type("Share", (float,), {})(0.5), 0.5),
        (type("Word", (str,), {})("a"), "a"),
        (type("Pair", (list,), {})([1, 2]), [1, 2]),
        (bytearray(b"x"), b"x"),
        (Point(1, 2.5), {"x": 1, "y": 2.5}),
        (UserDict(x=2), {"x": 2}),
        (datetime(2024, 1, 1, 5, 30, tzinfo=timezone(timedelta(hours=5, minutes=30))),
         datetime(2024, 1, 1, tzinfo=UTC)),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.array("y"), "y"),
        (np.arange(6, dtype="int32")[::-2], np.array([5, 3, 1], "int32")),
        (np.array([1, 2], ">f4"), np.array([1, 2], "float32")),
        (np.array([["a"], ["b"]]), [["a"], ["b"]]),
        (np.array([1, None], object), [1, None]),
        (np.ma.masked_array([1, 2], [False, True]), [1, None]),
        ([np.zeros(2, "f4"), np.zeros(1)], [np.zeros(2, "f4"), np.zeros(1)]),
        ([[], np.zeros(1)], [[], np.zeros(1)]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_of_other_types_have_a_plain_form(value: Any, plain: Any) -> None:
    assert same(read(value)[0], plain)


def test_tensors_are_arrays_of_their_dtype() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.tensor([[0.5, 1.5], [2.5, 3.5]], requires_grad=True)
    array = np.array([[0.5, 1.5], [2.5, 3.5]], "float32")
    assert same(read(rows)[0], array)
    assert same(read(rows.bfloat16())[0], array)
    assert same(read(rows.half())[0], array.astype("float16"))
    assert same(read(rows > 1)[0], array > 1)
    assert same(read(rows[0, 0])[0], 0.5)
    assert same(read({"v": rows[0]})[0], {"v": array[0]})


def test_values_of_pandas_are_plain() -> None:
    pd = pytest.importorskip("pandas")
    assert same(read(pd.Series([0.5, 1.5]))[0], np.array([0.5, 1.5]))
    assert same(read(pd.Timestamp("2024-01-01"))[0], datetime(2024, 1, 1))
    assert same(read(pd.Timestamp("2024-01-01", tz="UTC"))[0], datetime(2024, 1, 1, tzinfo=UTC))
    assert same(read(pd.Timedelta(seconds=2))[0], timedelta(seconds=2))
    assert read(pd.NaT)[0] is None
    with pytest.raises(Unfit, match="microsecond"):
        read(pd.Timestamp(1))[0]


def test_models_of_pydantic_are_dicts() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Model", x=(int, ...), y=(list[float], ...))
    assert same(read(model(x=1, y=[0.5]))[0], {"x": 1, "y": [0.5]})


def test_a_function_may_write_its_next_result_to_the_same_memory() -> None:
    array, items, inner = np.zeros(2), [0], {"a": [0]}
    kept = [read(value)[0] for value in (array, [array, array], items, inner)]
    array += 1
    items[0] = inner["a"][0] = 1
    assert same(kept, [np.zeros(2), [np.zeros(2), np.zeros(2)], [0], {"a": [0]}])


REFUSED: list[tuple[Any, str]] = [
    ({1, 2}, "values of type set cannot be stored"),
    ({1: "a"}, "keys of a dict must be str"),
    (time(1, tzinfo=UTC), "zone"),
    (np.datetime64(1, "ns"), "datetime64[ns]"),
    (np.complex128(1), "complex128"),
    (np.longdouble(1), "cannot be stored"),
]


@pytest.mark.parametrize(("value", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_value_without_a_form_is_refused_with_the_reason(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=".") as refused:
        read(value)
    assert words in str(refused.value)


OF_NO_TYPE = [
    *(2**70, -(2**63) - 1, [2**70], "\ud800", ["a", "\ud800"], {"a": [1, "a"]}),
    *([1, "a"], ["a", b"a"], [True, 1], [np.zeros(1, "i4"), np.zeros(1, "f4")]),
    *(Decimal("NaN"), Decimal("1e-40"), [[1], "a"], dict.fromkeys(map(str, range(MAX_FIELDS + 1)))),
]


@pytest.mark.parametrize("value", OF_NO_TYPE, ids=lambda value: repr(value)[:20])
def test_a_value_that_no_type_of_arrow_takes_is_kept_as_it_is(value: Any) -> None:
    plain, kind = read(value)
    assert same(plain, value)
    assert kind == "any"
    assert describe_kind(kind) == "no type"
    assert unify(kind, "unseen") == "any"
    with pytest.raises(Unfit, match="no type"):
        unify(kind, "int")


# --- kinds


UNIFIED: list[tuple[list[Any], Any]] = [
    ([2**53, 0.5], pa.float64()),
    ([[], [1], [0.5], [None]], pa.list_(pa.float64())),
    (
        [{"b": 1, "a": "x"}, {"b": 0.5, "a": None}],
        pa.struct([("b", pa.float64()), ("a", pa.string())]),
    ),
    ([{"b": 1}, {"a": "x"}], pa.struct([("a", pa.string()), ("b", pa.int64())])),
    ([{"a": {}}, {"a": {"b": 1}}], pa.struct([("a", pa.struct([("b", pa.int64())]))])),
    ([Decimal("1.5"), Decimal(100)], pa.decimal128(38, 1)),
    ([np.zeros(3, "f4"), np.zeros(3)], pa.list_(pa.float64(), 3)),
    ([np.zeros(3, "f4"), np.zeros(2, "f4")], pa.large_list(pa.float32())),
    ([np.zeros(3, "f4"), None], pa.large_list(pa.float32())),
    ([np.zeros((2, 3), "f4")] * 2, pa.list_(pa.large_list(pa.float32()))),
    ([np.zeros((2, 3)), None], pa.list_(pa.large_list(pa.float64()))),
    ([{"v": np.zeros(3)}, None], pa.struct([("v", pa.large_list(pa.float64()))])),
    ([{"v": np.zeros((2, 3))}], pa.struct([("v", pa.list_(pa.large_list(pa.float64())))])),
]  # fmt: skip


@pytest.mark.parametrize(("values", "expected"), UNIFIED, ids=repr)
def test_a_column_has_the_narrowest_type_for_its_values_in_any_order(
    values: list[Any], expected: Any
) -> None:
    for some in permutations(values):
        pairs = list(map(read, some))
        kind = common_kind([kind for _, kind in pairs])
        assert arrow_type(kind) == expected
        assert to_array([value for value, _ in pairs], arrow_type(kind)).type == expected


APART: list[tuple[Any, Any, str]] = [
    (1, "n/a", "int and string"),
    ("a", b"a", "string and binary"),
    (datetime(2024, 1, 1), datetime(2024, 1, 1, tzinfo=UTC), "tz=UTC"),
    (date(2024, 1, 1), datetime(2024, 1, 1), "date32"),
    ({"a": [{"b": "x"}]}, {"a": [{"b": 1}]}, "string and int"),
    (np.array([1.0]), np.array([1]), "item: int64"),
    (np.array([1.0]), [1.0], "list<item: double>"),
    (np.zeros((2, 2)), np.zeros(2), "list<item: large_list<item: double>>"),
    (Decimal(1), 1.0, "decimal128(38, 0) and float"),
    (dict.fromkeys(map(str, range(MAX_FIELDS))), {"one": 1}, "struct"),
]


@pytest.mark.parametrize(("one", "other", "words"), APART, ids=repr)
def test_kinds_without_a_common_one_are_named(one: Any, other: Any, words: str) -> None:
    for a, b in ((one, other), (other, one)):
        with pytest.raises(Unfit) as refused:
            unify(read(a)[1], read(b)[1])
        assert all(word in str(refused.value) for word in words.split(" and "))
