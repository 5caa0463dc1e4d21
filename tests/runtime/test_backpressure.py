"""Callers who only submit, and a queue that is full; and the timer that ends calls which have
waited too long.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import batched
from batched._runtime.timer_thread import TimerThread, timer
from stage import BOUND, Turnstile, held, python, refuse_thread, wait_until


def full(**settings: Any) -> tuple[Turnstile, Any, list[Any]]:
    """Return a function whose queue is full: one item runs and one waits."""
    turnstile = Turnstile()
    fn: Any = batched.dynamically(**{"max_queue_size": 1, **settings})(turnstile)
    first = fn.submit("running")
    wait_until(lambda: bool(turnstile.batches))
    return turnstile, fn, [first, fn.submit("waiting")]


def blocked(fn: Any, item: Any) -> tuple[threading.Thread, list[Any]]:
    """Return a thread that is blocked in submitting `item`, and the list that gets the future."""
    futures: list[Any] = []
    thread = threading.Thread(target=lambda: futures.append(fn.submit(item)), daemon=True)
    thread.start()
    wait_until(lambda: fn.stats.blocked == 1)
    assert not futures
    return thread, futures


def test_a_thread_that_submits_waits_for_room_but_not_for_the_answer() -> None:
    turnstile, fn, earlier = full()
    thread, futures = blocked(fn, "late")
    turnstile.let_through()  # the waiting item runs, and the blocked item waits
    thread.join(BOUND)
    assert not thread.is_alive()
    assert not futures[0].done()
    turnstile.let_through(2)
    assert [future.result(BOUND) for future in (*earlier, *futures)] == [
        "running",
        "waiting",
        "late",
    ]
    fn.shutdown()


def test_a_full_queue_refuses_with_its_own_error_while_batches_end() -> None:
    @batched.dynamically(batch_size=1, max_queue_size=1, on_full="raise")
    def fn(items: list[int]) -> list[int]:
        return items

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # many orders of the threads
    try:
        with (
            fn,
            ThreadPoolExecutor(8) as callers,
        ):
            calls = [callers.submit(fn, number) for number in range(1500)]
            found = {type(call.exception()) for call in calls}
    finally:
        sys.setswitchinterval(interval)
    assert found <= {type(None), batched.QueueFull}


def test_a_thread_that_waits_for_room_is_let_go_when_an_earlier_call_is_cancelled() -> None:
    turnstile, fn, earlier = full()
    thread, _ = blocked(fn, "late")
    assert earlier[1].cancel()
    thread.join(BOUND)
    assert not thread.is_alive()
    turnstile.let_through(2)
    fn.shutdown()
    assert turnstile.batches == [["running"], ["late"]]


@pytest.mark.parametrize("cancel", [True, False])
def test_a_thread_that_waits_for_room_is_let_go_at_shutdown(cancel: bool) -> None:
    turnstile, fn, earlier = full()
    thread, futures = blocked(fn, "late")
    closing = threading.Thread(target=lambda: fn.shutdown(cancel_futures=cancel), daemon=True)
    closing.start()
    if cancel:
        thread.join(BOUND)
        wait_until(lambda: all(future.cancelled() for future in (earlier[1], *futures)))
        assert not earlier[0].done()
    turnstile.let_through(3)
    for each in (thread, closing):
        each.join(BOUND)
        assert not each.is_alive()
    if not cancel:
        assert futures[0].result(BOUND) == "late"


def test_a_thread_that_waits_too_long_for_room_has_a_future_that_says_so() -> None:
    turnstile = Turnstile()
    fn: Any = batched.dynamically(max_queue_size=1, queue_timeout_ms=50)(turnstile)
    while not turnstile.batches:  # on a slow machine the first may come too late, too
        fn.submit("running")
        wait_until(lambda: bool(turnstile.batches) or fn.stats.timed_out == fn.stats.calls)
    futures = [fn.submit(i) for i in range(3)]
    assert all(isinstance(future.exception(BOUND), batched.QueueTimeout) for future in futures)
    turnstile.let_through(10)
    fn.shutdown()
    assert turnstile.batches == [["running"]]


# ---------------------------------------------------------------- the timer


def test_one_clock_serves_all_batchers_and_starts_with_the_first_that_needs_it() -> None:
    done = python(
        """
        import threading, batched
        def names():
            return [each.name for each in threading.enumerate() if each.name == "batched-timer"]
        plain = batched.dynamically(name="plain")(lambda items: items)
        assert plain(1) == 1 and names() == []
        fns = [plain.with_options(queue_timeout_ms=1e6) for _ in range(20)]
        assert names() == []
        assert [fn(1) for fn in fns] == [1] * 20
        assert names() == ["batched-timer"]
        """
    )
    assert done.returncode == 0, done.stderr


class Alarm:
    def __init__(self, name: str, rung: list[str]) -> None:
        self.name = name
        self.rung = rung
        self.over = threading.Event()

    def ring(self) -> None:
        self.rung.append(self.name)
        self.over.set()


def test_the_timer_keeps_nothing_alive_and_survives_a_callback_that_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rung: list[str] = []
    ticking = TimerThread()
    ticking.start()
    gone, broken, last = (Alarm(name, rung) for name in ("gone", "broken", "last"))
    broken.over = None  # type: ignore[assignment]
    now = time.perf_counter()
    with caplog.at_level(logging.ERROR, "batched"):
        for alarm, moment in ((gone, now + 0.02), (broken, now + 0.03), (last, now + 0.04)):
            ticking.call_at(moment, alarm.ring)
        del gone, alarm
        assert last.over.wait(BOUND)
    assert rung == ["broken", "last"]
    assert [record.getMessage() for record in caplog.records] == ["a call of the timer failed"]


def test_where_no_clock_can_be_started_the_caller_is_told_and_nothing_was_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fn: Any = batched.dynamically(queue_timeout_ms=1e6)(lambda items: items)
    with monkeypatch.context() as patch:
        patch.setattr(timer, "_entries", None)
        patch.setattr(threading.Thread, "start", refuse_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            fn(1)
    assert fn.stats.calls == 0
    assert fn(2) == 2
    fn.shutdown()


def test_callbacks_of_expired_calls_run_where_no_thread_can_be_started_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = threading.Event()
    gate, fn, running = held(queue_timeout_ms=50)
    timer.start()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        late = fn.submit("late")
        late.add_done_callback(lambda _: told.set())
        assert isinstance(late.exception(BOUND), batched.QueueTimeout)
        assert told.wait(BOUND)
    gate.opened.set()
    assert running.result(BOUND) == "running"
    fn.shutdown()
