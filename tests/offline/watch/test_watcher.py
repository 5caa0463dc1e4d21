"""Views of an offline run while it goes on: rates, time left, the status file, lines."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batched.offline import DeadLetter, Report, Snapshot, StepCounts
from batched.offline.report import Pace
from batched.offline.watch.lines import Lines
from batched.offline.watch.watcher import Watcher, read_status, watcher

LETTER: DeadLetter = {
    "key": "a",
    "step": "embed",
    "phase": "inference",
    "error": "ValueError: bad row",
    "attempts": 1,
    "traceback": "",
}


def counts(ok: int = 0, waiting: int = 0, batches: int = 0, failed: int = 0) -> StepCounts:
    return StepCounts("embed", ok, failed, waiting, batches)


def snapshot(seconds: float, *steps: StepCounts, read: int = 0, **more: Any) -> Snapshot:
    errors = {"ValueError": 3} if any(step.failed for step in steps) else {}
    examples = dict.fromkeys(errors, LETTER)
    known: dict[str, Any] = {"skipped": 0, "recomputed": 0, "examples": examples, **more}
    return Snapshot(1000, read, seconds=seconds, steps=steps, errors=errors, **known)


def paces_of(*snapshots: Snapshot) -> Sequence[Pace]:
    """Return the paces after the last of these snapshots."""
    seen: list[Sequence[Pace]] = []
    watcher = Watcher([lambda _state, _snapshot, paces: seen.append(paces)])
    for each in snapshots:
        watcher.update(each)
    return seen[-1]


def test_the_rate_leaves_out_the_first_batch_and_rows_that_were_done_before() -> None:
    # a model is built for 20 s, then a batch of 10 ends each second
    (pace,) = paces_of(
        snapshot(0.5, counts(), read=900, skipped=900),
        snapshot(21.0, counts(10, 90, 1), read=1000, skipped=900),
        snapshot(21.5, counts(10, 90, 1), read=1000, skipped=900),
        snapshot(22.0, counts(18, 80, 2, failed=2), read=1000, skipped=900),
    )
    assert (pace.rate, pace.done, pace.left) == (10, 920, 8)


def test_time_left_is_the_work_left_in_a_step_at_its_own_rate() -> None:
    steps = [
        (counts(100 * second, 0, second), counts(10 * second, 90 * second, second))
        for second in (1, 2)
    ]
    first, second = paces_of(snapshot(1.0, *steps[0], read=100), snapshot(2.0, *steps[1], read=200))
    assert first.left == 8  # 800 rows at 100 a second
    assert second.left == 98  # 980 at 10
    assert (first.done, second.done) == (200, 20)


def test_no_step_ends_before_the_one_that_it_reads_from() -> None:
    # the second one is catching up, at 20 rows a second, with the first, which does 10
    first, second = paces_of(
        snapshot(1.0, counts(80, 920, 8), counts(50, 30, 5), read=1000),
        snapshot(2.0, counts(90, 910, 9), counts(70, 20, 7), read=1000),
    )
    assert (first.rate, second.rate) == (10, 20)
    assert first.left == second.left == 91


def test_the_status_file_tells_all_that_is_known(tmp_path: Path) -> None:
    progress = tmp_path / "vectors.parquet.progress"
    watcher(False, progress, "vectors.parquet").update(
        snapshot(1.0, counts(10, 17, 1, failed=3), read=30)
    )
    status = json.loads((tmp_path / "vectors.parquet.status").read_text())
    assert status == read_status(progress)
    assert status.pop("started") <= status.pop("updated")
    assert status.pop("host")
    embed = {"name": "embed", "ok": 10, "failed": 3, "waiting": 17, "batches": 1, "filtered": 0}
    rows = {"total": 1000, "total_is_estimate": False, "read": 30, "skipped": 0, "recomputed": 0}
    assert status == {
        "state": "running",
        "pid": os.getpid(),
        "result": "vectors.parquet",
        "progress": str(progress),
        **rows,
        "seconds": 1.0,
        "steps": [{**embed, "rows_per_s": None, "seconds_left": None}],
        "errors": {"ValueError": 3},
        "examples": {"ValueError": dict(LETTER)},
        "stopped": "",
        "unreadable": 0,
        "failed": 3,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.parquet.status"]


def test_a_disk_that_takes_no_status_file_is_no_concern_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []
    progress = tmp_path / "missing" / "x.progress"
    view = watcher(lambda snapshot: told.append(snapshot.read), progress, "x")
    view.update(snapshot(1.0, counts(), read=1))
    view.update(snapshot(2.0, counts(), read=2), "done")
    assert told == [1, 2]
    assert not caplog.records


def test_a_function_that_watches_and_raises_is_dropped_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Snapshot] = []

    def watch(snapshot: Snapshot) -> None:
        calls.append(snapshot)
        raise ValueError("of the user")

    view = watcher(watch, tmp_path / "x.progress", "x")
    view.update(snapshot(1.0, counts()))
    view.update(snapshot(2.0, counts()), "writing")
    view.update(snapshot(3.0, counts()), "done")
    assert len(calls) == len(caplog.records) == 1
    status = read_status(tmp_path / "x.progress")
    assert status
    assert status["state"] == "done"


def test_a_terminal_has_one_line_with_counts_rate_and_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = Watcher([Lines("x.parquet", rewrites=True)])
    view.update(snapshot(1.0, counts(100, 0, 1), read=100, total_is_estimate=True))
    view.update(snapshot(2.0, counts(197, 0, 2, failed=3), read=200))
    view.update(snapshot(3.0, counts(297, 0, 3, failed=3), read=300))
    view.update(snapshot(4.0, counts(997, 0, 4, failed=3), read=1000), "writing")
    view.update(snapshot(5.0, counts(997, 0, 4, failed=3), read=1000), "done")
    first, second, third, writing, last = capsys.readouterr().err.split("\r\x1b[K")[1:]
    assert first == "x.parquet running: embed 100/about 1,000 rows"
    assert second.startswith("x.parquet running: embed 200/1,000 rows  100.0 rows/s  3 failed")
    assert second.endswith("the first failure, in inference: ValueError: bad row\n")
    assert third == "x.parquet running: embed 300/1,000 rows  100.0 rows/s  3 failed  0:00:07 left"
    assert writing.startswith("x.parquet writing: embed 1,000/1,000 rows")
    assert last.startswith("x.parquet done: embed 1,000/1,000 rows")
    assert last.endswith("\n")


def test_a_log_gets_a_line_every_10_s_for_the_first_failure_and_at_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    view = watcher(True, tmp_path / "x.progress", "x.parquet")
    view.update(snapshot(1.0, counts()))
    view.update(snapshot(2.0, counts(8, failed=1), read=10))
    view.update(snapshot(3.0, counts(9, failed=2), read=11))
    view.update(snapshot(11.9, counts(18, failed=2), read=20))
    view.update(snapshot(12.1, counts(18, batches=9), read=20, total_is_estimate=True))
    view.update(snapshot(13.0, counts(1000), read=1000), "done")
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        (
            "x.parquet running: embed 10/1,000 rows  1 failed; the first failure, in inference: "
            "ValueError: bad row"
        ),
        "x.parquet running: embed 20/about 1,000 rows",
        "x.parquet done: embed 1,000/1,000 rows  1,091.1 rows/s",
    ]
    watcher(False, tmp_path / "x.progress", "x").update(snapshot(1.0, counts()), "done")
    assert capfd.readouterr() == ("", "")


def test_a_report_names_all_outcomes_of_rows() -> None:
    step = StepCounts("embed", 1990, 3, 0, 20, filtered=7)
    seen = Snapshot(2000, 2000, 0, 0, 2.0, (step,), {"ValueError": 3}, {})
    report = Report(**vars(seen), output="x.parquet", progress="x.parquet.progress")
    assert str(report) == (
        "1,990 ok, 3 failed, 7 filtered in 2.0 s (996.5 rows/s)\nfailed: 3 x ValueError\nx.parquet"
    )
