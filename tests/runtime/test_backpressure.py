"""Callers who only submit, and a queue that is full; and the timer that ends calls which have
waited too long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import batched
from batched._runtime.timer_thread import TimerThread, timer
from stage import BOUND, Turnstile, held, python, refuse_thread, wait_until


def full() -> tuple[Turnstile, Any, list[Any]]:
    """Return a function whose queue is full: one item runs and one waits."""
    turnstile = Turnstile()
    fn: Any = batched.dynamically(max_queue_size=1)(turnstile)
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
    results = [future.result(BOUND) for future in (*earlier, *futures)]
    assert results == ["running", "waiting", "late"]
    fn.shutdown()


@pytest.mark.parametrize("closes", [False, True])
def test_a_thread_that_waits_for_room_is_let_go_by_cancellations(closes: bool) -> None:
    turnstile, fn, earlier = full()
    thread, futures = blocked(fn, "late")
    if closes:
        fn.shutdown(wait=False, cancel_futures=True)
    else:
        assert earlier[1].cancel()
    thread.join(BOUND)
    assert not thread.is_alive()
    assert (earlier[1].cancelled(), futures[0].cancelled()) == (True, closes)
    turnstile.let_through(2)
    fn.shutdown()
    assert turnstile.batches == [["running"], ["late"]][: 2 - closes]


# ---------------------------------------------------------------- the timer


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


def test_the_timer_keeps_nothing_alive_and_survives_a_callback_that_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rung, over = threading.Event(), threading.Event()
    broken, last = Alarm(lambda: 1 / 0), Alarm(over.set)
    ticking, now = TimerThread(), time.perf_counter()
    ticking.start()
    with caplog.at_level(logging.ERROR, "batched"):
        ticking.call_at(now + 0.02, Alarm(rung.set).ring)  # to which nothing refers then
        ticking.call_at(now + 0.03, broken.ring)
        ticking.call_at(now + 0.04, last.ring)
        assert over.wait(BOUND)
    assert not rung.is_set()
    assert [record.getMessage() for record in caplog.records] == ["a call of the timer failed"]


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
