"""Log records for operators, and the time after which a refused call may be made again."""

from __future__ import annotations

import logging
import re

import pytest

import batched
from batched._runtime import notices
from stage import BOUND, held


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
    failed = re.compile(
        r"fn: items of a batch of 4 failed; the function was called \d times in all"
    )
    assert any(map(failed.fullmatch, messages))  # memory may have run out, too


def test_a_refusal_says_when_the_queue_will_have_run() -> None:
    gate, fn, first = held(max_queue_size=2, on_full="raise")
    gate.opened.set()
    first.result(BOUND)
    gate.opened.clear()
    gate.entered.clear()
    fn.submit("running")
    assert gate.entered.wait(BOUND)
    fn.submit("waits")
    fn.submit("waits, too")
    with pytest.raises(batched.QueueFull) as refused:
        fn(4)
    assert refused.value.retry_after_s == pytest.approx(3 * fn.stats.avg_processing_time)
    gate.opened.set()
    fn.shutdown()
