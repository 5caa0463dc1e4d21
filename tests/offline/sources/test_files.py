"""Files as sources: folders, globs, lists, URIs, datasets, formats and compressions."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyarrow import feather, fs

from batched.errors import SourceError
from object_store import Bucket, object_store
from opened_sources import Open, column, opened, rows_of

__all__ = ["opened"]


def parquet(path: Path, *ids: int, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": ids, **columns}), path)
    return path


@pytest.fixture
def sales(tmp_path: Path) -> Path:
    """Make a folder with partitions as Hive names them."""
    folder = tmp_path / "sales"
    parquet(folder / "year=2020" / "city=a%20b" / "x.parquet", 1, 2)
    parquet(folder / "year=2021" / "city=__HIVE_DEFAULT_PARTITION__" / "x.parquet", 3)
    parquet(folder / "_temporary" / "y.parquet", 9)
    parquet(folder / ".hidden.parquet", 9)
    (folder / "text.csv").write_text("id\n9\n")
    (folder / "_SUCCESS").touch()
    return folder


SALES = [{"id": 1}, {"id": 2}, {"id": 3}]


@pytest.mark.parametrize("path", ["", "/", "/*/*/*.parquet", "/**/x.parquet"])
def test_the_tables_of_a_folder_are_one_source(path: str, sales: Path, opened: Open) -> None:
    source = opened(f"{sales}{path}")
    assert rows_of(source) == SALES
    assert source.rows == 3
    files = sorted(map(str, sales.glob("year=*/*/x.parquet")))
    hive = opened(ds.dataset(files, partitioning="hive"))
    assert column(hive, "year") == [2020, 2020, 2021]


def test_a_list_of_paths_is_one_source_in_the_order_of_paths(sales: Path, opened: Open) -> None:
    files = sorted(sales.glob("year=*/*/x.parquet"), reverse=True)
    source = opened([*files, f"{sales}/year=2020/*/*.parquet"])
    assert rows_of(source) == SALES
    assert source.files
    assert source.files.paths == [str(path) for path in reversed(files)]
    with pytest.raises(SourceError, match=r"no file matches '.*/none.parquet'"):
        opened([*files, sales / "none.parquet"])


def test_paths_are_absolute_from_the_start(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet(tmp_path / "a.parquet", 1)
    (tmp_path / "a.jsonl").write_text('{"id": 1}')
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path)
    sources = [opened(path) for path in ("a.parquet", "*.jsonl", ["./a.jsonl"])]
    monkeypatch.chdir("below")
    for source in sources:
        source.check_unchanged()
        assert column(source) == [1]
        assert source.files
        assert [Path(path).parent for path in source.files.paths] == [tmp_path]


def test_arrow_files_are_read_as_a_dataset(tmp_path: Path, opened: Open) -> None:
    for part in 0, 1:
        feather.write_feather(pa.table({"id": [part, part]}), tmp_path / f"{part}.arrow")
    with pytest.raises(SourceError, match=r"passed as pyarrow\.dataset\.dataset\(path\)"):
        opened(f"{tmp_path}/*.arrow")
    assert column(opened(ds.dataset(tmp_path, format="feather"))) == [0, 0, 1, 1]


def test_standard_input_is_json_lines(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = io.BytesIO(b'{"id": 1}\n\noops\n{"id": 3}\n')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(lines))
    source = opened("-")
    for _ in range(2):
        (window,) = source.windows(["id"])
        assert window.values("id") == [1, None, 3]
        assert window.faults[1].startswith("row 1 (counted from 0): '<stdin>', line 3: not JSON")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_the_number_of_rows_of_text_is_estimated(suffix: str, tmp_path: Path, opened: Open) -> None:
    for part in "ab":
        form = '{{"id": "{:032x}"}}' if suffix == ".jsonl" else "{:032x}"
        lines = map(form.format, range(10_000))
        data = "\n".join(lines if suffix == ".jsonl" else ["id", *lines]).encode()
        (tmp_path / f"{part}{suffix}").write_bytes(data)
    source = opened(f"{tmp_path}/*{suffix}")
    assert source.rows is None
    assert source.estimate == pytest.approx(20_000, rel=0.001)
    assert len([*source.windows(["id"], 1000)]) == 20
    assert source.rows == 20_000


DATASETS: dict[str, Callable[[Path], Any]] = {
    "folder": lambda folder: ds.dataset(folder, partitioning="hive"),
    "union": lambda folder: ds.dataset(
        [ds.dataset(folder / "a", partitioning="hive"), ds.dataset(folder / "b")]
    ),
    "filter": lambda folder: ds.dataset(folder).filter(ds.field("id") < 9),
    "in memory": lambda folder: ds.dataset(pa.table({"id": range(9), "n": [0] * 9})),
    "scanner": lambda folder: ds.dataset(folder, format="parquet").scanner().to_reader(),
    "other schema": lambda folder: ds.dataset(
        folder, schema=pa.schema([("id", pa.float64()), ("n", pa.int8()), ("none", pa.string())])
    ),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_datasets_of_pyarrow_are_sources(kind: str, tmp_path: Path, opened: Open) -> None:
    folder = tmp_path / "d"
    parquet(folder / "a" / "a.parquet", *range(5), n=[0] * 5)
    parquet(folder / "b" / "b.parquet", *range(5, 9), n=[0] * 4)
    dataset = DATASETS[kind](folder)
    source = opened(dataset)
    assert column(source) == column(source) == list(range(9))
    assert column(source, "n") == [0] * 9
    assert source.columns == dataset.schema.names
    if kind == "other schema":
        assert column(source, "none") == [None] * 9


def test_uris_that_cannot_be_used_are_refused_without_their_secrets(opened: Open) -> None:
    for uri in "s3://key:secret@bucket/?nonsense=secret", "nonsense://key:secret@bucket/a.csv":
        with pytest.raises(
            SourceError, match="^the source [a-z0-9]+://bucket.* cannot be"
        ) as error:
            opened(uri)
        assert "secret" not in str(error.value)


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    """Yield a bucket of a real server."""
    pytest.importorskip("moto")
    with object_store() as port:
        yield Bucket(port, "bucket")


@pytest.mark.once
def test_objects_of_a_store_are_read_like_files(bucket: Bucket, sales: Path, opened: Open) -> None:
    fs.copy_files(str(sales), "bucket/sales", destination_filesystem=bucket.filesystem)
    bucket.put("t/a.jsonl", b'{"id": 1}')
    bucket.put("t/b.jsonl.gz", gzip.compress(b'{"id": 2}\noops'))
    bucket.put("t/below/c.jsonl", b'{"id": 3}')

    for path in "sales", "sales/", "sales/*/*/*.parquet", "sales/**/x.parquet":
        source = opened(bucket.uri(path))
        assert rows_of(source) == SALES
    assert "hidden" not in source.name
    assert source.files
    assert source.files.paths[0] == "s3://bucket/sales/year=2020/city=a%20b/x.parquet"
    assert column(opened(bucket.uri("t/a.jsonl"))) == [1]
    assert column(opened(bucket.uri("t/**/*.jsonl"))) == [1, 3]
    source = opened(bucket.uri("t/*.jsonl*"))
    (window,) = source.windows(["id"])
    assert window.values("id") == [1, 2, None]
    assert "'s3://bucket/t/b.jsonl.gz', line 2: not JSON" in window.faults[2]
    source.check_unchanged()
    bucket.put("t/a.jsonl", b'{"id": 10}')
    with pytest.raises(SourceError, match="'s3://bucket/t/a.jsonl' was changed"):
        source.check_unchanged()
    with pytest.raises(SourceError, match="no file matches 's3://bucket/none/x.csv'"):
        opened(bucket.uri("none/x.csv"))
