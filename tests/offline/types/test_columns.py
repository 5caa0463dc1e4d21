"""Results of a step as columns, and the type of each column of a result."""

from __future__ import annotations

from collections import Counter, UserDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from batched.offline.types import columns as _columns  # noqa: E402
from batched.offline.types.arrow import to_python  # noqa: E402
from batched.offline.types.columns import MOST_KINDS, Columns, Kinds, fit, without_empty  # noqa: E402
from batched.offline.types.packing import unpack  # noqa: E402
from batched.offline.types.values import arrow_type, read  # noqa: E402
from canonical_values import ALL_VALUES, form_of, same  # noqa: E402


@dataclass
class Point:
    x: int
    y: float


@settings(max_examples=200, deadline=None)
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
    joined = unpack(b"".join([data for _, data in values.packed])) if expected else [[]]
    assert same(list(joined[0]), expected)
    kinds: Counter[Any] = sum(values.kinds, Counter())
    assert kinds.total() == len(expected)


def test_the_next_step_shares_no_memory_with_stored_values() -> None:
    values = Columns(["out"]).read([np.zeros(2), np.zeros(2)])
    values.columns[0][0] += 1
    assert values.columns[0][1][0] == 0
    assert unpack(values.packed[0][1])[0][0][0] == 0


def test_an_object_that_cannot_even_be_shown_is_refused_at_its_row() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("broken \ud800")

    values = Columns(["out"]).read([1, Broken(), 2, 10**5000])
    assert values.places == [0, 2]
    assert "RuntimeError: broken \\ud800" in values.misfits[1]
    assert "cannot take int that cannot be shown: an integer must have" in values.misfits[3]


def test_a_misfit_is_one_sentence_that_names_its_column() -> None:
    values = Columns(["n", "out"]).read([{"n": 1, "out": {1}}])
    assert values.misfits == {
        0: "column 'out' cannot take set {1}: values of type set cannot be stored; return None, "
        "numbers, str, bytes, dates and times, or lists, dicts and arrays of them"
    }


def test_rows_of_several_columns_need_all_of_them_and_no_other() -> None:
    columns = Columns(["x", "y"])
    good = [{"x": 1, "y": 2.5}, {"y": 0.5, "x": 2}, Point(3, 1.5), UserDict(x=4, y=None)]
    values = columns.read([*good, {"x": 1}, {"x": 1, "y": 2, "z": 3}, None, "text"])
    assert values.columns == [[1, 2, 3, 4], [2.5, 0.5, 1.5, None]]
    assert list(values.misfits) == [4, 5, 6, 7]
    assert values.misfits[4] == (
        "each row's result must be a dict with 'x', 'y', and this is dict {'x': 1}"
    )


def test_a_row_that_is_refused_leaves_all_columns() -> None:
    values = Columns(["a", "b"]).read([{"a": 1, "b": 2}, {"a": 3, "b": {1}}, {"a": 5, "b": 6}])
    assert values.columns == [[1, 5], [2, 6]]
    assert values.kinds == [Counter(int53=2)] * 2


def test_large_results_are_packed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_columns, "MAX_BYTES", 1000)
    monkeypatch.setattr(_columns, "MAX_ROW_BYTES", 5000)
    values = Columns(["out"]).read(
        [f"{n}" * 300 for n in range(9)] + ["y" * 3000, "z" * 6000, "end"]
    )
    assert [rows for rows, _ in values.packed] == [3, 3, 3, 1, 1]
    assert values.nbytes == sum(len(data) for _, data in values.packed)
    assert "6,0" in values.misfits[10]
    assert values.columns[0][-2:] == ["y" * 3000, "end"]


# --- declared types


def declared(kind: Any, *results: Any) -> Any:
    return Columns(["out"], {"out": kind}).read(results)


def test_values_have_their_declared_type() -> None:
    vector = declared(pa.list_(pa.float32(), 2), [0.1, 2], np.array([0.5, 1]), None)
    expected = [np.array([0.1, 2], "f4"), np.array([0.5, 1], "f4"), None]
    assert same(vector.columns, [expected])
    table = declared(pa.fixed_shape_tensor(pa.float32(), [1, 2]), np.zeros((1, 2)), None)
    assert same(table.columns, [[np.zeros((1, 2), "f4"), None]])
    assert same(declared(pa.int32(), 1, None).columns, [[1, None]])
    assert same(declared(pa.float32(), 1, 0.5).columns, [[1.0, 0.5]])
    assert same(declared(pa.large_string(), "a").columns, [["a"]])
    assert same(declared(pa.dictionary(pa.int32(), pa.string()), "a").columns, [["a"]])
    assert same(declared(pa.list_(pa.string()), ["a", "b"]).columns, [[["a", "b"]]])
    struct = pa.struct([("a", pa.float32()), ("b", pa.int8())])
    assert same(declared(struct, {"a": 1}).columns, [[{"a": 1.0, "b": None}]])
    berlin = pa.timestamp("us", "Europe/Berlin")
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    assert same(declared(berlin, moment).columns, [[moment]])


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        (pa.list_(pa.float32(), 2), [1.0]),
        (pa.list_(pa.float32(), 2), "ab"),
        (pa.list_(pa.float32(), 4), np.zeros((2, 2))),
        (pa.fixed_shape_tensor(pa.float32(), [2, 2]), np.zeros((4, 1))),
        (pa.int32(), 1.5),
        (pa.int32(), 2**40),
        (pa.int32(), "1"),
        (pa.list_(pa.int64()), np.array([1.5])),
        (pa.string(), b"a"),
        (pa.string(), 1),
        (pa.timestamp("us"), 5),
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


@settings(max_examples=200, deadline=None)
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
    assert not (misfits and whole.agree)
    assert len(misfits) < len(values) or all(read(value)[1] == "any" for value in values)


def test_one_odd_row_leaves_vectors_of_one_length() -> None:
    kinds = kinds_of([[np.zeros(3, "f4")] * 9, ["error"]])
    assert arrow_type(kinds.final()) == pa.list_(pa.float32(), 3)
    array, misfits = fit(np.ones((2, 3), "f4"), kinds.final())
    assert (array.to_pylist(), misfits) == ([[1.0] * 3] * 2, {})


def test_dicts_with_optional_fields_outnumber_one_more_frequent_string() -> None:
    dicts: list[list[Any]] = [[{f"field {number}": 1}] * 3 for number in range(20)]
    kinds = kinds_of([*dicts, ["no JSON"] * 5])
    assert arrow_type(kinds.final()).num_fields == 20


@pytest.mark.parametrize("turn", [1, -1])
def test_the_kind_of_a_column_is_found_among_any_number_of_kinds(turn: int) -> None:
    kinds = kinds_of([[1], *[[{f"{number:03}": 1}] for number in range(2 * MOST_KINDS)][::turn]])
    assert not kinds.agree
    final: Any = kinds.final()
    names = list(dict(final[1]))
    assert names == [f"{number:03}" for number in range(MOST_KINDS - 1)]


def test_arrow_would_lose_what_fit_refuses() -> None:
    for kind, value in (
        ("int64", 1.5),
        ("date", datetime(2024, 1, 1, 5)),
        ("datetime", datetime(2024, 1, 1, tzinfo=UTC)),
        (("struct", (("a", "int53"),)), {"a": 1, "b": 2}),
        ("float", 2**53 + 1),
        ("str", b"a"),
        ("bool", 1),
    ):
        column, misfits = fit([None, value], kind)
        assert column.null_count == 2
        assert list(misfits) == [1]


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        (np.ones((2, 3), "f4"), ("array", "float64", (3,))),
        (np.ones((2, 3), "f4"), ("array", "float32", None)),
        (np.ones((2, 3, 4), "f4"), ("array", "float32", (3, 4))),
        (np.ones((2, 3, 4), "f4"), ("list", ("array", "float64", None))),
        (np.ones((0, 3), "f4"), ("array", "float32", (3,))),
    ],
    ids=repr,
)
def test_arrays_of_one_shape_are_made_wider(block: Any, kind: Any) -> None:
    array, misfits = fit(block, kind)
    assert (array.type, misfits) == (arrow_type(kind), {})
    assert np.array_equal(np.ravel([np.ravel(row) for row in to_python(array)]), np.ravel(block))


def test_arrays_of_another_shape_are_misfits() -> None:
    array, misfits = fit(np.ones((2, 3), "f4"), ("array", "float32", (4,)))
    assert (array.null_count, list(misfits)) == (2, [0, 1])


def test_a_column_without_rows_has_its_declared_type() -> None:
    assert fit([], pa.list_(pa.float32(), 3))[0].type == pa.list_(pa.float32(), 3)


def test_columns_without_rows_have_no_kind() -> None:
    assert Kinds().agree
    assert arrow_type(Kinds().final()) == pa.null()


def test_dicts_without_fields_are_misfits_in_a_typed_result() -> None:
    kind = without_empty(kinds_of([[{}, {"a": {}, "b": [{}]}]]).final())
    assert kind == ("struct", (("a", "null"), ("b", ("list", "null"))))
    assert without_empty("float") == "float"
    column, misfits = fit([{}, {"a": {}, "b": [{}]}, {"a": None, "b": []}], kind)
    assert (list(misfits), column.null_count) == ([1], 1)
