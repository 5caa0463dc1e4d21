"""Runs from outside: processes that die, programs that are stopped or started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
import pyarrow.parquet as pq

from batched import offline
from batched.errors import RunLocked


class Fragile:
    """A model of which some rows are the end."""

    def __init__(self) -> None:
        self.built = os.getpid()

    def __call__(self, texts: list[str]) -> list[str]:
        for text in texts:
            if text == "hang":
                time.sleep(60)
            elif text == "exit":
                os._exit(0)
            elif text == "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            elif text == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif text == "raise":
                raise ValueError("bad row")
        assert self.built == os.getpid()
        return [text.upper() for text in texts]


ENDS = ["hang", "exit", "segfault", "killed", "raise"]


@pytest.mark.once
@pytest.mark.slow  # tests/offline/engines/test_processes.py has each way for a batch
def test_each_way_to_die_costs_one_row(tmp_path: Path) -> None:
    rows = [{"text": f"text {number}"} for number in range(64)]
    for place, text in enumerate(ENDS):
        rows[7 + 11 * place] = {"text": text}
    dest = tmp_path / "out.parquet"
    report = offline.run(
        Fragile,
        rows,
        dest,
        input="text",
        output="out",
        processes=True,
        workers=2,
        timeout_s=1.0,
        batch_size=16,
        watch=False,
    )
    assert (report.ok, report.failed) == (64 - len(ENDS), len(ENDS))
    errors = {letter["key"]: letter["error"] for letter in report.dead_letters()}
    assert list(errors) == [7 + 11 * place for place in range(len(ENDS))]
    assert "timeout_s=1" in errors[7]
    assert "exited with 0" in errors[18]
    assert "SIGSEGV" in errors[29]
    assert "was killed" in errors[40]
    assert errors[51] == "ValueError: bad row"
    written = [row["out"] for row in pq.read_table(dest).to_pylist()]
    assert written == [row["text"].upper() for row in rows if row["text"] not in ENDS]


def same(texts: list[str]) -> list[str]:
    return texts


STOPPED = """
import sys, time
from batched import offline

def slow(texts):
    print("running", flush=True)
    time.sleep(0.05)
    return texts

rows = [{"text": str(number)} for number in range(2000)]
offline.run(slow, rows, sys.argv[1], input="text", output="out", batch_size=8, watch=False)
"""


def test_a_second_run_is_refused_also_while_the_first_one_stands_still(tmp_path: Path) -> None:
    dest = tmp_path / "out.parquet"
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(dest)], stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "running\n"
        first.send_signal(signal.SIGSTOP)
        rows: list[dict[str, Any]] = [{"text": "1"}]
        with pytest.raises(RunLocked, match=str(first.pid)):
            offline.run(same, rows, dest, input="text", output="out", watch=False)
        first.send_signal(signal.SIGCONT)
        first.kill()
    report = offline.run(
        same, rows, dest, input="text", output="out", on_mismatch="recompute", watch=False
    )
    assert report.ok == 1
