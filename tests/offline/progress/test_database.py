"""The file of a run: its lock, foreign files, full disks."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batched.errors import RunLocked, RunMismatch
from batched.offline.progress.database import LAYOUT
from batched.offline.progress.store import Progress
from progress_files import done, outputs, query, value

HOLDER = """
import sys, threading
from pathlib import Path
from batched.offline.progress.store import Progress
progress = Progress(Path(sys.argv[1]))
print("open", flush=True)
threading.Event().wait(60)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "vectors.parquet.progress"


@pytest.mark.once
def test_a_second_run_is_refused_until_the_first_one_is_killed_also_while_it_is_stopped(
    path: Path,
) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"open\n"
        holder.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(RunLocked, match="is in use by another run"):
            Progress(path)
        holder.kill()
    Progress(path).close()


def test_a_second_run_of_one_process_is_refused_and_a_run_leaves_one_file(path: Path) -> None:
    with closing(Progress(path)) as first:
        for _ in range(2):
            with pytest.raises(RunLocked, match="another run"):
                Progress(path)
        first.commit([done(["a"])])
        assert len(list(path.parent.iterdir())) > 1
    assert list(path.parent.iterdir()) == [path]
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
        (lambda path: path.write_text("a sentence that somebody needs" * 100), "is no progress"),
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
    first, second = ([f"{name} {n}" for n in range(2000)] for name in "ab")
    progress = Progress(path)
    progress.commit([done(first)])
    (pages,) = query(progress, "pragma page_count")[0]
    query(progress, f"pragma max_page_count = {pages + 2}")
    with pytest.raises(OSError, match="no room") as full:
        progress.commit([done(second)])
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(path))
    assert progress.committed(second) == {}
    assert len(outputs(progress, first[:10])) == 10
    progress.close()
    with closing(Progress(path)) as progress:
        progress.commit([done(second)])
        assert progress.counts() == {0: {"ok": 4000, "failed": 0, "filtered": 0}}
