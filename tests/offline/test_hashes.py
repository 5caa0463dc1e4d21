"""Hashes of inputs: equal for equal values however they were read, different for any others."""

from __future__ import annotations

import datetime as dt
import enum
import itertools
import json
import pathlib
import subprocess
import sys
import uuid
from collections import OrderedDict
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest

pa = pytest.importorskip("pyarrow")

import numpy as np  # noqa: E402  # after the skip
import pyarrow.parquet as pq  # noqa: E402  # after the skip

from batched.errors import SourceError  # noqa: E402  # after the skip
from batched.offline._hashing import hash_inputs  # noqa: E402  # after the skip
from batched.offline._source import Window, open_source  # noqa: E402  # after the skip

NAN = float("nan")
UTC = dt.UTC


def hash_of(*values: Any) -> int:
    columns = {f"c{number}": [value] for number, value in enumerate(values)}
    (number,) = hash_inputs(Window(0, 1, columns), list(columns))
    return number


DIFFERENT = [
    *(1, 1.0, True, "1", None, b"1", Decimal(1), [1], (1, 1), {1}, {"1": 1}, 1j),
    *(0, 0.0, -0.0, False, "", b"", [], {}, NAN, float("inf"), set(), "None", "nan"),
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
    uuid.UUID(int=1),
    Path("1"),
]


def test_values_that_differ_have_hashes_that_differ() -> None:
    hashes = [hash_of(value) for value in DIFFERENT]
    for (one, first), (other, second) in itertools.combinations(
        zip(hashes, DIFFERENT, strict=True), 2
    ):
        assert one != other, (first, second)


class Point(NamedTuple):
    x: int
    y: str


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "equal"),
    [
        (np.int8(5), 5),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float64(0.5), 0.5),
        (np.bool_(1), True),
        (np.str_("a"), "a"),
        (np.bytes_(b"a"), b"a"),
        (np.array([0.5, 1.5], "f4"), [0.5, 1.5]),
        (np.array([1, 2], "u1"), [1, 2]),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array(["a", 1], object), ["a", 1]),
        (np.datetime64("2020-01-01T00:00:01"), dt.datetime(2020, 1, 1, 0, 0, 1)),
        ((1, 2), [1, 2]),
        (Point(1, "a"), [1, "a"]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (OrderedDict(b=2, a=1), {"a": 1, "b": 2}),
        ({"b", "a", "c"}, {"c", "b", "a"}),
        (bytearray(b"a"), b"a"),
        (Colour.RED, "red"),
        (-NAN, NAN),
        (np.array([-NAN, 1.0]), [NAN, 1.0]),
        (pathlib.PurePosixPath("a"), Path("a")),
        (dt.datetime(2020, 1, 1, tzinfo=UTC), dt.datetime(2020, 1, 1, tzinfo=ZoneInfo("UTC"))),
    ],
)
def test_the_same_value_in_another_form_has_the_same_hash(value: Any, equal: Any) -> None:
    assert hash_of(value) == hash_of(equal)


def test_tensors_hash_as_lists() -> None:
    torch = pytest.importorskip("torch")
    assert hash_of(torch.tensor([0.5, 1.5])) == hash_of([0.5, 1.5])


def test_columns_count_by_place_and_do_not_run_into_each_other() -> None:
    rows = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("c", "ab"), ("abc",)]
    assert len({hash_of(*row) for row in rows}) == len(rows)


def test_hashes_are_signed_integers_of_64_bits() -> None:
    hashes = [hash_of(number) for number in range(200)]
    assert all(-(2**63) <= number < 2**63 for number in hashes)
    assert any(number < 0 for number in hashes)
    assert any(number > 0 for number in hashes)


def test_each_row_has_its_own_hash() -> None:
    window = Window(0, 3, {"a": pa.array(["x", None, "x"]), "b": [1, 1, 1]})
    first, second, third = hash_inputs(window, ["a", "b"])
    assert first == third != second


def test_hashes_are_the_same_in_every_process_and_with_every_python() -> None:
    # as computed by CPython 3.11, 3.12 and 3.13
    assert [hash_of(value) for value in ("text", [0.5, None], {"a": {"b", "c"}})] == PINNED
    code = (
        "from batched.offline._hashing import *\n"
        "from batched.offline._window import Window\n"
        "values = ['text', [0.5, None], {'a': {'b', 'c'}}]\n"
        "print(hash_inputs(Window(0, 3, {'x': values}), ['x']))"
    )
    for seed in "1", "2":
        shown = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert json.loads(shown.stdout) == PINNED


PINNED = [1722920342158922523, -1057327258966018147, 8707446626851083500]


ROWS: list[dict[str, Any]] = [
    {"text": "é\0", "n": 2**62, "x": -0.0, "flag": True, "v": [0.5, 1.5], "d": {"a": 1, "b": "x"}},
    {"text": "", "n": None, "x": 1.0, "flag": None, "v": [], "d": {"a": 2, "b": None}},
]


def test_a_row_hashes_alike_from_parquet_jsonl_arrow_or_dicts(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    hashes = []
    for source in (
        tmp_path / "rows.parquet",
        tmp_path / "rows.jsonl",
        table,
        table.to_reader(),
        ROWS,
        iter(ROWS),
    ):
        opened = open_source(source, spool=tmp_path / "spool")
        (window,) = opened.windows(list(ROWS[0]))
        hashes.append(hash_inputs(window, list(ROWS[0])))
        opened.close()
    assert all(found == hashes[0] for found in hashes)
    assert hashes[0][0] != hashes[0][1]


def test_values_of_unknown_types_are_refused_with_row_and_column() -> None:
    window = Window(10, 2, {"a": ["x", "y"], "b": [1, [object()]]})
    with pytest.raises(SourceError, match=r"row 11 .*column 'b' has a builtins\.object"):
        hash_inputs(window, ["a", "b"])


def test_no_columns_are_the_same_input_in_every_row() -> None:
    assert len(set(hash_inputs(Window(0, 3, {}), []))) == 1
