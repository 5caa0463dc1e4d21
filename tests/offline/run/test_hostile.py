"""Runs with hostile functions, sources and signals."""

from __future__ import annotations

import os
import signal
import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batched import offline
from batched.errors import RunStopped
from batched.offline.progress.store import Progress
from batched.offline.run import room as _room
from batched.offline.run import run as _run
from batched.offline.sources import base as _window
from offline_steps import Counted, spawned_by

pytestmark = pytest.mark.once

ONCE = offline.Retry(attempts=1)


class Crash(BaseException):
    """The end of a process, as far as a run can tell."""


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "out.parquet"


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "x": number} for number in range(count)]


def run(fn: Callable[..., Any], source: Any, dest: Path, **settings: Any) -> offline.Report:
    known = {"input": "x", "output": "y", "key": "id", "version": 1, "name": "step"}
    return offline.run(fn, source, dest, **{**known, "watch": False, "retry": ONCE, **settings})


def same(items: list[Any]) -> list[Any]:
    return list(items)


def results(dest: Path) -> dict[Any, Any]:
    return {row["id"]: row["y"] for row in pq.read_table(dest).to_pylist()}


def failed_keys(report: offline.Report) -> list[Any]:
    return [letter["key"] for letter in report.dead_letters()]


def test_an_item_that_is_never_made_does_not_hold_up_the_end(
    dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_run, "GRACE", 0.1)
    never = threading.Event()

    def wait(value: int) -> int:
        if value == 50:
            never.wait()
        return value

    def crash(_: offline.Snapshot) -> None:
        raise Crash

    with pytest.raises(Crash):
        run(same, rows_of(100), dest, preprocess=wait, watch=crash)
    never.set()


def test_an_interrupt_loses_no_result_wherever_it_comes(dest: Path) -> None:
    computed: list[int] = []
    signals = [signal.SIGINT]

    class Result(UserDict[str, int]):
        def __iter__(self) -> Iterator[str]:  # while results are committed, in the main thread
            if signals:
                signal.raise_signal(signals.pop())
            return super().__iter__()

    def fn(items: list[int]) -> list[Result]:
        computed.extend(items)
        return [Result(item=item) for item in items]

    with pytest.raises(KeyboardInterrupt):
        run(fn, rows_of(5000), dest, batch_size=10)
    assert 0 < len(computed) < 5000
    assert run(fn, rows_of(5000), dest).skipped > 0
    assert sorted(computed) == list(range(5000))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_run_may_be_called_in_any_thread(dest: Path) -> None:
    with ThreadPoolExecutor() as pool:
        assert pool.submit(run, same, rows_of(10), dest).result(30).ok == 10


def test_a_kill_after_the_result_appeared_does_not_pass_it_off_as_that_of_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = tmp_path / "out.jsonl"
    for name, count in (("all", 20), ("few", 5)):
        lines = [f'{{"id": {number}, "x": {number}}}\n' for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    run(same, tmp_path / "all.jsonl", dest)

    put = Progress.put_all
    puts: list[str] = []

    def killed(progress: Progress, values: dict[str, Any]) -> None:
        puts.extend(values)
        if puts.count("results") == 2:
            raise Crash
        put(progress, values)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Progress, "put_all", killed)
        run(same, tmp_path / "few.jsonl", dest)
    assert len(dest.read_text().splitlines()) == 5
    run(same, tmp_path / "all.jsonl", dest)
    assert len(dest.read_text().splitlines()) == 20


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_row_on_which_the_function_leaves_costs_one_row(
    dest: Path, error: BaseException, asynchronous: bool
) -> None:
    def leave(items: list[int]) -> list[int]:
        if 50 in items:
            raise error
        return items

    async def leave_later(items: list[int]) -> list[int]:
        return leave(items)

    assert failed_keys(run(leave_later if asynchronous else leave, rows_of(100), dest)) == [50]


def test_one_new_row_of_a_finished_dataset_may_be_one_that_its_service_refuses(dest: Path) -> None:
    run(same, rows_of(99), dest)
    for _ in range(2):
        report = run(Counted([99], ConnectionError), rows_of(100), dest)
        assert (report.ok, report.failed, report.skipped) == (0, 1, 99)
        assert failed_keys(report) == [99]
    assert list(results(dest)) == list(range(99))


@pytest.mark.parametrize("place", ["middle", "end", "first new batch"])
@pytest.mark.parametrize("error", [ConnectionError("down"), RuntimeError("device lost")])
def test_an_outage_ends_the_run_marks_nothing_as_failed_and_the_next_goes_on(
    dest: Path, error: Exception, place: str
) -> None:
    resumed = place == "first new batch"
    count = {"middle": 80, "end": 25, "first new batch": 21}[place] * 64
    calls = wasted = 0

    def dies(items: list[int]) -> list[int]:
        nonlocal calls, wasted
        calls += 1
        if calls > 20 or resumed:
            wasted += 1
            raise error
        return items

    if resumed:
        run(same, rows_of(20 * 64), dest, batch_size=64)
    retry = offline.Retry(attempts=3, wait_initial=0.01, wait_max=0.01, wait_jitter=0)
    fails = "fails even for a row|has not succeeded for"
    with pytest.raises(RunStopped, match=fails) as stopped:
        run(dies, rows_of(count), dest, batch_size=64, retry=retry, outage_s=0.01)
    report = stopped.value.report
    assert (report.ok, report.failed) == (0 if resumed else 20 * 64, 0)
    assert wasted <= 100
    assert failed_keys(report) == []
    assert dest.exists() == resumed
    assert run(same, rows_of(count), dest).ok == count - 20 * 64
    assert results(dest) == {number: number for number in range(count)}


def test_a_row_is_tried_again_as_its_step_read_it_though_a_later_one_replaces_the_column(
    dest: Path,
) -> None:
    counted = Counted(range(300, 1000))

    def double(items: list[int]) -> list[str]:
        return list(map(str, counted(items)))

    steps = [
        offline.Step(double, input="x", output="x", version=1, batch_size=16),
        offline.Step(same, input="x", output="y", version=1, batch_size=16),
    ]
    for skipped in (0, 1300):
        report = offline.Pipeline(*steps).run(
            rows_of(2000), dest, key="id", watch=False, replace=True
        )
        assert (report.failed, report.skipped) == (700, skipped)
    assert results(dest)[1500] == "3000"


def test_batches_are_full_though_their_items_are_made_beside_them(dest: Path) -> None:
    counted, begun = Counted(), threading.Event()

    def make(value: int) -> int:
        if value and value % _room.TOGETHER == 0:
            begun.wait(0.2)
        return value

    def begin(items: list[int]) -> list[int]:
        begun.set()
        return counted(items)

    run(begin, rows_of(64), dest, batch_size=64, preprocess=make)
    assert counted.sizes == [64]


def test_few_items_are_made_ahead_of_the_batches(dest: Path) -> None:
    made = used = 0
    many = threading.Event()
    lock = threading.Lock()

    def make(value: int) -> int:
        nonlocal made
        with lock:
            made += 1
            if made - used > 400:
                many.set()
        return value

    def use(items: list[int]) -> list[int]:
        nonlocal used
        many.wait(0.01)
        with lock:
            used += len(items)
        return items

    run(use, rows_of(4000), dest, batch_size=64, preprocess=make)
    assert made == used == 4000
    assert not many.is_set()


def test_large_rows_are_read_as_they_are_needed(
    dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_window, "WINDOW_BYTES", 10_000)
    read = used = 0
    many = threading.Event()

    class Large:
        def __len__(self) -> int:
            return 500

        def __getitem__(self, number: int) -> Any:
            nonlocal read
            read = number
            if read - used > 100 and used < 400:
                many.set()
            return {"id": number, "x": "x" * 1000}

    def use(items: list[str]) -> list[int]:
        nonlocal used
        many.wait(0.01)
        used += len(items)
        return [len(item) for item in items]

    run(use, Large(), dest, batch_size=8)
    assert used == 500
    assert not many.is_set()


def test_errors_of_rows_and_of_the_service_in_the_only_batch_cost_their_rows(dest: Path) -> None:
    def mixed(items: list[int]) -> list[int]:
        if 0 in items:
            raise ValueError("bad row")
        if {1, 4} & set(items):
            raise ConnectionError("refused")
        return items

    report = run(mixed, rows_of(5), dest)
    assert sorted(failed_keys(report)) == [0, 1, 4]
    assert report.ok == 2


def test_a_second_interrupt_leaves_no_process(
    tmp_path: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"

    def hang(items: list[int]) -> list[int]:
        begun.touch()
        threading.Event().wait()
        return items

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def interrupt(_: offline.Snapshot) -> None:
        if begun.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(_run.Run, "_finish_running", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(hang, rows_of(10), dest, processes=True, watch=interrupt)
    assert not spawned_by(os.getpid())
