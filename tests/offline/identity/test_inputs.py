"""Hashes of inputs: equal for equal values from any source, different for different values."""

from __future__ import annotations

import datetime as dt
import enum
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batched.offline.identity.inputs import hash_inputs
from batched.offline.sources.base import Window
from batched.offline.sources.opening import open_source

NAN = float("nan")
UTC = dt.UTC


def hash_of(*values: Any) -> int:
    columns = {f"c{number}": [value] for number, value in enumerate(values)}
    (number,) = hash_inputs(Window(0, 1, columns), list(columns))
    return number


DIFFERENT = [
    *(1, 1.0, True, "1", None, b"1", Decimal(1), [1], (1, 1), {"1": 1}),
    *(0, 0.0, -0.0, False, "", b"", [], {}, NAN, float("inf"), "None", "nan"),
    *(-1, 255, 256, -256, 2**63, 2**64, -(2**70), 1e300, Decimal("1.0")),
    *([1.0], [1, 1.0], [1.0, None], [[1.0]], [[1], [1]], [[1, 1]], ["11"], ["1", "1"]),
    *({"a": 1, "b": None}, {"a": 1}, {"a": {"b": 1}}, [["a", 1]]),
    *("é", "e\u0301", "a\0", "a", "\ud800"),
    *([NAN], [NAN, 1.0], [None], [float("inf"), -float("inf")]),
    dt.datetime(2020, 1, 1),
    dt.datetime(2020, 1, 1, tzinfo=UTC),
    dt.datetime(2020, 1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1))),
    dt.date(2020, 1, 1),
    dt.time(1),
    dt.timedelta(1),
    "2020-01-01",
    np.datetime64("2020-01-01T00:00:00.000000001"),
]


def test_values_that_differ_have_hashes_that_differ() -> None:
    seen: dict[int, Any] = {}
    for value in DIFFERENT:
        other = seen.setdefault(hash_of(value), value)
        assert other is value, (other, value)


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "equal"),
    [
        (np.int8(5), 5),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.array([0.5, 1.5], "f4"), [0.5, 1.5]),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array(["a", 1], object), ["a", 1]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Colour.RED, "red"),
        (-NAN, NAN),
        (np.array([-NAN, 1.0]), [NAN, 1.0]),
        (dt.datetime(2020, 1, 1, tzinfo=UTC), dt.datetime(2020, 1, 1, tzinfo=ZoneInfo("UTC"))),
    ],
)
def test_the_same_value_in_another_form_has_the_same_hash(value: Any, equal: Any) -> None:
    assert hash_of(value) == hash_of(equal)


def test_columns_count_by_place_and_do_not_run_into_each_other() -> None:
    rows = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("c", "ab"), ("abc",)]
    assert len({hash_of(*row) for row in rows}) == len(rows)


def test_hashes_are_the_same_in_every_process_and_with_every_python() -> None:
    values = ["text", [0.5, None], {"a": [1, b"b"]}]
    assert hash_inputs(Window(0, 3, {"x": values}), ["x"]) == PINNED


PINNED = [-996280320281647786, -2693736208708074548, 8900171816912377713]
"""Hashes as computed by CPython 3.11, 3.12 and 3.13."""


ROWS: list[dict[str, Any]] = [
    {"text": "é\0", "n": 2**62, "x": -0.0, "flag": True, "v": [0.5, 1.5], "d": {"a": 1, "b": "x"}},
    {"text": "", "n": None, "x": 1.0, "flag": None, "v": [], "d": {"a": 2, "b": None}},
]


def test_a_row_hashes_alike_from_parquet_jsonl_arrow_or_dicts(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    parquet, jsonl = tmp_path / "rows.parquet", tmp_path / "rows.jsonl"
    pq.write_table(table, parquet)
    jsonl.write_text("\n".join(map(json.dumps, ROWS)))
    hashes = []
    for source in (parquet, jsonl, table, table.to_reader(), ROWS, iter(ROWS)):
        opened = open_source(source, spool=tmp_path / "spool")
        (window,) = opened.windows(list(ROWS[0]))
        hashes.append(hash_inputs(window, list(ROWS[0])))
        opened.close()
    assert all(found == hashes[0] for found in hashes)
    assert hashes[0][0] != hashes[0][1]


def test_a_value_of_an_unknown_type_is_a_fault_of_its_row() -> None:
    window = Window(10, 3, {"a": ["x", "y", "z"], "b": [1, [object()], 2]})
    hashes = hash_inputs(window, ["a", "b"])
    assert hashes[1] == 0
    assert 0 not in (hashes[0], hashes[2])
    (sentence,) = window.faults.values()
    assert re.match(
        r"row 11 .*: a value of 'a' or 'b' has no stable hash \(.*object.*\); rows hold", sentence
    )
    assert hash_inputs(Window(0, 1, {"a": ["z"], "b": [2]}), ["a", "b"]) == hashes[2:]
