"""Log records for operators, and the time after which a refused call may be made again."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

import batched
from batched._core.policy import BatchPolicy
from batched._core.scheduler import Request, Scheduler
from batched._runtime import notices


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
