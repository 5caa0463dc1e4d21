"""Signal handlers that raise: in a caller that waits, and anywhere."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest

import batched
from batched._core.scheduler import Scheduler
from batched._runtime.call_queue import CallQueue
from batched._runtime.wakers import _wake_each as wake_each
from stage import BOUND, held, interrupted_once, python, wait_until

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="signals end a process there, and there are no alarms"
)


@pytest.mark.parametrize("way", ["waits for its answer", "waits for room"])
def test_ctrl_c_while_a_caller_waits_ends_its_call_only(way: str) -> None:
    records: list[batched.BatchRecord] = []
    gate, fn, running = held(max_queue_size=1, on_batch=records.append)
    others = [running] if way == "waits for its answer" else [running, fn.submit("waiting")]

    def late_waits() -> None:
        wait_until(lambda: fn.stats.queue_size + fn.stats.blocked == len(others))

    with interrupted_once(late_waits):
        fn("late") if way == "waits for its answer" else fn.submit("late")
    assert (fn.stats.blocked, fn.stats.cancelled) == (0, 1)
    gate.opened.set()
    assert [future.result(BOUND) for future in others] == ["running", "waiting"][: len(others)]
    assert fn("next") == "next"
    fn.shutdown()
    assert [record.size for record in records] == [1] * (len(others) + 1)


def interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let the next call of a method raise as a signal handler would."""
    method, left = getattr(owner, name), [KeyboardInterrupt]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if left:
            raise left.pop()
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("change", ["submit", "cancel", "cancel and its clean-up"])
def test_ctrl_c_during_a_change_ends_all(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, fn, running = held(name="reset")
    waiting = fn.submit("waiting")
    interrupt_once(monkeypatch, Scheduler, "submit" if change == "submit" else "cancel")
    if "clean-up" in change:
        interrupt_once(monkeypatch, CallQueue, "_lost_call")
    with pytest.raises(KeyboardInterrupt):
        fn.submit("late") if change == "submit" else waiting.cancel()
    for future in (running, waiting):
        assert isinstance(future.exception(BOUND), batched.BatcherClosed)
    gate.opened.set()
    assert fn("next") == "next"
    fn.shutdown()
    wait_until(lambda: not [each for each in threading.enumerate() if "-reset-" in each.name])


def test_ctrl_c_while_tasks_of_another_loop_are_woken_wakes_all_of_them() -> None:
    class Interrupted(asyncio.Future[None]):
        def set_result(self, _: None) -> None:
            super().set_result(None)
            raise KeyboardInterrupt

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        wakers = [Interrupted(loop=loop), loop.create_future()]
        with pytest.raises(KeyboardInterrupt):
            wake_each(loop, wakers)
        runner.run(asyncio.wait_for(wakers[1], BOUND))


def test_a_storm_of_alarms_ends_in_errors_and_never_in_hangs_or_wrong_results() -> None:
    done = python(
        """
        import logging, signal, sys, threading, batched

        sys.settrace(None)  # the tracer of coverage has a lock of its own
        threading.settrace(None)
        logging.disable()

        class Alarm(Exception):
            pass

        def handler(*_):
            global armed
            if armed:
                armed = False
                raise Alarm

        fn = batched.dynamically(batch_size=4)(lambda items: [2 * item for item in items])
        over, armed, interrupted, wrong = threading.Event(), False, 0, []

        def call(item):
            result = fn([item, item + 1]) if item % 2 else fn(item)
            if result != ([2 * item, 2 * item + 2] if item % 2 else 2 * item):
                wrong.append(result)

        def keep_calling():
            item = 0
            while not over.is_set():
                item += 1
                try:
                    call(item)
                except batched.BatcherClosed:
                    pass

        threads = [threading.Thread(target=keep_calling) for _ in range(2)]
        for thread in threads:
            thread.start()
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        while interrupted < 20:
            try:
                try:
                    armed = True
                    call(interrupted)
                finally:
                    armed = False
            except (Alarm, batched.BatcherClosed):
                interrupted += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        over.set()
        for thread in threads:
            thread.join(20)
        print([thread.is_alive() for thread in threads], wrong, fn(3))
        fn.shutdown()
        """,
        timeout=3 * BOUND,
    )
    assert done.stdout == "[False, False] [] 6\n", done.stdout + done.stderr
