"""Ray Data on a Ray of this machine: BatchPredictor in pipelines, and datasets as sources."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray_steps import start_ray

from batched import offline
from batched.errors import SourceError
from batched.offline.types.arrow import to_python

pytestmark = [
    pytest.mark.once,
    pytest.mark.slow,  # a cluster of its own
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("default"),  # of Ray
]

ray: Any = None
"""Imported for the first test: none of these runs with each change, and the import takes long."""


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    global ray
    ray = pytest.importorskip("ray", reason="Ray Data is not installed")
    pytest.importorskip("ray.data", reason="Ray Data is not installed", exc_type=ImportError)
    start_ray(num_gpus=1)  # that is not there, for Ray's bookkeeping
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    yield
    ray.shutdown()


@pytest.mark.parametrize("batch_format", ["numpy", "pandas"])
def test_a_bad_row_costs_itself_and_not_its_block(batch_format: str, tmp_path: Path) -> None:
    def root(numbers: list[int]) -> Any:
        if 21 in numbers:
            raise ValueError("bad row")
        return [np.full(3, n, "f4") for n in numbers]

    numbers = ray.data.range(40, override_num_blocks=4)
    result = numbers.map_batches(
        offline.BatchPredictor,
        fn_constructor_args=(root,),
        fn_constructor_kwargs={"input": "id", "output": "vector"},
        concurrency=1,
        batch_size=10,
        batch_format=batch_format,
    )
    result.write_parquet(str(tmp_path))
    table = pq.read_table(tmp_path).sort_by("id")  # which blocks of different types would refuse
    assert table["id"].to_pylist() == list(range(40))
    (row,) = [row for row in table.to_pylist() if row["_status"] != "ok"]
    assert row.pop("vector") == pytest.approx([np.nan] * 3, nan_ok=True)
    assert row == {"id": 21, "_status": "failed", "_error": "ValueError: bad row"}


def double(numbers: list[int]) -> list[int]:
    return [2 * n for n in numbers]


SETTINGS: dict[str, Any] = {"input": "id", "output": "double", "key": "id", "watch": False}


def test_a_dataset_is_a_source_and_computed_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def prepare(batch: dict[str, Any]) -> dict[str, Any]:
        with calls.open("a") as file:
            file.write("x")
        return {**batch, "vector": np.tile(batch["id"][:, None], (1, 3)).astype("f4")}

    dataset = ray.data.range(100, override_num_blocks=5).map_batches(prepare, batch_size=20)
    dest = tmp_path / "result.parquet"
    report = offline.run(double, dataset, dest, **SETTINGS)
    assert (report.ok, calls.read_text()) == (100, "x" * 5)
    assert sorted(pq.read_table(dest).to_pylist(), key=lambda row: row["id"]) == [
        {"id": n, "vector": [n] * 3, "double": 2 * n} for n in range(100)
    ]
    # in another order, with more rows: committed results are kept
    more = ray.data.from_items([{"id": n} for n in range(119, -1, -1)])
    report = offline.run(double, more, dest, **SETTINGS)
    assert (report.ok, report.skipped) == (20, 100)
    assert pq.read_table(dest)["id"].to_pylist() == list(range(119, -1, -1))


def test_blocks_have_the_schema_that_takes_all_their_values(tmp_path: Path) -> None:
    numbers = ray.data.from_items([{"id": 1}])
    mixed = numbers.union(ray.data.from_items([{"id": "a"}]))
    wider = numbers.union(ray.data.from_items([{"id": 2, "n": 3}]))
    dest = tmp_path / "result.parquet"
    with pytest.raises(SourceError, match="ray .*Dataset cannot be read: .*id has incompatible"):
        offline.run(double, mixed, dest, **SETTINGS)
    offline.run(double, wider, dest, **SETTINGS)
    assert pq.read_table(dest)["n"].to_pylist() == [None, 3]


def total(images: list[Any]) -> list[int]:
    return [int(image.sum()) for image in images]


def test_tensors_of_one_shape_are_kept_and_of_several_shapes_refused(tmp_path: Path) -> None:
    rows = [{"data": np.full((2, 3), value)} for value in (1, 2)]
    dest = tmp_path / "result.parquet"
    dataset = ray.data.from_items(rows, override_num_blocks=1)
    settings: dict[str, Any] = {"input": "data", "output": "total", "watch": False}
    assert offline.run(total, dataset, dest, **settings).ok == 2
    table = pq.read_table(dest)
    assert table["total"].to_pylist() == [6, 12]
    kept = to_python(table["data"].combine_chunks())
    assert [array.tolist() for array in kept] == [row["data"].tolist() for row in rows]
    rows = [{"data": np.full((size, 3), size)} for size in (1, 2)]
    dataset = ray.data.from_items(rows, override_num_blocks=1)
    with pytest.raises(SourceError, match="'data'.* tensors of several shapes"):
        offline.run(total, dataset, tmp_path / "other.parquet", **settings)


def test_vectors_of_different_lengths_and_no_rows_at_all(tmp_path: Path) -> None:
    rows = [{"id": n, "vector": np.arange(n, dtype="f4")} for n in (1, 2)]
    dest = tmp_path / "result.parquet"
    offline.run(double, ray.data.from_items(rows), dest, **SETTINGS)
    assert pq.read_table(dest)["vector"].to_pylist() == [[0], [0, 1]]
    empty = ray.data.from_arrow(pa.table({"id": pa.array([], "int64")}))
    with pytest.raises(SourceError, match="has no column 'id'; its columns are none"):
        offline.run(double, empty, tmp_path / "none.parquet", **SETTINGS)
