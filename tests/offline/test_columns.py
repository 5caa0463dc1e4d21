"""Results of a step as Arrow columns: what fits, what is refused, and what comes back."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")

import pyarrow.parquet as pq  # noqa: E402  # after the skip
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from batched.offline._chunks import from_bytes, to_bytes  # noqa: E402
from batched.offline._columns import Columns  # noqa: E402
from batched.offline._values import MAX_DEPTH, MAX_FIELDS  # noqa: E402


class Colour(StrEnum):
    RED = "red"


class Number(IntEnum):
    ONE = 1


@dataclass
class Point:
    x: int
    y: float


def stored(columns: Columns, results: list[Any]) -> tuple[Any, dict[int, str]]:
    """The batch after a way through the progress file."""
    batch, reasons = columns.encode(results)
    return from_bytes(to_bytes([batch])), reasons


def values(columns: Columns, batch: Any) -> list[Any]:
    return [row["out"] for row in columns.decode(batch)]


def taken(*results: Any, after: tuple[Any, ...] = ()) -> list[Any]:
    """What comes back of results that all fit, with the types of Python."""
    columns = Columns(["out"])
    assert not columns.encode(list(after))[1]
    batch, reasons = stored(columns, list(results))
    assert not reasons
    return values(columns, batch)


def refused(result: Any, after: tuple[Any, ...] = ()) -> str:
    """The sentence for a result that does not fit; its neighbours do."""
    columns = Columns(["out"])
    assert not columns.encode(list(after))[1]
    batch, reasons = stored(columns, [None, result, None])
    assert list(reasons) == [1]
    assert values(columns, batch) == [None, None]
    reasons[1].encode()
    return reasons[1]


def same(one: Any, other: Any) -> bool:
    """Equality of values and of their types; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


ZONE = timezone(timedelta(hours=5, minutes=30))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**63),
        2**63 - 1,
        0.1,
        math.nan,
        -math.inf,
        "",
        "a\0b\U0001f600",
        b"\xff\0",
        date(1, 1, 1),
        time(1, 2, 3, 4),
        datetime(9999, 12, 31, 23, 59, 59, 999999),
        datetime(1970, 1, 1, tzinfo=UTC),
        timedelta(days=-3, microseconds=1),
        Decimal("-12.50"),
        [],
        [1, 2],
        [[], [None], ["x"]],
        {"a": None, "b": {"c": [1.5]}, "": [{"d": "x"}]},
        np.array([0.1, math.nan], "float32"),
        np.array([1, 2**63], "uint64"),
        np.array([True, False]),
        np.array([], "int8"),
        {"vector": np.array([1, 2], "int16"), "score": 1},
        [np.array([1.0]), np.array([2.0])],
    ],
    ids=repr,
)
def test_values_come_back_as_they_went_in(value: Any) -> None:
    for results in ([value], [value, None], [None, value, value]):
        back = taken(*results)
        assert same(back, results)


def test_other_kinds_come_back_as_plain_ones() -> None:
    assert same(taken((1, 2)), [[1, 2]])
    assert same(taken(Colour.RED, "x"), ["red", "x"])
    assert same(taken(Number.ONE), [1])
    assert same(taken({Colour.RED: 1}), [{"red": 1}])
    assert same(taken(type("Share", (float,), {})(0.5)), [0.5])
    assert same(taken(type("Pair", (list,), {})([1, 2])), [[1, 2]])
    assert same(taken(bytearray(b"x"), memoryview(b"y")), [b"x", b"y"])
    assert same(
        taken(Point(1, 2.5), OrderedDict(x=2, y=0.5)), [{"x": 1, "y": 2.5}, {"x": 2, "y": 0.5}]
    )
    assert same(taken(datetime(2024, 1, 1, 5, 30, tzinfo=ZONE)), [datetime(2024, 1, 1, tzinfo=UTC)])


def test_scalars_of_numpy_are_those_of_python() -> None:
    scalars = [np.float32(0.5), np.float64(0.25), np.float16(2), np.array(1.5), np.array(1.5)[()]]
    assert same(taken(*scalars), [0.5, 0.25, 2.0, 1.5, 1.5])
    assert same(taken(np.int8(1), np.uint64(2), np.array(3)), [1, 2, 3])
    assert same(taken(np.bool_(True), np.array(False)), [True, False])
    assert same(taken(np.str_("x"), np.array("y")), ["x", "y"])
    assert same(
        taken(np.datetime64("2024-01-01T00:00:00.5", "ns"), np.datetime64("NaT", "ns")),
        [datetime(2024, 1, 1, microsecond=500_000), None],
    )
    assert same(taken(np.timedelta64(3, "s")), [timedelta(seconds=3)])
    assert "microsecond" in refused(np.datetime64(1, "ns"))
    assert "complex128" in refused(np.complex128(1))
    assert "longdouble" in refused(np.longdouble(1)) or "float128" in refused(np.longdouble(1))


def test_arrays_of_other_forms_are_plain_vectors() -> None:
    strided = np.arange(6, dtype="int32")[::-2]
    assert same(taken(strided), [np.array([5, 3, 1], "int32")])
    assert same(taken(np.array([1, 2], ">f4")), [np.array([1, 2], "float32")])
    assert same(taken(np.array([1, 2], "float16")), [np.array([1, 2], "float32")])
    assert same(taken(np.array(["a", "b"])), [["a", "b"]])
    assert same(taken(np.array([1, None], object)), [[1, None]])
    assert same(taken(np.ma.masked_array([1, 2], [False, True])), [[1, None]])


def test_tensors_are_vectors() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.tensor([[0.5, 1.5], [2.5, 3.5]], requires_grad=True)
    expected = [np.array([0.5, 1.5], "float32"), np.array([2.5, 3.5], "float32")]
    assert same(taken(*rows), expected)
    assert same(taken(*rows.bfloat16()), expected)
    assert same(taken(*rows.half()), expected)
    assert same(taken(*(rows > 1)), [np.array([False, True]), np.array([True, True])])
    assert same(taken(*rows[0]), [0.5, 1.5])
    assert same(taken({"v": rows[0]}), [{"v": expected[0]}])


def test_values_of_pandas_are_those_of_python_and_numpy() -> None:
    pd = pytest.importorskip("pandas")
    assert same(taken(pd.Series([0.5, 1.5])), [np.array([0.5, 1.5])])
    assert same(taken(pd.Timestamp("2024-01-01"), pd.NaT), [datetime(2024, 1, 1), None])
    assert same(taken(pd.Timestamp("2024-01-01", tz="UTC")), [datetime(2024, 1, 1, tzinfo=UTC)])
    assert same(taken(pd.Timedelta(seconds=2)), [timedelta(seconds=2)])
    assert "microsecond" in refused(pd.Timestamp(1))


def test_vectors_may_be_changed_by_the_step_that_reads_them() -> None:
    for back in (taken(np.zeros(2), np.zeros(2)), taken(np.zeros(2), np.zeros(3))):
        back[0] += 1
        assert back[1][0] == 0


REFUSED: list[tuple[Any, str]] = [
    ({}, "empty dict"),
    ({"a": [{}]}, "empty dict"),
    (2**70, "64 bits"),
    (-(2**63) - 1, "64 bits"),
    ([2**70], "64 bits"),
    (10**5_000, "64 bits"),
    (np.zeros((2, 3)), "shape (2, 3)"),
    ({1, 2}, "values of type set cannot be stored"),
    (object(), "values of type object cannot be stored"),
    (1j, "values of type complex cannot be stored"),
    (Colour, "values of type EnumType cannot be stored"),
    ((n for n in "x"), "values of type generator cannot be stored"),
    ("\ud800", "surrogates"),
    (["a", "\ud800"], "surrogates"),
    ({"\ud800": 1}, "surrogates"),
    ({1: "a"}, "keys of a dict must be str"),
    ([1, "a"], "one type, and this has int64 and string"),
    (["a", b"a"], "one type, and this has string and binary"),
    ([True, 1], "one type, and this has bool and int64"),
    (time(1, tzinfo=UTC), "zone"),
    (datetime(1, 1, 1, tzinfo=ZONE), "OverflowError"),
    (Decimal("NaN"), "finite"),
    (Decimal(10**40), "38 digits"),
    (timedelta.max, "Arrow cannot hold"),
    (np.array(["2024-01-01"], "datetime64[s]"), "datetime64[s]"),
    (np.zeros(2, complex), "complex128"),
    (dict.fromkeys(map(str, range(MAX_FIELDS + 1))), "1,000 fields"),
]


@pytest.mark.parametrize(("result", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_no_column_takes_is_refused_at_its_row(result: Any, words: str) -> None:
    assert words in refused(result)


def test_an_object_that_cannot_even_be_shown_is_refused_at_its_row() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("broken \ud800")

    assert "RuntimeError: broken \\ud800" in refused(Broken())


def test_depth_is_bounded(tmp_path: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert f"more than {MAX_DEPTH} levels" in refused(circle)
    deep: Any = 1
    for level in range(MAX_DEPTH + 1):
        deep = [deep] if level % 2 else {"a": deep}
    assert taken(deep) == [deep]
    columns = Columns(["out"])
    pq.write_table(pa.Table.from_batches([columns.encode([deep])[0]]), tmp_path / "deep.parquet")
    assert pq.read_table(tmp_path / "deep.parquet").to_pylist() == [{"out": deep}]


@pytest.mark.parametrize(
    ("before", "result", "held", "shown"),
    [
        (1, "n/a", "int64", "str 'n/a'"),
        (1, True, "int64", "bool True"),
        (True, 1, "bool", "int 1"),
        ("a", b"a", "string", "bytes b'a'"),
        (b"a", "a", "binary", "str 'a'"),
        (0.5, 2**53 + 1, "double", "int 9007199254740993"),
        (2**53 + 1, 0.5, "int64", "float 0.5"),
        (datetime(2024, 1, 1), datetime(2024, 1, 1, tzinfo=UTC), "timestamp[us]", "datetime "),
        (
            datetime(2024, 1, 1, tzinfo=UTC),
            datetime(2024, 1, 1),
            "timestamp[us, tz=UTC]",
            "datetime ",
        ),
        (date(2024, 1, 1), datetime(2024, 1, 1), "date32[day]", "datetime "),
        ([1], 1, "list<item: int64>", "int 1"),
        (np.array([1.0]), np.array([1]), "arrays of float64", "ndarray array([1])"),
        (Decimal(1), 1.0, "decimal128(1, 0)", "float 1.0"),
    ],
    ids=repr,
)
def test_a_result_of_another_type_is_refused_at_its_row(
    before: Any, result: Any, held: str, shown: str
) -> None:
    reason = refused(result, after=(before,))
    assert reason.startswith(f"column 'out' holds {held} so far, and this row's result is {shown}")


def test_the_sentence_names_the_place_within_a_result() -> None:
    assert refused({"a": [{"b": "x"}]}, after=({"a": [{"b": 1}]},)) == (
        "column 'out' holds int64 so far in 'a[].b', and string in this row's result "
        "dict {'a': [{'b': 'x'}]}"
    )


def test_types_widen_where_nothing_is_lost() -> None:
    assert same(taken(1, 2.5), [1.0, 2.5])
    assert same(taken(2**53, 0.5), [2.0**53, 0.5])
    assert same(taken([1], [0.5], [None], []), [[1.0], [0.5], [None], []])
    assert same(taken({"a": 1}, {"b": "x"}), [{"a": 1, "b": None}, {"a": None, "b": "x"}])
    assert same(taken({"a": {"b": 1}}, {"a": {"c": 2}})[0], {"a": {"b": 1, "c": None}})
    assert taken(Decimal("1.5"), Decimal(100), Decimal("0.25")) == [
        Decimal("1.5"),
        Decimal(100),
        Decimal("0.25"),
    ]
    assert "38 digits" in refused(Decimal("1e-30"), after=(Decimal("1e30"),))


def test_fields_are_bounded() -> None:
    many = dict.fromkeys(map(str, range(MAX_FIELDS)), 1)
    assert "1,000 fields" in refused({"one": 1}, after=(many,))


def test_vectors_of_one_length_widen_to_any_and_to_lists() -> None:
    two, three = np.array([1, 2], "float32"), np.array([1, 2, 3], "float32")
    assert same(taken(two, three, None, two[:0]), [two, three, None, two[:0]])
    assert same(taken(two, two.astype("float64")), [two.astype("float64")] * 2)
    assert same(taken(np.array([1], "int8"), np.array([300])), [np.array([1]), np.array([300])])
    assert same(taken(two, [0.1]), [[1.0, 2.0], [0.1]])
    assert same(taken(np.array([1]), [2]), [[1], [2]])
    assert same(taken(np.array([1], "uint8"), [0.5]), [[1.0], [0.5]])
    assert "uint64" in refused([1], after=(np.array([1], "uint64"),))


def test_vectors_are_of_fixed_size_and_keep_their_dtype() -> None:
    columns = Columns(["out"])
    columns.encode(list(np.zeros((4, 3), "float32")))
    assert columns.schema.field("out").type == pa.list_(pa.float32(), 3)
    columns.encode([])
    assert columns.schema.field("out").type == pa.list_(pa.float32(), 3)
    columns.encode([[0.5]])
    assert columns.schema.field("out").type == pa.list_(pa.float64())


def test_missing_vectors_make_lists_of_any_length() -> None:
    # pyarrow 20 cannot read missing rows of a fixed_size_list from Parquet
    vector = np.zeros(3, "float32")
    for results in ([vector, None], [None, vector]):
        for batches in ([results], [[result] for result in results]):
            columns = Columns(["out"])
            for batch in batches:
                columns.encode(batch)
            assert columns.schema.field("out").type == pa.large_list(pa.float32())
    columns = Columns(["out"])
    columns.encode([{"v": vector}])
    inner = columns.schema.field("out").type.field("v").type
    assert inner == pa.large_list(pa.float32())


def test_a_row_that_is_refused_widens_nothing() -> None:
    columns = Columns(["score", "label"])
    _, reasons = columns.encode([{"score": "n/a", "label": {}}, {"score": 1, "label": "x"}])
    assert list(reasons) == [0]
    assert columns.schema == pa.schema([("score", pa.int64()), ("label", pa.string())])


def test_types_go_on_from_a_stored_state() -> None:
    columns = Columns(["out"])
    columns.encode([{"n": 2**53 + 1, "v": np.zeros(2), "d": Decimal("1.5"), "l": [1]}])
    again = Columns(["out"], columns.state())
    assert again.schema == columns.schema
    _, reasons = again.encode([{"n": 0.5}, {"v": np.zeros(3)}, {"l": [0.5]}])
    assert list(reasons) == [0]
    assert json.loads(again.state()) != json.loads(columns.state())


def test_earlier_batches_are_cast_to_the_last_types() -> None:
    columns = Columns(["out"])
    rows = [
        None,
        {"a": 1},
        {"a": 0.5, "v": np.zeros(2)},
        {"v": np.ones(3), "l": [None]},
        {"l": [{"x": datetime(2024, 1, 1, tzinfo=UTC)}], "d": Decimal(1)},
        {"l": [{"y": 1}], "d": Decimal("0.5")},
    ]
    batches = [stored(columns, [row])[0] for row in rows]
    last = [columns.cast(batch) for batch in batches]
    assert {str(batch.schema) for batch in last} == {str(columns.schema)}
    table = pa.Table.from_batches(last)
    everything = Columns(["out"], columns.state())
    assert table.equals(pa.Table.from_batches([everything.encode(rows)[0]]).combine_chunks())


def test_flat_columns_are_cast_too() -> None:
    columns = Columns(["n", "d", "v", "none"])
    first, _ = columns.encode([{"n": 1, "d": Decimal(1), "v": np.zeros(2), "none": None}])
    second, _ = columns.encode(
        [{"n": 0.5, "d": Decimal("0.5"), "v": np.zeros(3), "none": {"a": 1}}]
    )
    assert columns.cast(first).schema == second.schema == columns.schema
    assert columns.cast(second).equals(second)


def test_a_resumed_step_reads_what_it_read_before() -> None:
    columns = Columns(["out"])
    batch, _ = columns.encode([1, None, 3])
    first = values(columns, batch)
    chunk = to_bytes([batch])
    columns.encode([0.5])
    assert same(values(Columns(["out"], columns.state()), from_bytes(chunk)), first)


def test_rows_are_decoded_by_place() -> None:
    columns = Columns(["a", "b"])
    batch, _ = columns.encode([{"a": n, "b": {"v": [str(n)] * n}} for n in range(4)])
    assert columns.decode(batch, [3, 0]) == [
        {"a": 3, "b": {"v": ["3", "3", "3"]}},
        {"a": 0, "b": {"v": []}},
    ]
    assert columns.decode(batch, []) == []
    assert columns.decode(batch.slice(1, 2)) == columns.decode(batch, [1, 2])


def test_slices_of_vectors_are_decoded() -> None:
    for rows in ([np.full(2, n) for n in range(4)], [np.full(n, n) for n in range(4)]):
        columns = Columns(["out"])
        batch, _ = columns.encode([*rows, None])
        assert same(values(columns, batch.slice(1)), [*rows[1:], None])


def test_several_outputs_are_a_dict_with_all_names() -> None:
    columns = Columns(["label", "score"])
    batch, reasons = columns.encode(
        [
            {"score": 0.5, "label": "x"},
            {"label": "x"},
            {"label": "x", "score": 0.5, "more": 1},
            {"label": "x", "\ud800": 1},
            ("x", 0.5),
            {"label": "x", "score": {}},
        ]
    )
    assert columns.decode(batch) == [{"label": "x", "score": 0.5}]
    wanted = "each row's result must be a dict with 'label', 'score', and this row's "
    assert reasons == {
        1: wanted + "lacks 'score'",
        2: wanted + "has 'more', too",
        3: wanted + "lacks 'score' and has '\\ud800', too",
        4: wanted + "is tuple ('x', 0.5)",
        5: "column 'score' cannot take dict {}: Parquet has no empty dicts; return None in its "
        "place",
    }

    class Broken(UserDict[str, Any]):
        def __iter__(self) -> Any:
            raise RuntimeError

    assert "and this row's is Broken " in columns.encode([Broken(label="x")])[1][0]

    @dataclass
    class Answer:
        label: str
        score: float

    assert not columns.encode([Answer("x", 0.5)])[1]


def test_no_rows_are_a_batch_of_none() -> None:
    columns = Columns(["a", "b"])
    assert stored(columns, [])[0].num_rows == 0
    batch, reasons = columns.encode([1, 2])
    assert len(reasons) == 2
    assert columns.decode(batch) == []


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.text(st.characters(), max_size=5),
    st.binary(max_size=5),
    st.datetimes(),
    st.decimals(allow_nan=True),
    st.timedeltas(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)


def lossless(went_in: Any, back: Any) -> bool:
    """Equal, but for integers as floats and fields that are None."""
    if isinstance(went_in, dict):
        return all(lossless(went_in.get(name), back[name]) for name in back)
    if isinstance(went_in, list):
        return len(went_in) == len(back) and all(map(lossless, went_in, back))
    if type(went_in) is not type(back) and (type(went_in), type(back)) != (int, float):
        return False
    return bool(went_in == back) or went_in != went_in


@pytest.mark.once
@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.lists(VALUES, max_size=5), max_size=4))
def test_whatever_comes_is_stored_without_loss_or_refused(batches: list[list[Any]]) -> None:
    columns = Columns(["out"])
    chunks = []
    for results in batches:
        batch, reasons = columns.encode(results)
        kept = [value for place, value in enumerate(results) if place not in reasons]
        assert batch.num_rows == len(kept)
        chunks.append((to_bytes([batch]), kept))
        columns = Columns(["out"], columns.state())
    for chunk, kept in chunks:
        batch = from_bytes(chunk)
        assert all(map(lossless, kept, values(columns, batch)))
        last = columns.cast(batch)
        assert last.schema == columns.schema
        assert all(map(lossless, kept, values(columns, last)))
