"""Results in an object store, a real one as far as S3's protocol goes: what is there is whole, what
is of others stays, and no secret is shown.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("moto")

import pyarrow.parquet as pq  # noqa: E402  # after the skip
from pyarrow import fs  # noqa: E402

from batched import cli, offline  # noqa: E402
from batched.errors import ResultError, RunStopped, SourceError  # noqa: E402
from batched.offline import _pipeline, _remote  # noqa: E402
from batched.offline._owner import network_disk  # noqa: E402
from batched.offline._result import Stamp, open_result, without_credentials  # noqa: E402

pytestmark = pytest.mark.once

# in a process of its own: pyarrow may wait for the store while it holds the interpreter's lock
SERVER = """
import os, signal, sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

class Store(DomainDispatcherApplication):
    def __call__(self, environ, start_response):
        # an upload that is to be interrupted as it begins is named after the process that begins it
        _, _, name = environ["PATH_INFO"].partition("/interrupt-")
        if name.endswith(".jsonl") and environ["QUERY_STRING"].startswith("uploads"):
            os.kill(int(name.removesuffix(".jsonl")), signal.SIGINT)
        return super().__call__(environ, start_response)

server = make_server("127.0.0.1", 0, Store(create_backend_app), threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
"""
SECRET = "hidden/secret"
NUMBERS = count()
KINDS = ["r.parquet", "r.jsonl", "r.csv", "r/"]
ROWS = [{"id": number, "text": f"text {number}"} for number in range(40)]
SETTINGS: dict[str, Any] = {"input": "text", "output": "out", "key": "id", "watch": False}
TABLE = pa.table({"id": ["a", "b", "c"], "n": [1, 2, 3]})


class Bucket:
    """An empty bucket."""

    def __init__(self, port: int, name: str) -> None:
        self.address = f"http://127.0.0.1:{port}/{name}"
        self.name = name
        self._query = f"endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        with urlopen(Request(self.address, method="PUT")):
            pass
        self.filesystem, _ = fs.FileSystem.from_uri(self.uri("x"))

    def uri(self, path: str) -> str:
        return f"s3://key:{SECRET.replace('/', '%2F')}@{self.name}/{path}?{self._query}"

    def content(self) -> dict[str, bytes]:
        """All objects."""
        found = self.filesystem.get_file_info(fs.FileSelector(self.name, recursive=True))
        return {info.path.partition("/")[2]: self.read(info.path) for info in found if info.is_file}

    def read(self, path: str) -> bytes:
        with self.filesystem.open_input_stream(path) as stream:
            return bytes(stream.read())

    def put(self, path: str, content: bytes) -> None:
        with self.filesystem.open_output_stream(f"{self.name}/{path}") as stream:
            stream.write(content)

    def uploads(self) -> list[str]:
        """Objects whose uploads are not completed."""
        with urlopen(f"{self.address}?uploads") as answer:
            return re.findall("<Key>(.+?)</Key>", answer.read().decode())


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.stdin.close()


@pytest.fixture
def bucket(port: int) -> Bucket:
    return Bucket(port, f"bucket-{next(NUMBERS)}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this program runs and finds modules; it has `in.csv`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "in.csv").write_text("text\na\nb\n")
    return tmp_path


def upper(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


def write(uri: str, table: Any, **settings: Any) -> Stamp:
    writer = open_result(uri, **settings).writer(table.schema)
    writer.write({name: table.column(name) for name in table.column_names})
    return writer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_goes_on_and_its_result_is_that_of_a_disk(
    kind: str, bucket: Bucket, tmp_path: Path
) -> None:
    computed: list[str] = []

    def once(texts: list[str]) -> list[str]:
        if computed:
            raise ValueError("stopped")
        computed.extend(texts)
        return upper(texts)

    def then(texts: list[str]) -> list[str]:
        computed.extend(texts)
        return upper(texts)

    settings = SETTINGS | {"batch_size": 8, "version": "1", "progress": tmp_path / "progress"}
    uri = bucket.uri(f"folder/{kind}")
    with pytest.raises(RunStopped):
        offline.run(once, ROWS, uri, max_failed=0, name="f", **settings)
    assert not bucket.content()
    report = offline.run(then, ROWS, uri, name="f", **settings)
    assert sorted(computed) == sorted(f"text {number}" for number in range(40))
    offline.run(upper, ROWS, f"{tmp_path}/{kind}", **SETTINGS)
    here = tmp_path / kind
    files = here.iterdir() if here.is_dir() else [here]
    names = {file: str(file.relative_to(tmp_path)) for file in files}
    marks = {"folder/r/_SUCCESS": b""} if kind == "r/" else {}
    assert (
        bucket.content()
        == {f"folder/{name}": file.read_bytes() for file, name in names.items()} | marks
    )
    assert report.output == f"s3://{bucket.name}/folder/{kind}"
    before = bucket.content()
    offline.run(then, ROWS[:30], uri, name="f", **settings)  # ours: it is replaced
    assert bucket.content().keys() == before.keys()
    assert bucket.content() != before
    assert not bucket.uploads()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_appears_before_it_is_whole_nor_where_writing_was_given_up(
    kind: str, bucket: Bucket
) -> None:
    writer = open_result(bucket.uri(kind)).writer(TABLE.schema)
    writer.write({"id": ["a"], "n": [1]})
    assert not bucket.content()
    assert len(bucket.uploads()) == 1
    writer.abort()
    del writer
    gc.collect()
    assert not bucket.content()


GIVEN_UP = """
import os, sys
from batched.offline._result import open_result
import pyarrow as pa
uri = sys.argv[1].replace("PID", str(os.getpid()))
writer = open_result(uri).writer(pa.schema([("text", pa.string())]))
writer.write({"text": ["x" * 6_000_000]})  # more than is uploaded at once
if sys.argv[2] == "abort":
    writer.abort()
"""


def give_up(uri: str, end: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", GIVEN_UP, uri, end],
        check=False,
        capture_output=True,
        text=True,
        timeout=40,
    )


@pytest.mark.parametrize("end", ["abort", "none"])
def test_a_program_that_gives_up_ends_and_leaves_nothing(end: str, bucket: Bucket) -> None:
    done = give_up(bucket.uri("r.jsonl"), end)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not bucket.content()


def test_a_program_that_is_interrupted_as_it_begins_leaves_nothing(bucket: Bucket) -> None:
    done = give_up(bucket.uri("interrupt-PID.jsonl"), "none")
    assert done.stderr.endswith("KeyboardInterrupt\n")
    assert not bucket.content()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_of_others_stays(kind: str, bucket: Bucket) -> None:
    known = write(bucket.uri(kind), TABLE)
    before = bucket.content()
    assert open_result(bucket.uri(kind), known=[known]).holds([known])
    with pytest.raises(ResultError, match=r"is there already, .* overwrite=True"):
        open_result(bucket.uri(kind))
    name = "r/part-00000.parquet" if kind == "r/" else kind
    bucket.put(name, before[name] + b"changed")
    with pytest.raises(ResultError, match="left it as it is"):
        open_result(bucket.uri(kind), known=[known])
    write(bucket.uri(kind), TABLE, overwrite=True)
    assert bucket.content() == before


def test_what_came_in_the_meantime_is_not_replaced(bucket: Bucket) -> None:
    writer = open_result(bucket.uri("r.csv")).writer(TABLE.schema)
    bucket.put("r.csv", b"mine")
    with pytest.raises(ResultError, match="is there already"):
        writer.close()
    writer.abort()
    assert bucket.content() == {"r.csv": b"mine"}


def test_a_folder_with_other_objects_is_never_replaced(bucket: Bucket) -> None:
    bucket.put("r/sub/notes.txt", b"mine")
    with pytest.raises(ResultError, match="holds 'sub', which is no part of a result"):
        open_result(bucket.uri("r/"), overwrite=True)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", range(4))
def test_a_run_killed_while_it_replaces_a_folder_knows_its_parts(
    after: int, bucket: Bucket
) -> None:
    numbers = pa.table({"n": list(range(30))})
    uri = bucket.uri("r/")
    known = [write(uri, numbers, part_rows=5)]
    assert len(bucket.content()) == 7
    noted: list[Stamp] = []

    def note(stamp: Stamp) -> None:
        noted[:] = [*known, stamp]
        if len(stamp) > after:
            raise Killed

    writer = open_result(uri, known=known, part_rows=10).writer(numbers.schema, note)
    with pytest.raises(Killed):
        writer.write({"n": list(range(30))})
        writer.close()
    assert ("r/_SUCCESS" in bucket.content()) == (after == 0)
    result = open_result(uri, known=noted, part_rows=15)
    assert result.holds(noted) == (after == 0)
    writer = result.writer(numbers.schema)
    writer.write({"n": list(range(30))})
    stamp = writer.close()
    assert list(stamp) == ["_SUCCESS", "part-00000.parquet", "part-00001.parquet"]
    assert set(bucket.content()) == {f"r/{name}" for name in stamp}
    table = pq.read_table(f"{bucket.name}/r", filesystem=bucket.filesystem)
    assert sorted(table.column("n").to_pylist()) == list(range(30))


def test_a_run_killed_as_its_upload_was_completed_knows_the_object(bucket: Bucket) -> None:
    noted: list[Stamp] = []
    writer = open_result(bucket.uri("r.csv")).writer(TABLE.schema, noted.append)
    writer.write({"id": ["a"], "n": [1]})
    writer.close()
    again = open_result(bucket.uri("r.csv"), known=noted)  # what came after `note` was never kept
    assert not again.holds(noted)
    bucket.put("r.csv", b"another size")
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
    with pytest.raises(ResultError, match=r"r\.csv is named by a URI, .* progress=PATH"):
        offline.run(never, ROWS, bucket.uri("r.csv"), **SETTINGS)
    with pytest.raises(ResultError, match="must be a path on a disk of this machine, got 's3://x/"):
        offline.run(never, ROWS, tmp_path / "r.csv", **SETTINGS, progress=f"s3://k:{SECRET}@x/p")
    with pytest.raises(SourceError, match=r"the source s3://b/in\.csv is a URI; give a path"):
        offline.run(never, f"s3://k:{SECRET}@b/in.csv", tmp_path / "r.csv", **SETTINGS)
    assert not bucket.content()


def test_a_store_that_goes_away_costs_no_row(
    bucket: Bucket, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "gone.py").write_text(
        "from urllib.request import Request, urlopen\n"
        "def leave(texts):\n"
        f"    urlopen(Request('{bucket.address}', method='DELETE'))\n"
        "    return texts\n"
    )
    settings = ["--input", "text", "--output", "out", "--progress", "progress", "--quiet"]
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "gone:leave", "in.csv", bucket.uri("r.csv"), *settings])
    assert end.value.code == 2
    said = capfd.readouterr().err
    assert f"the destination s3://{bucket.name}/r.csv cannot be used: " in said
    way_on = "2 rows are committed. To go on:\n  batched run gone:leave in.csv 's3://{}/r.csv?...' "
    assert way_on.format(bucket.name) in said


def test_a_file_is_no_folder_and_a_folder_no_file(bucket: Bucket) -> None:
    bucket.put("file", b"")
    bucket.put("r.csv/x", b"")
    with pytest.raises(ResultError, match="file/ is a file; it must end in"):
        open_result(bucket.uri("file/"))
    with pytest.raises(ResultError, match=r"r\.csv is a folder; it must end in"):
        open_result(bucket.uri("r.csv"))


def test_secrets_are_in_no_report_and_in_no_file(
    bucket: Bucket, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "steps.py").write_text("def fail(texts):\n    return [1 / 0 for _ in texts]\n")
    uri = bucket.uri("r.csv")
    at = ["--progress", "progress"]
    named = ["--input", "text", "--output", "out"]
    assert cli.main(["run", "steps:fail", "in.csv", uri, *named, *at]) == 1
    assert cli.main(["status", uri, *at]) == 0
    for arguments in (["status", uri], ["status", uri, "--progress", "none"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
    report = offline.run(upper, [{"text": "a", "id": 1}], uri, **SETTINGS, progress="other")
    out, err = capfd.readouterr()
    seen = f"{out}{err}{report}{report!r}"
    assert seen.count(f"s3://{bucket.name}/r.csv") > 3
    assert "--progress PATH" in err
    seen += "".join(
        each.read_bytes().decode(errors="replace") for each in folder.iterdir() if each.is_file()
    )
    assert "hidden" not in seen
    assert "secret" not in seen


@pytest.mark.parametrize(
    "uri",
    [
        "s3://key:hidden/secret@bucket/r.csv",
        "s3://key:hidden?secret@bucket/r.csv",
        "s3://key:hidden/secret@bucket/r.csv?region=us-east-1",
        "s3://key:hidden secret@bucket/r.csv",
        "s9://key:hidden%2Fsecret@bucket/r.csv",
        "gs://key:hidden%2Fsecret@bucket/r.csv?scheme=secret",
        "abfss://account:hidden@bucket/r.csv?client_secret=secret",
        "hdfs://key:hidden@bucket/r.csv?replication=secret",
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


def test_what_is_shown_of_a_destination_without_secrets_is_all_of_it() -> None:
    for dest in ["r.csv", "/a@b:c/r.csv", "hdfs://me@host/a/r.csv", "hdfs://host:9000/r/"]:
        assert without_credentials(dest) == dest


def test_any_filesystem_of_pyarrow_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    monkeypatch.setattr(_remote, "_open", lambda uri, path: (store, "store/r"))
    (tmp_path / "store" / "r").mkdir(parents=True)
    settings = SETTINGS | {"progress": tmp_path / "progress"}
    offline.run(upper, ROWS, "any://store/r/", **settings)
    offline.run(upper, ROWS[3:], "any://store/r/", **settings)
    assert sorted(os.listdir(tmp_path / "store/r")) == ["_SUCCESS", "part-00000.parquet"]
    assert pq.read_table(tmp_path / "store/r").column("id").to_pylist() == list(range(3, 40))
    noted: list[Stamp] = []
    result = open_result("any://store/r/", overwrite=True)
    result.writer(TABLE.schema, noted.append)
    assert os.listdir(tmp_path / "store/r") == ["part-00000.parquet"]  # half of it, for all to see
    result = open_result("any://store/r/", known=noted)
    assert not result.holds(noted)


@pytest.mark.parametrize(
    ("kind", "is_one"),
    [
        ("nfs4", True),
        ("cifs", True),
        ("fuse.sshfs", True),
        ("fuse", True),
        ("ext4", False),
        ("overlay", False),
        ("fuseblk", False),
        ("fuse.fuse-overlayfs", False),
    ],
)
def test_a_progress_file_on_a_network_disk_is_told(
    kind: str, is_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:99 / /proc rw shared:1 - nfs4 host:/other rw\n"
        f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw - {kind} host:/x rw\n"
    )
    found = network_disk(tmp_path / "progress", mounts)
    assert found == (kind if is_one else None)
    monkeypatch.setattr(_pipeline, "network_disk", lambda path: found)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        offline.run(upper, ROWS, tmp_path / "r.csv", **SETTINGS)
    assert [str(each.message).partition(", ")[0] for each in told] == (
        [f"the progress file {tmp_path}/r.csv.progress is on a network disk ({kind})"]
        if is_one
        else []
    )
