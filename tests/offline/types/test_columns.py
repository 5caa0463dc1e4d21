"""Results of a step as columns, and the type of each column of a result."""

from __future__ import annotations

from collections import Counter, UserDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batched.offline.types.columns import Columns, Kinds, fit
from batched.offline.types.packing import unpack
from batched.offline.types.values import arrow_type, read
from canonical_values import ALL_VALUES, form_of, same

pytestmark = pytest.mark.once


@dataclass
class Point:
    x: int
    y: float


@settings(max_examples=50, deadline=None)
@given(results=st.lists(ALL_VALUES, max_size=12))
def test_each_result_is_read_for_itself_and_packed_as_it_is(results: list[Any]) -> None:
    values = Columns(["out"]).read(results)
    forms = list(map(form_of, results))
    assert values.places == [place for place, form in enumerate(forms) if form]
    assert values.misfits.keys() == {place for place, form in enumerate(forms) if not form}
    expected = [each for form in forms for each in form]
    assert same(values.columns, [expected])
    stored = [row for _, data in values.packed for row in unpack(data)[0]]
    assert same(stored, expected)
    assert [rows for rows, _ in values.packed if not rows] == []
    assert sum(values.kinds[0].values()) == len(expected)


def test_the_next_step_shares_no_memory_with_stored_values() -> None:
    values = Columns(["out"]).read([np.zeros(2), np.zeros(2)])
    values.columns[0][0] += 1
    assert values.columns[0][1][0] == 0
    (stored,) = unpack(values.packed[0][1])
    stored[0] += 2
    assert (stored[0][0], stored[1][0]) == (2, 0)


def test_a_reason_may_quote_lone_surrogates() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("\ud800")

    assert Columns(["out"]).read([Broken()]).misfits[0].endswith("\\ud800")


def test_a_misfit_is_one_sentence_that_names_its_column() -> None:
    values = Columns(["n", "out"]).read([{"n": 1, "out": {1}}])
    assert values.misfits == {
        0: "column 'out' cannot take set {1}: values of type set cannot be stored; return None, "
        "numbers, str, bytes, dates and times, or lists, dicts and arrays of them"
    }


def test_rows_of_several_columns_need_all_of_them_and_no_other() -> None:
    columns = Columns(["x", "y"])
    good = [{"x": 1, "y": 2.5}, {"y": 0.5, "x": 2}, Point(3, 1.5), UserDict(x=4, y=None)]
    bad = [{"x": 1}, {"x": 1, "y": 2, "z": 3}, None, "text", {"x": 1, "y": {1}}]
    values = columns.read([*good, *bad])
    assert values.columns == [[1, 2, 3, 4], [2.5, 0.5, 1.5, None]]
    assert values.kinds == [{"int": 4}, {"float": 3, "null": 1}]
    assert list(values.misfits) == [4, 5, 6, 7, 8]
    assert values.misfits[4] == (
        "each row's result must be a dict with 'x', 'y', and this is dict {'x': 1}"
    )


# --- declared types


def declared(kind: Any, *results: Any) -> Any:
    return Columns(["out"], {"out": kind}).read(results)


def test_a_value_with_a_declared_type_stays_as_it_is() -> None:
    vector = declared(pa.list_(pa.float32(), 2), [0.1, 2], np.array([0.5, 1]), None)
    assert same(vector.columns, [[[0.1, 2], np.array([0.5, 1]), None]])
    for kind, result in (
        (pa.int32(), 1),
        (pa.float32(), 0.5),
        (pa.large_string(), "a"),
        (pa.dictionary(pa.int32(), pa.string()), "a"),
        (pa.list_(pa.string()), ["a", "b"]),
        (pa.struct([("a", pa.float32()), ("b", pa.int8())]), {"a": 1}),
        (pa.timestamp("us", "Europe/Berlin"), datetime(2024, 1, 1, tzinfo=UTC)),
        (pa.fixed_shape_tensor(pa.float32(), [2, 3]), np.ones((2, 3), "f4")),
    ):
        assert same(declared(kind, result, None).columns, [[result, None]])
        array, misfits = fit([result, None], kind)
        assert (array.type, array.null_count, misfits) == (kind, 1, {})


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        (pa.list_(pa.float32(), 2), [1.0]),
        (pa.list_(pa.float32(), 4), np.zeros((2, 2))),
        (pa.fixed_shape_tensor(pa.float32(), [2, 3]), np.ones((3, 2), "f4")),
        (pa.list_(pa.float16(), 2), np.array([1e6, 1.0])),
        (pa.int32(), 1.5),
        (pa.int32(), 2**40),
        (pa.list_(pa.int64()), np.array([1.5])),
        (pa.string(), b"a"),
        (pa.timestamp("us"), datetime(2024, 1, 1, tzinfo=UTC)),
        (pa.timestamp("s"), datetime(2024, 1, 1, microsecond=1)),
        (pa.date32(), datetime(2024, 1, 1, 5)),
        (pa.struct([("a", pa.int64())]), {"a": 1, "b": 2}),
    ],
    ids=repr,
)
def test_a_misfit_with_the_declared_type_is_a_misfit_at_its_row(kind: Any, result: Any) -> None:
    values = declared(kind, None, result)
    assert values.columns == [[None]]
    assert list(values.misfits) == [1]


# --- the kind of a column


def kinds_of(groups: list[list[Any]]) -> Kinds:
    kinds = Kinds()
    for group in groups:
        kinds.add(Counter([read(value)[1] for value in group]))
    return kinds


@settings(max_examples=50, deadline=None)
@given(data=st.data(), values=st.lists(ALL_VALUES.filter(form_of), min_size=1, max_size=8))
def test_the_kind_of_a_column_depends_neither_on_order_nor_on_groups(
    data: st.DataObject, values: list[Any]
) -> None:
    whole = kinds_of([values])
    some = data.draw(st.permutations(values))
    cut = data.draw(st.integers(0, len(values)))
    other = kinds_of([some[:cut], some[cut:]])
    assert other.final() == whole.final()
    assert other.agree == whole.agree
    column, misfits = fit([read(value)[0] for value in values], whole.final())
    assert column.type == arrow_type(whole.final())
    assert not (misfits and whole.agree) or "{}" in repr(values)
    odd = [value for value in values if "{}" in repr(value) or read(value)[1] == "any"]
    assert len(misfits) < len(values) or odd


def test_dicts_with_optional_fields_outnumber_one_more_frequent_string() -> None:
    dicts: list[list[Any]] = [[{f"field {number}": 1}] * 3 for number in range(20)]
    kinds = kinds_of([*dicts, ["no JSON"] * 5])
    assert arrow_type(kinds.final()).num_fields == 20


def test_arrow_would_lose_what_fit_refuses() -> None:
    for kind, value in (
        ("int", 1.5),
        ("date", datetime(2024, 1, 1, 5)),
        ("datetime", datetime(2024, 1, 1, tzinfo=UTC)),
        (("struct", (("a", "int"),)), {"a": 1, "b": 2}),
        ("float", 2**53 + 1),
        ("bool", 1),
    ):
        column, misfits = fit([None, value], kind)
        assert column.null_count == 2
        assert list(misfits) == [1]
