"""Types of Arrow that a result keeps: each is exact in Parquet, JSON and CSV."""

from __future__ import annotations

import csv
import datetime as dt
import json
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batched import offline

DAY = dt.datetime(2024, 1, 2, 3, 4, 5)
UTC = DAY.replace(tzinfo=dt.UTC)
SPAN = dt.timedelta(days=1, seconds=0.5)


def column(kind: Any, value: Any) -> Any:
    return pa.array([value, None], kind)


# a column, and its first value as JSON
TYPES: dict[str, tuple[Any, Any]] = {
    "null": (pa.nulls(2), None),
    "bool": (column(pa.bool_(), True), True),
    "int64": (column("int64", -(2**63)), -(2**63)),
    "uint64": (column("uint64", 2**64 - 1), 2**64 - 1),
    "halffloat": (column(pa.float16(), np.float16(0.5)), 0.5),
    "double": (column(pa.float64(), 0.1), 0.1),
    "string_view": (column(pa.string_view(), "é"), "é"),
    "binary_view": (column(pa.binary_view(), b"ab"), "YWI="),
    "fixed_size_binary": (column(pa.binary(2), b"ab"), "YWI="),
    "date32": (column(pa.date32(), DAY.date()), "2024-01-02"),
    "time64": (column(pa.time64("us"), DAY.time()), "03:04:05"),
    "timestamp": (column(pa.timestamp("ns"), DAY), "2024-01-02T03:04:05"),
    "timestamp in UTC": (column(pa.timestamp("us", "UTC"), UTC), "2024-01-02T03:04:05+00:00"),
    "timestamp in Berlin": (
        column(pa.timestamp("us", "Europe/Berlin"), UTC),
        "2024-01-02T04:04:05+01:00",
    ),
    "duration": (column(pa.duration("ns"), SPAN), 86400.5),
    "interval": (column(pa.month_day_nano_interval(), (1, 2, 500_000_000)), "P1M2DT0.5S"),
    "decimal128": (column(pa.decimal128(5, 2), Decimal("1.50")), "1.50"),
    "list": (column(pa.list_(pa.int64()), [1, None]), [1, None]),
    "list of floats": (column(pa.list_(pa.float32()), [0.1, 2]), [0.1, 2.0]),
    "fixed_size_list": (
        pa.array([[0.5, 2], [1, 1]], pa.list_(pa.float32(), 2)),  # pyarrow 25 reads no null
        [0.5, 2.0],
    ),
    "struct": (
        column(pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string()))]), {"a": 1, "b": ["x"]}),
        {"a": 1, "b": ["x"]},
    ),
    "list of structs": (column(pa.list_(pa.struct([("a", pa.int8())])), [{"a": 1}]), [{"a": 1}]),
    "map": (column(pa.map_(pa.string(), pa.int64()), [("a", 1)]), [["a", 1]]),
    "dictionary": (pa.array(["a", None]).dictionary_encode(), "a"),
    "run_end_encoded": (pa.RunEndEncodedArray.from_arrays([2], ["a"]), "a"),
    "uuid": (
        pa.ExtensionArray.from_storage(pa.uuid(), column(pa.binary(16), uuid.UUID(int=5).bytes)),
        str(uuid.UUID(int=5)),
    ),
    "fixed_shape_tensor": (
        pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((2, 2, 2), "f4")),
        [[1.0, 1.0], [1.0, 1.0]],
    ),
    "list_view": (column(pa.list_view(pa.int64()), [1]), [1]),
    "union": (
        pa.UnionArray.from_dense(
            pa.array([0, 1], pa.int8()),
            pa.array([0, 0], pa.int32()),
            [pa.array([1]), pa.array(["a"])],
        ),
        1,
    ),
}
REFUSED = ("interval", "union", "run_end_encoded", "list_view")
"""Types that Parquet has not in every version of pyarrow."""
ARRAYS = {name: array for name, (array, _) in TYPES.items()}


def run(columns: dict[str, Any], dest: Path) -> Path:
    """Return a result that keeps columns."""
    settings: dict[str, Any] = {"input": "id", "output": "out", "key": "id", "version": 1}
    table = pa.table({"id": [1, 2], **columns})
    offline.run(lambda items: items, table, dest, **settings, watch=False)
    return dest


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return rows as JSON, rows of CSV, and a table of Parquet that have all columns."""
    folder = tmp_path_factory.mktemp("kept")
    lines = run(ARRAYS, folder / "out.jsonl").read_text().splitlines()
    with run(ARRAYS, folder / "out.csv").open(newline="") as file:
        cells = [*csv.DictReader(file)]
    in_parquet = {name: array for name, array in ARRAYS.items() if name not in REFUSED}
    table = pq.read_table(run(in_parquet, folder / "out.parquet"))
    return {"json": [*map(json.loads, lines)], "csv": cells, "parquet": table}


@pytest.mark.parametrize("name", TYPES)
def test_a_kept_column_is_exact(name: str, kept: dict[str, Any]) -> None:
    array, value = TYPES[name]
    assert repr(kept["json"][0][name]) == repr(value)
    cell = kept["csv"][0][name]
    if isinstance(value, list | dict):
        assert json.loads(cell) == value
    elif isinstance(value, bool) or value is None:
        assert cell == {True: "true", None: ""}[value]
    else:
        assert cell == str(value)
    if name not in REFUSED:
        given = array.dictionary_decode() if name == "dictionary" else array
        assert kept["parquet"][name].to_pylist() == given.to_pylist()
