"""Results in a store that speaks S3: objects are whole, foreign objects stay, secrets too."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs
from result_files import fill, publish

from batched import cli, offline
from batched.errors import ResultError
from batched.offline.progress.store import Progress
from batched.offline.results import formats as _formats
from batched.offline.results.opening import Result, Stamp, open_result
from object_store import SECRET, Bucket, object_store

pytestmark = pytest.mark.once

NUMBERS = count()
KINDS = ["r.csv", "r/"]
ROWS: list[dict[str, Any]] = [{"id": number, "text": f"text {number}"} for number in range(40)]
SETTINGS: dict[str, Any] = {"input": "text", "output": "out", "key": "id", "watch": False}
COLUMNS = {"id": ["a", "b", "c"], "n": [1, 2, 3]}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    pytest.importorskip("moto")
    with object_store() as port:
        yield port


@pytest.fixture
def bucket(port: int) -> Bucket:
    return Bucket(port, f"bucket-{next(NUMBERS)}")


def uploads(bucket: Bucket) -> list[str]:
    """Return the objects with an upload that is not completed."""
    with urlopen(f"{bucket.address}?uploads") as answer:
        return re.findall("<Key>(.+?)</Key>", answer.read().decode())


def upper(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Result]:
    """Open a result that is written in this folder first."""
    return partial(open_result, progress=tmp_path / "progress")


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_of_a_run_is_that_of_a_disk_and_replaces_an_earlier_one(
    kind: str, bucket: Bucket, tmp_path: Path
) -> None:
    settings = SETTINGS | {"progress": tmp_path / "progress"}
    uri = bucket.uri(f"folder/{kind}")
    report = offline.run(upper, ROWS, uri, **settings)
    offline.run(upper, ROWS, f"{tmp_path}/{kind}", **SETTINGS)
    files = [tmp_path / kind] if kind == "r.csv" else [*(tmp_path / kind).iterdir()]
    expected = {f"folder/{file.relative_to(tmp_path)}": file.read_bytes() for file in files}
    if kind == "r/":
        expected["folder/r/_SUCCESS"] = b""
    assert bucket.content() == expected
    assert report.output == f"s3://{bucket.name}/folder/{kind}"
    offline.run(upper, ROWS[:30], uri, **settings)
    assert bucket.content().keys() == expected.keys()
    assert bucket.content() != expected
    assert not uploads(bucket)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_appears_before_it_is_whole_and_foreign_objects_stay(
    kind: str, bucket: Bucket, opened: Callable[..., Result], tmp_path: Path
) -> None:
    with closing(fill(opened(bucket.uri(kind)), COLUMNS)) as result:
        assert not bucket.content()
        assert not uploads(bucket)
        known = result.publish(len)[-1]
    assert not os.listdir(tmp_path)
    before = bucket.content()
    assert opened(bucket.uri(kind), known=[known]).find()[0] == known
    with pytest.raises(ResultError, match=r"is there already, .* overwrite=True"):
        opened(bucket.uri(kind))
    name = "r/part-00000.parquet" if kind == "r/" else kind
    bucket.put(name, before[name] + b"changed")
    with pytest.raises(ResultError, match="left it as it is"):
        opened(bucket.uri(kind), known=[known])
    publish(opened(bucket.uri(kind), overwrite=True), COLUMNS)
    assert bucket.content() == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_in_the_store_is_never_replaced_by_its_own_result(
    kind: str, bucket: Bucket, opened: Callable[..., Result]
) -> None:
    read = bucket.uri("r/part-00000.parquet" if kind == "r/" else kind)
    with pytest.raises(ResultError, match="which the source reads") as refused:
        opened(bucket.uri(kind), overwrite=True, source_paths=[read])
    assert "hidden" not in str(refused.value)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", range(3))
def test_a_run_killed_while_it_replaces_a_folder_knows_its_parts(
    after: int, bucket: Bucket, opened: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_formats, "GROUP_ROWS", 2)
    monkeypatch.setattr(_formats, "PART_ROWS", 2)
    numbers = list(range(6))
    uri = bucket.uri("r/")

    def parts(result: Result) -> Result:
        rows: Any = result.create(pa.schema([("n", pa.int64())]))
        for number in numbers:
            rows.write(pa.table({"n": [number]}))
        rows.close()
        return result

    known = parts(opened(uri)).publish(len)
    assert len(bucket.content()) == 4
    noted: list[Stamp] = []
    copies = count()
    copy = fs.copy_files

    def copy_some(*args: Any, **kwargs: Any) -> None:
        if next(copies) == after:
            raise Killed
        copy(*args, **kwargs)

    monkeypatch.setattr(fs, "copy_files", copy_some)
    result = parts(opened(uri, known=known))
    with pytest.raises(Killed):
        result.publish(noted.extend)
    assert set(bucket.content()) == {f"r/part-{number:05}.parquet" for number in range(after)}
    monkeypatch.setattr(fs, "copy_files", copy)
    result = opened(uri, known=noted)
    assert result.find()[0] not in noted
    stamps = parts(result).publish(len)
    assert all(all(stamp.values()) for stamp in stamps)  # none is known by its name alone
    stamp = stamps[-1]
    assert sorted(stamp) == ["_SUCCESS", *[f"part-{number:05}.parquet" for number in range(3)]]
    table = pq.read_table(f"{bucket.name}/r", filesystem=bucket.filesystem)
    assert sorted(table.column("n").to_pylist()) == numbers


def test_a_run_killed_after_its_upload_knows_the_object(
    bucket: Bucket, opened: Callable[..., Result]
) -> None:
    noted: list[Stamp] = []
    fill(opened(bucket.uri("r.csv")), COLUMNS).publish(noted.extend)
    again = opened(bucket.uri("r.csv"), known=noted)  # the stamp of the end was never kept
    assert again.find()[0] not in noted
    again.known = []
    with pytest.raises(ResultError, match="is there already"):
        again.check()


def test_a_destination_is_tried_before_anything_runs(bucket: Bucket, tmp_path: Path) -> None:
    def never(texts: list[str]) -> list[str]:
        raise AssertionError

    missing = bucket.uri("r.csv").replace(f"@{bucket.name}/", "@missing/")
    for dest, why in [
        (missing, r"s3://missing/r\.csv cannot be used: .*NO_SUCH_BUCKET"),
        (bucket.uri("r.xlsx"), r"r\.xlsx' must end in"),
        (f"file://{tmp_path}/r.csv", "is on this machine; give it as a path"),
    ]:
        with pytest.raises(ResultError, match=why):
            offline.run(never, ROWS, dest, **SETTINGS, progress=tmp_path / "progress")
    with pytest.raises(ResultError, match=r"cannot be at s3://.*/r\.csv; .* progress=PATH"):
        offline.run(never, ROWS, bucket.uri("r.csv"), **SETTINGS)
    with pytest.raises(ResultError, match="cannot be at s3://x/p; it must be on a disk"):
        offline.run(never, ROWS, tmp_path / "r.csv", **SETTINGS, progress=f"s3://k:{SECRET}@x/p")
    with pytest.raises(ResultError, match="progress names the result itself"):
        offline.run(never, ROWS, tmp_path / "r.csv", **SETTINGS, progress=tmp_path / "r.csv")
    assert not bucket.content()


def test_a_store_that_goes_away_costs_no_row(bucket: Bucket, tmp_path: Path) -> None:
    def leave(texts: list[str]) -> list[str]:
        with urlopen(Request(bucket.address, method="DELETE")):
            return texts

    settings = SETTINGS | {"progress": tmp_path / "progress"}
    said = rf"the destination s3://{bucket.name}/r\.csv cannot be used: "
    with pytest.raises(ResultError, match=said):
        offline.run(leave, ROWS, bucket.uri("r.csv"), batch_size=len(ROWS), **settings)
    with closing(Progress(tmp_path / "progress")) as progress:
        assert progress.counts()[0]["ok"] == len(ROWS)


def test_secrets_are_in_no_report_and_in_no_file(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "in.csv").write_text("text\na\nb\n")
    (tmp_path / "failing_step.py").write_text(
        "def fail(texts):\n    return [1 / 0 for _ in texts]\n"
    )
    uri = bucket.uri("r.csv")
    at = ["--progress", "progress"]
    named = ["--input", "text", "--output", "out"]
    assert cli.main(["run", "failing_step:fail", "in.csv", uri, *named, *at]) == 1
    assert cli.main(["status", uri, *at]) == 0
    for arguments in (["status", uri], ["status", uri, "--progress", "none"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
    report = offline.run(upper, [{"text": "a", "id": 1}], uri, **SETTINGS, progress="other")
    out, err = capfd.readouterr()
    seen = f"{out}{err}{report}{report!r}"
    assert seen.count(f"s3://{bucket.name}/r.csv") > 3
    assert "--progress PATH" in err
    for file in filter(Path.is_file, tmp_path.iterdir()):
        seen += file.read_bytes().decode(errors="replace")
    assert not re.search("hidden|secret", seen.replace(tmp_path.name, ""))


@pytest.mark.parametrize(
    "uri",
    [
        "s3://key:hidden/secret@bucket/r.csv",
        "s3://key:hidden/secret@bucket/r.csv?region=us-east-1",
        "s9://key:hidden%2Fsecret@bucket/r.csv",
        "gs://key:hidden%2Fsecret@bucket/r.csv?scheme=secret",
        "abfss://account:hidden@bucket/r.csv?client_secret=secret",
    ],
)
def test_secrets_are_in_no_error(uri: str, tmp_path: Path) -> None:
    with pytest.raises(ResultError) as refused:
        offline.run(upper, ROWS, uri, **SETTINGS, progress=tmp_path / "progress")
    shown = refused.value
    assert str(shown).startswith(f"the destination {uri[:2]}")
    assert "bucket/r.csv cannot be used: " in str(shown)
    while shown is not None:
        assert not re.search("hidden|secret", str(shown))
        shown = shown.__cause__ or shown.__context__  # type: ignore[assignment]  # of any kind
