"""Code that serves many callers runs in no caller's context, where threads inherit contexts, too:
free-threaded builds do so, and others if `thread_inherit_context` is set.
"""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import pytest

import batched
import batched._runtime.call_queue
from batched._runtime.timer_thread import TimerThread
from stage import BOUND, Gate

CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("caller")


@pytest.fixture(autouse=True)
def inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads begin with a copy of the context of the thread that starts them."""
    start = threading.Thread.start

    def start_in_copy(self: Any) -> None:
        run, context = self.run, contextvars.copy_context()
        self.run = lambda: context.run(run)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_in_copy)
    timer = TimerThread()  # that of the process may have begun elsewhere
    monkeypatch.setattr(batched._runtime.call_queue, "timer", timer)
    CALLER.set("the first one")


class Noted:
    """A function that notes the context in which it is called."""

    def __init__(self) -> None:
        self.callers: list[str | None] = []
        self.called = threading.Event()

    def __call__(self, *_: object) -> None:
        self.callers.append(CALLER.get(None))
        self.called.set()


def test_threads_inherit_contexts_here() -> None:
    noted = Noted()
    threading.Thread(target=noted).start()
    assert noted.called.wait(BOUND)
    assert noted.callers == ["the first one"]


def test_a_function_sees_no_context_of_the_caller_who_came_first() -> None:
    def work(items: list[Any]) -> list[Any]:
        return [CALLER.get(None) for _ in items]

    fn: Any = batched.dynamically(work)
    with fn:
        assert fn(1) is None
        CALLER.set("the next one")
        assert [fn.submit(1).result(BOUND) for _ in range(3)] == [None] * 3


def test_callbacks_of_futures_that_wait_too_long_see_no_context_of_a_caller() -> None:
    gate, noted = Gate(), Noted()
    fn: Any = batched.dynamically(batch_size=1, queue_timeout_ms=1)(gate)
    with fn:
        first = fn.submit(1)
        while not gate.entered.wait(0.05):
            if first.done():  # the worker came too late
                first = fn.submit(1)
        late = fn.submit(2)
        late.add_done_callback(noted)
        with pytest.raises(batched.QueueTimeout):
            late.result(BOUND)
        assert noted.called.wait(BOUND)
        gate.opened.set()
        assert first.result(BOUND) == 1
    assert noted.callers == [None]
