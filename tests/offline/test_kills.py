"""Runs that are killed at any moment, and go on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import killed_run
from batched.offline._progress import Progress

Calls = Counter[tuple[int, int]]
"""Calls by step and key."""


def start(dest: Path, log: Path, seed: int, *options: str) -> subprocess.Popen[bytes]:
    program = [sys.executable, killed_run.__file__, str(dest), str(log), str(seed), *options]
    with open(f"{log}.errors", "w") as errors:
        return subprocess.Popen(program, stderr=errors, start_new_session=True)


def calls_in(log: Path) -> Calls:
    lines = log.read_text().splitlines() if log.exists() else []
    pairs = [line.split() for line in lines]
    return Counter((int(step), int(key)) for step, key in pairs)


def committed_in(dest: Path) -> set[tuple[int, int]]:
    """Steps and keys with results."""
    path = Path(f"{dest}.progress")
    if not path.exists():
        return set()
    progress = Progress.open(path)
    try:
        found = progress.committed(range(killed_run.ROWS))
        return {(step, int(key)) for (key, step), each in found.items() if each.status == "ok"}
    finally:
        progress.close()


def left_of(group: int) -> list[str]:
    """Commands of the processes of that session that still live."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == group and fields[0] != "Z":
                found.append((path / "cmdline").read_text())
        except OSError:
            continue
    return found


def kill_until(tmp_path: Path, kills: int, *options: str) -> None:
    """Kills runs, and starts them again, so many times."""
    whole, log = tmp_path / "whole.parquet", tmp_path / "log"
    undisturbed = start(whole, tmp_path / "ignored", 0)
    assert undisturbed.wait(60) == 0, (tmp_path / "ignored.errors").read_text()
    chance, killed_so_far, round_ = random.Random(7), 0, 0
    while killed_so_far < kills:
        dest = tmp_path / f"{round_}.parquet"
        round_ += 1
        while not dest.exists():
            committed = committed_in(dest)
            log.unlink(missing_ok=True)
            run = start(dest, log, chance.randrange(1000), *options)
            try:
                run.wait(chance.uniform(0.4, 2.0) if killed_so_far < kills else 60)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
                killed_so_far += 1
            else:
                assert run.returncode == 0, (tmp_path / "log.errors").read_text()
            again = committed & set(calls_in(log))
            assert not again, f"computed again: {sorted(again)[:5]}"
            deadline = time.perf_counter() + 10
            while left_of(run.pid):
                assert time.perf_counter() < deadline, left_of(run.pid)
                os.sched_yield()
        assert dest.read_bytes() == whole.read_bytes()


@pytest.mark.once
@pytest.mark.timeout(120)
def test_a_killed_run_goes_on_loses_nothing_and_computes_nothing_twice(tmp_path: Path) -> None:
    kill_until(tmp_path, 5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", [(), ("processes",)], ids=["threads", "processes"])
def test_200_kills_lose_nothing_and_compute_nothing_twice(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    kill_until(tmp_path, 200 if not options else 50, *options)
