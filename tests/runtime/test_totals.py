"""Counts of the process, notices for operators, and the probe of all batches."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from typing import Any

import pytest

import batched
from batched._core.policy import BatchPolicy
from batched._core.scheduler import Request, Scheduler
from batched._runtime import notices, observer, recorder
from batched._runtime.recorder import Recorder, totals
from stage import end_together, python


def calls(name: str) -> int:
    """Return the calls that the process has counted for a function."""
    return int(totals()[name]["calls", ""])


def test_counts_of_recorders_that_are_reset_or_gone_stay_in_the_totals() -> None:
    first, second = Recorder("counted"), Recorder("counted")
    first.accepted(), second.accepted(), second.accepted()
    assert calls("counted") == 3
    second.reset()
    assert calls("counted") == 3
    second.accepted()
    del first, second
    gc.collect()
    assert calls("counted") == 4


def test_a_recorder_without_a_name_is_in_no_totals() -> None:
    nameless = Recorder("")
    nameless.accepted()
    nameless.reset()
    assert "" not in totals()
    del nameless
    assert "" not in totals()


def test_waits_of_calls_that_run_elsewhere_are_counted() -> None:
    waiting = Recorder("elsewhere")
    waiting.waited([0.5, 0.25])
    assert waiting.counts()["wait_sum", ""] == 0.75
    assert waiting.snapshot(0, 0, 0).queue_wait.p99 == pytest.approx(0.5, rel=0.03)


def test_counts_of_many_gone_recorders_are_summed_up() -> None:
    for _ in range(2 * recorder.MOST_UNREAD):
        one = Recorder("many")
        one.accepted()
        del one
    assert len(recorder._ended) <= recorder.MOST_UNREAD + 1
    assert calls("many") == 2 * recorder.MOST_UNREAD


def test_the_sink_and_all_counts_begin_anew_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noting(recorder.Sink):
        noted = 0

        def after_fork(self) -> None:
            self.noted += 1

    sink = Noting()
    monkeypatch.setattr(recorder, "sink", sink)

    @batched.dynamically
    def fn(items: list[int]) -> list[int]:
        return items

    with fn:
        fn(1)
    recorder.after_fork()
    assert (sink.noted, fn.stats.calls) == (1, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_of_a_fork_begins_to_count_at_zero() -> None:
    @batched.dynamically(name="of_parent")
    def fn(items: list[int]) -> list[int]:
        return items

    fn(1)
    child = os.fork()
    if not child:  # pragma: no cover  # in another process
        os._exit(0 if (fn(2), calls("of_parent"), fn.stats.calls) == (2, 1, 1) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert calls("of_parent") == 1


# ---------------------------------------------------------------- notices


def test_refusals_are_logged_a_few_times_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("batched._runtime.notices.time.perf_counter", lambda: now[0])

    @batched.dynamically
    def fn(items: list[int]) -> list[int]:
        return items

    fn.shutdown()
    for _ in range(3):
        with pytest.raises(batched.BatcherClosed):
            fn(1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "a call was refused: " in record.message
    now[0] += notices.INTERVAL
    with pytest.raises(batched.BatcherClosed):
        fn(1)
    assert caplog.records[1].message.endswith("(and 2 times since the last record)")


def test_items_that_fail_alone_and_memory_that_runs_out_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @batched.dynamically(isolate_errors=True, on_oom="split", name="fn")
    def fn(items: list[int]) -> list[int]:
        if len(items) > 2:
            raise MemoryError
        return [10 // item for item in items]

    with fn, pytest.raises(ZeroDivisionError):
        fn([1, 2, 0, 4])
    messages = [record.message for record in caplog.records]
    assert "fn: 4 items ran out of memory, and were run in smaller parts" in messages
    assert any("fn: items of a batch of 4 failed; the function was called" in x for x in messages)


def test_a_refusal_says_when_the_queue_will_have_run() -> None:
    started, go = threading.Event(), threading.Event()

    @batched.dynamically(batch_size=1, max_queue_size=2, on_full="raise")
    def fn(items: list[int]) -> list[int]:
        started.set()
        assert go.wait(30)
        return items

    waiting = [fn.submit(1)]
    assert started.wait(30)
    waiting += [fn.submit(2), fn.submit(3)]
    with pytest.raises(batched.QueueFull) as none:
        fn(4)
    assert none.value.retry_after_s == 0.0  # no batch has ended yet
    go.set()
    assert [each.result() for each in waiting] == [1, 2, 3]
    go.clear()
    started.clear()
    waiting = [fn.submit(1)]
    assert started.wait(30)
    waiting += [fn.submit(2), fn.submit(3)]
    with pytest.raises(batched.QueueFull) as some:
        fn(4)
    assert some.value.retry_after_s == pytest.approx(3 * fn.stats.avg_processing_time)
    go.set()
    fn.shutdown()


def test_a_queue_is_expected_to_run_in_full_batches() -> None:
    scheduler = Scheduler(BatchPolicy(batch_size=4, flush="eager"))
    waker: Any = object()
    for moment in range(3):  # batches of one item take a second each
        scheduler.submit(Request([0], 1, None, waker), moment, from_event_loop=False)
        batch = scheduler.take(moment)
        assert batch is not None
        scheduler.finished(batch, moment + 1.0)
    for _ in range(9):
        scheduler.submit(Request([0], 1, None, waker), 3.0, from_event_loop=False)
    assert scheduler.time_left(4) == 3.0


# ---------------------------------------------------------------- probe


class Noted(observer.Probe):
    """Probe that notes its calls."""

    def __init__(self, begin: bool) -> None:
        self.begin = begin
        self.noted: list[Any] = []

    def origin(self) -> str:
        return threading.current_thread().name

    def began(self, name: str, batch: Any) -> object:
        self.noted.append(("began", name, batch.slices[0][0].origin))
        return self if self.begin else None

    def joined(self, name: str, batch: Any) -> None:
        self.noted.append(("joined", name))

    def ended(self, began: object, name: str, batch: Any, outcomes: Any) -> None:
        assert began is self
        self.noted.append(("ended", name))


@pytest.fixture(params=[True, False])
def probe(request: Any, monkeypatch: pytest.MonkeyPatch) -> Noted:
    noted = Noted(request.param)
    monkeypatch.setattr(observer, "probe", noted)
    return noted


def test_the_probe_sees_each_batch_and_the_origin_of_its_calls(probe: Noted) -> None:
    @batched.dynamically(name="fn")
    def fn(items: list[int]) -> list[int]:
        return items

    with fn:
        fn(1)
    ends = [("ended", "fn")] if probe.begin else []
    assert probe.noted == [("began", "fn", threading.current_thread().name), *ends]


def test_the_probe_sees_batches_on_event_loops(probe: Noted) -> None:
    @batched.aio.dynamically(name="fn")
    async def fn(items: list[int]) -> list[int]:
        return items

    async def call() -> None:
        async with fn:
            await fn(1)

    asyncio.run(call())
    ends = [("ended", "fn")] if probe.begin else []
    assert probe.noted == [("began", "fn", threading.current_thread().name), *ends]


def test_the_probe_sees_rows_that_join(probe: Noted) -> None:
    @batched.continuously(name="fn")
    def fn(rows: batched.Rows[int, int]) -> None:
        other.start()
        end_together(rows, 2)

    other = threading.Thread(target=fn, args=(2,))
    assert fn(1) == 1
    other.join(30)
    fn.shutdown()
    assert ("joined", "fn") in probe.noted


def test_the_sink_is_closed_once_all_accepted_calls_are_finished() -> None:
    ended = python(
        """
        import time
        import batched
        from batched._runtime import recorder

        class Last(recorder.Sink):
            def close(self):
                print("closed after", fn.stats.total_processed)

        @batched.dynamically
        def fn(items):
            time.sleep(0.01)
            return items

        recorder.sink = Last()
        futures = [fn.submit(number) for number in range(3)]
        """
    )
    assert (ended.stdout, ended.stderr) == ("closed after 3\n", "")
