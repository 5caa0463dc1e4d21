"""The file of a run: its lock, foreign files, full disks."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from batched.errors import RunLocked, RunMismatch
from batched.offline.progress.commit import Key
from batched.offline.progress.database import LAYOUT
from batched.offline.progress.store import Progress
from progress_files import done, outputs, query, value

HOLDER = """
import sys
from pathlib import Path
from batched.offline.progress.store import Progress
progress = Progress(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
progress.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "vectors.parquet.progress"


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the file open."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


@pytest.mark.once
@pytest.mark.parametrize("stopped", [False, True])
def test_a_second_run_is_refused_until_the_first_one_is_killed(
    path: Path, holder: subprocess.Popen[str], stopped: bool
) -> None:
    if stopped:
        holder.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(RunLocked) as refused:
        Progress(path)
    assert str(refused.value).startswith(f"{path} is in use by another run")
    holder.kill()
    holder.wait()
    Progress(path).close()


@pytest.mark.once
def test_a_run_that_ended_leaves_one_file(path: Path, holder: subprocess.Popen[str]) -> None:
    holder.communicate("")
    with closing(Progress(path)):
        assert len(list(path.parent.iterdir())) > 1
    assert list(path.parent.iterdir()) == [path]


def test_a_second_run_of_one_process_is_refused_and_does_no_harm(path: Path) -> None:
    with closing(Progress(path)) as first:
        for _ in range(2):
            with pytest.raises(RunLocked, match="another run"):
                Progress(path)
        first.commit([done(["a"])])
    with closing(Progress(path)) as second:
        assert outputs(second, ["a"]) == {("a", 0): value("a")}


def test_of_runs_that_open_a_new_file_together_one_has_it(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)

    def run(path: Path) -> Progress | RunLocked:
        barrier.wait(10)
        try:
            return Progress(path)
        except RunLocked as error:
            return error

    with ThreadPoolExecutor(4) as threads:
        for turn in range(10):
            found = list(threads.map(run, [tmp_path / f"{turn}.progress"] * 4))
            (opened,) = [each for each in found if isinstance(each, Progress)]
            opened.close()


# --- foreign files


def foreign_text(path: Path) -> None:
    path.write_text("id,text\n" + "1,a sentence of a table that somebody needs\n" * 100)


def foreign_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("create table rows(key, step)")


def newer_layout(path: Path) -> None:
    Progress(path).close()
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute(f"pragma user_version = {LAYOUT + 1}")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (foreign_text, "is no progress file"),
        (foreign_database, f"is no progress file of this version of batched (layout {LAYOUT})"),
        (newer_layout, f"is no progress file of this version of batched (layout {LAYOUT})"),
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(path: Path, make: Any, why: str) -> None:
    make(path)
    before = path.read_bytes()
    with pytest.raises(RunMismatch) as refused:
        Progress(path)
    assert str(path) in str(refused.value)
    assert why in str(refused.value)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_missing_folder_is_named(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no progress file can be made here") as refused:
        Progress(path / "below")
    assert refused.value.filename == str(path / "below")


def test_a_file_that_is_in_ruins_is_named(path: Path) -> None:
    with closing(Progress(path)) as progress:
        progress.commit([done(list(range(5000)))])
    data = path.read_bytes()
    path.write_bytes(data[:8192] + bytes(len(data) - 8192))
    with (
        pytest.raises(OSError, match="malformed") as failed,
        closing(Progress(path)) as progress,
    ):
        progress.committed(list(range(5000)))
    assert failed.value.filename == str(path)


# --- disks


def test_every_commit_is_on_disk_before_it_returns(path: Path) -> None:
    """SQLite promises this with these settings; fsync itself is below it."""
    with closing(Progress(path)) as progress:
        for name, setting in (
            ("journal_mode", "wal"),
            ("locking_mode", "exclusive"),
            ("synchronous", 2),
            ("fullfsync", 1),
            ("checkpoint_fullfsync", 1),
        ):
            assert query(progress, f"pragma {name}") == [(setting,)]


def test_a_full_disk_keeps_what_is_committed_and_the_run_goes_on_once_there_is_room(
    path: Path,
) -> None:
    def names(prefix: str) -> list[Key]:
        return [f"{prefix} {n}" for n in range(2000)]

    progress = Progress(path)
    progress.commit([done(names("a"))])
    progress.note_source(0, names("a"))
    (pages,) = query(progress, "pragma page_count")[0]
    query(progress, f"pragma max_page_count = {pages + 2}")
    with pytest.raises(OSError, match="no room") as full:
        progress.commit([done(names("b")), done(names("c"))])
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(path))
    assert set(progress.committed(names("b"))) == set()
    assert len(outputs(progress, names("a")[:10])) == 10
    progress.close()
    with closing(Progress(path)) as progress:
        progress.commit([done(names("b"))])
        assert progress.counts() == {0: {"ok": 4000, "failed": 0, "filtered": 0}}
