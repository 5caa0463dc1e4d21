"""Callers who only submit, a full queue, calls that wait too long, and what operators are told."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import batched
from batched._runtime import notices
from batched._runtime.timer_thread import TimerThread, timer
from stage import BOUND, Turnstile, held, python, refuse_thread, wait_until


@pytest.mark.parametrize("room", ["a batch", "a cancellation", "a shutdown"])
def test_a_thread_that_submits_waits_for_room_but_not_for_the_answer(room: str) -> None:
    turnstile = Turnstile()
    fn: Any = batched.dynamically(max_queue_size=1)(turnstile)
    fn.submit("running")
    wait_until(lambda: bool(turnstile.batches))
    waiting = fn.submit("waiting")
    with ThreadPoolExecutor(1) as thread:
        submitting = thread.submit(fn.submit, "late")
        wait_until(lambda: fn.stats.blocked == 1)
        if room == "a batch":
            turnstile.let_through()
        elif room == "a cancellation":
            assert waiting.cancel()
        else:
            fn.shutdown(wait=False, cancel_futures=True)
        late = submitting.result(BOUND / 2)
    assert late.cancelled() == late.done() == (room == "a shutdown")
    turnstile.let_through(2)
    fn.shutdown()
    later = {"a batch": [["waiting"], ["late"]], "a cancellation": [["late"]], "a shutdown": []}
    assert turnstile.batches == [["running"], *later[room]]


def test_one_clock_serves_all_batchers_and_starts_with_the_first_that_needs_it() -> None:
    done = python(
        """
        import threading, batched
        def names():
            return [each.name for each in threading.enumerate() if each.name == "batched-timer"]
        fns = [batched.dynamically(queue_timeout_ms=1e6)(sorted) for _ in range(20)]
        assert batched.dynamically(sorted)(1) == 1 and names() == []
        assert [fn(1) for fn in fns] == [1] * 20
        assert names() == ["batched-timer"]
        """
    )
    assert done.returncode == 0, done.stderr


class Alarm:
    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def ring(self) -> None:
        self.act()


def test_the_timer_keeps_nothing_alive_and_logs_errors(caplog: pytest.LogCaptureFixture) -> None:
    rung, over = threading.Event(), threading.Event()
    broken, last = Alarm(lambda: 1 / 0), Alarm(over.set)
    ticking, now = TimerThread(), time.perf_counter()
    ticking.start()
    with caplog.at_level(logging.ERROR, "batched"):
        ticking.call_at(now + 1e12, last.ring)
        ticking.call_at(now + 0.02, Alarm(rung.set).ring)  # to which nothing refers then
        ticking.call_at(now + 0.03, broken.ring)
        ticking.call_at(now + 0.04, last.ring)
        assert over.wait(BOUND)
    assert not rung.is_set()
    assert [record.getMessage() for record in caplog.records] == ["a call of the timer failed"]


def test_callbacks_of_expired_calls_need_no_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    gate, fn, running = held(queue_timeout_ms=50)
    timer.start()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        late = fn.submit("late")
        late.add_done_callback(lambda _: told.set())
        assert isinstance(late.exception(BOUND), batched.QueueTimeout)
        assert told.wait(BOUND)
    slow = fn.submit("slow")
    slow.add_done_callback(lambda _: gate.opened.wait(BOUND))
    wait_until(slow.done)
    assert isinstance(fn.submit("later").exception(BOUND / 2), batched.QueueTimeout)
    gate.opened.set()
    assert running.result(BOUND) == "running"
    fn.shutdown()


def test_refusals_are_logged_a_few_times_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("batched._runtime.notices.time.perf_counter", lambda: now[0])
    fn = batched.dynamically(lambda items: items)
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


def test_items_that_fail_and_lack_of_memory_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    @batched.dynamically(isolate_errors=True, on_oom="split", name="fn")
    def fn(items: list[int]) -> list[int]:
        if len(items) > 2:
            raise MemoryError
        return [10 // item for item in items]

    with fn, pytest.raises(ZeroDivisionError):
        fn([1, 2, 0, 4])
    messages = [record.message for record in caplog.records]
    assert "fn: 4 items ran out of memory, and were run in smaller parts" in messages
    failed = r"fn: items of a batch of 4 failed; the function was called \d times in all"
    assert any(re.fullmatch(failed, message) for message in messages)


def test_a_refusal_says_when_the_queue_will_have_run() -> None:
    turnstile = Turnstile()
    settings: Any = {"batch_size": 1, "max_queue_size": 2, "on_full": "raise"}
    fn: Any = batched.dynamically(max_concurrent_batches=2, **settings)(turnstile)
    turnstile.let_through()
    fn.submit("has run").result(BOUND)
    fn.submit("runs")
    fn.submit("runs, too")
    wait_until(lambda: len(turnstile.batches) == 3)
    fn.submit("waits")
    fn.submit("waits, too")
    with pytest.raises(batched.QueueFull) as refused:
        fn(4)
    assert refused.value.retry_after_s == pytest.approx(2 * fn.stats.avg_processing_time)
    turnstile.let_through(4)
    fn.shutdown()
