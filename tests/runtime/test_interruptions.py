"""Exceptions within the library itself, forks, and threads that cannot be started.

The exceptions come from signals and full stacks. Every caller is answered.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest

import batched
from batched._core.group import Group
from batched._core.scheduler import Scheduler
from batched._runtime import runtime, thread, timer_thread, wakers, wakeups
from batched._runtime.async_backend import current_loop
from batched._runtime.call_queue import CallQueue
from stage import (
    BOUND,
    call_with_little_stack,
    echo_coroutine,
    held,
    in_time,
    python,
    refuse_thread,
    wait_until,
    whole_stack,
)

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


class Interrupt(BaseException):
    """Exception that a signal handler raises."""


def interrupting(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, *, before: bool, on: int = 1
) -> None:
    """Raise `Interrupt` once, before or after the `on`th call of the function."""
    function, calls = getattr(where, name), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == on and before:
            raise Interrupt
        result = function(*args, **kwargs)
        if calls == on:
            raise Interrupt
        return result

    monkeypatch.setattr(where, name, interrupted)


PLACES: list[tuple[Any, str]] = [
    (Scheduler, "cancel"),
    (Group, "withdraw"),
    (Scheduler, "_admit"),
    (Scheduler, "_enqueue"),
    (CallQueue, "_notify_admitted"),
    (wakeups.Wakeups, "add"),
    (wakeups.Wakeups, "wake"),
    (wakeups, "wake_all"),
]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    ("where", "name"), PLACES, ids=lambda place: getattr(place, "__name__", place)
)
@pytest.mark.parametrize("way", ["cancel", "shutdown"])
def test_a_signal_within_the_library_leaves_no_caller_waiting(
    way: str, where: Any, name: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted call is answered or cancelled.

    Every other call is answered, and the next call is served.
    """

    async def submitted() -> list[Any]:
        return [fn.submit(i) for i in range(5)]  # on a loop, `submit` does not wait for room

    gate, fn, running = held(max_queue_size=2)
    futures = asyncio.run(submitted())
    with monkeypatch.context() as patch:
        interrupting(patch, where, name, before=before)
        with contextlib.suppress(Interrupt):
            if way == "cancel":
                futures[1].cancel()
            else:
                fn.shutdown(wait=False, cancel_futures=True)
    gate.opened.set()
    for future in (running, *futures):
        wait_until(future.done)
    if way == "cancel":
        others = (0, 2, 3, 4)
        assert [futures[other].result(BOUND) for other in others] == list(others)
        assert futures[1].cancelled() or futures[1].result(BOUND) == 1
    with fn:
        assert fn.submit("next").result(BOUND) == "next"
    fn.shutdown()
    assert (fn.stats.queue_size, fn.stats.blocked, fn.stats.in_flight) == (0, 0, 0)


@whole_stack
def test_a_full_stack_in_a_cancellation_leaves_no_caller_waiting() -> None:
    async def main() -> None:
        for spare in range(45, 0, -1):
            gate, fn, running = held(max_queue_size=1)
            futures = [fn.submit(i) for i in range(2)]
            with contextlib.suppress(RecursionError):
                call_with_little_stack(spare, futures[0].cancel)
            gate.opened.set()
            for future in (running, *futures):
                wait_until(future.done)
            fn.shutdown()

    asyncio.run(main())


def test_the_next_call_sets_a_timer_that_a_signal_has_prevented(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fn: Any = batched.dynamically(flush="window", timeout_ms=1e9, queue_timeout_ms=20)(
        lambda items: items
    )
    with monkeypatch.context() as patch:
        interrupting(patch, timer_thread.TimerThread, "call_at", before=True)
        with pytest.raises(Interrupt):
            fn.submit(1)
    assert isinstance(fn.submit(2).exception(BOUND), batched.QueueTimeout)
    fn.shutdown()


def test_a_worker_is_counted_once_if_a_signal_interrupts_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, fn, running = held(max_concurrent_batches=2)
    with monkeypatch.context() as patch:
        interrupting(patch, threading.Thread, "start", before=False)
        with pytest.raises(Interrupt):
            fn.submit("late")
    gate.opened.set()
    assert running.result(BOUND) == "running"
    assert fn("next") == "next"
    in_time(fn.shutdown)
    assert fn._batcher.runtime._workers == 0


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_resting_worker_ends_if_a_signal_interrupts_its_start(
    coroutine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn: Any = batched.aio.dynamically(flush="window", timeout_ms=1e9)(
        echo_coroutine if coroutine else lambda items: items
    )

    async def main() -> None:
        runtime = fn._batcher.runtime.here(current_loop())
        with monkeypatch.context() as patch:
            start = type(runtime)._start_worker

            def late(self: Any, bell: Any) -> None:
                start(self, bell)
                if threading.current_thread() is not threading.main_thread():
                    return  # no signal comes there
                if not coroutine:
                    wait_until(lambda: bell in runtime._parked)
                raise Interrupt

            patch.setattr(type(runtime), "_start_worker", late)
            with pytest.raises(Interrupt):
                fn.submit(1)
        names = {f"batched-{fn.__qualname__}-1"}
        with anyio.fail_after(BOUND):
            # the end of a thread rings no bell
            while any(thread.name in names for thread in threading.enumerate()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        eager = asyncio.wrap_future(fn.submit(2))
        await fn.aclose()
        assert await eager == 2
        assert runtime._workers == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("where", "name", "before", "answered"),
    [
        (runtime, "settle", True, False),
        (runtime, "settle", False, False),
        (wakeups.Wakeups, "add", True, False),
        (wakeups.Wakeups, "add", False, True),
        (Scheduler, "finished", True, True),
        (Scheduler, "finished", False, True),
        (wakeups.Wakeups, "wake", True, True),
        (concurrent.futures.Future, "set_result", True, True),
    ],
)
def test_a_worker_that_fails_when_a_batch_has_ended_leaves_no_caller_waiting(
    where: Any,
    name: str,
    before: bool,
    answered: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Signals are not handled in a worker, but memory may run out.

    Callers with an answer at that moment get it.
    """
    gate, fn, running = held()
    waiting = fn.submit("waiting")
    with monkeypatch.context() as patch:
        interrupting(patch, where, name, before=before)
        gate.opened.set()
        assert isinstance(waiting.exception(BOUND), batched.BatcherClosed)
        if answered:
            assert running.result(BOUND) == "running"
        else:
            assert isinstance(running.exception(BOUND), batched.BatcherClosed)
        wait_until(lambda: fn._batcher.runtime._workers == 0)
    assert fn("next") == "next"
    fn.shutdown()


def test_shutdown_waits_for_a_worker_that_answers_callers_while_another_worker_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told, go_on = threading.Event(), threading.Event()
    gate, fn, first = held(max_concurrent_batches=2)

    def slow(_: Any) -> None:
        told.set()
        assert go_on.wait(BOUND)

    first.add_done_callback(slow)
    gate.opened.set()
    assert told.wait(BOUND)
    with monkeypatch.context() as patch:
        interrupting(patch, Scheduler, "finished", before=True)
        assert fn.submit("second").result(BOUND) == "second"
        wait_until(lambda: fn._batcher.runtime._workers == 0)
    closing = threading.Thread(target=fn.shutdown, daemon=True)
    closing.start()
    wait_until(lambda: fn._batcher.runtime._closed)
    go_on.set()
    closing.join(BOUND)
    assert not closing.is_alive()


def test_a_worker_that_fails_when_its_function_is_gone_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thread._fail(None, Interrupt())
    assert not caplog.records


def test_a_worker_task_cancelled_before_it_begins_leaves_no_caller_waiting() -> None:
    fn: Any = batched.aio.dynamically(echo_coroutine)

    async def main() -> None:
        call = asyncio.ensure_future(fn(1))
        await asyncio.sleep(0)
        [worker] = [task for task in asyncio.all_tasks() if task.get_name().startswith("batched-")]
        worker.cancel()
        with pytest.raises(batched.BatcherClosed, match="before it began"):
            await asyncio.wait_for(call, BOUND)
        assert await fn(2) == 2
        await fn.aclose()

    asyncio.run(main())


def test_a_signal_while_tasks_are_woken_leaves_no_task_asleep() -> None:
    loop = asyncio.new_event_loop()
    broken = True

    class Fragile(asyncio.Future[None]):
        def set_result(self, result: None, /) -> None:
            nonlocal broken
            if broken:
                broken = False
                raise KeyboardInterrupt
            super().set_result(result)

    sleepers: list[Any] = [Fragile(loop=loop), loop.create_future()]
    wakers.wake_all(sleepers)
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(sleepers[1])
    loop.run_until_complete(asyncio.wait_for(asyncio.gather(*sleepers), BOUND))
    loop.close()


@pytest.mark.parametrize(("name", "on"), [("cancel", 1), ("cancelled", 1), ("cancelled", 2)])
def test_an_interrupted_cancellation_is_completed(
    name: str, on: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`concurrent.futures.wait` sees the cancellation, too."""
    gate, fn, running = held()
    waiting = fn.submit("waiting")
    with monkeypatch.context() as patch:
        interrupting(patch, concurrent.futures.Future, name, before=True, on=on)
        with pytest.raises(Interrupt):
            waiting.cancel()
    gate.opened.set()
    assert running.result(BOUND) == "running"
    assert not concurrent.futures.wait([waiting], BOUND).not_done
    assert waiting.cancelled()
    fn.shutdown()


def test_an_interrupted_withdrawal_of_a_call_ends_no_other_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, fn, _ = held()
    waiting = [fn.submit(i) for i in range(3)]
    request = next(iter(fn._batcher.runtime._scheduler))
    with monkeypatch.context() as patch:
        interrupting(patch, Group, "withdraw", before=True)
        with pytest.raises(Interrupt):
            fn._batcher.runtime.abandon(request)
    gate.opened.set()
    assert [future.result(BOUND) for future in waiting[1:]] == [1, 2]
    assert fn("next") == "next"
    fn.shutdown()


@pytest.mark.parametrize("way", ["submit", "cancel", "expire", "close"])
def test_a_queue_that_was_left_half_changed_is_repaired_by_any_change(way: str) -> None:
    gate, fn, running = held(queue_timeout_ms=1e6)
    waiting, other = fn.submit("waiting"), fn.submit("other")
    runtime = fn._batcher.runtime
    runtime._changing = True
    runtime._scheduler.waiting += 7
    if way == "submit":
        assert fn.submit("next").cancel()
    elif way == "cancel":
        assert other.cancel()
    elif way == "expire":
        runtime.expire()
    else:
        fn.shutdown(wait=False)
    gate.opened.set()
    assert (running.result(BOUND), waiting.result(BOUND)) == ("running", "waiting")
    fn.shutdown()
    assert (fn.stats.queue_size, fn.stats.in_flight) == (0, 0)


def test_a_resting_worker_repairs_an_interrupted_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    fn: Any = batched.dynamically(batch_size=4, flush="window", timeout_ms=1e9)(lambda items: items)
    first: Any = fn.submit(1)
    runtime: Any = fn._batcher.runtime
    wait_until(lambda: runtime._parked)
    with monkeypatch.context() as patch:
        interrupting(patch, Scheduler, "_enqueue", before=False)
        patch.setattr(CallQueue, "abandon", lambda *_: None)  # another exception broke in on it
        with pytest.raises(Interrupt):
            fn.submit(2)
    wait_until(lambda: not runtime._changing)
    fn.shutdown()
    assert first.result(BOUND) == 1
    assert (fn.stats.queue_size, fn.stats.total_processed) == (0, 2)


def test_calls_end_if_no_worker_can_be_started_now_or_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fn: Any = batched.dynamically(sorted)
    with monkeypatch.context() as patch:
        interrupting(patch, type(fn._batcher.runtime), "_start_worker", before=True)
        patch.setattr(timer_thread.timer, "_thread", None)
        patch.setattr(threading.Thread, "start", refuse_thread)
        with pytest.raises(Interrupt):
            fn.submit(1)
    assert fn._batcher.runtime._workers == 0
    assert fn.stats.queue_size == 0
    assert fn(2) == 2
    fn.shutdown()


# ---------------------------------------------------------------- callbacks


def test_a_blocking_callback_of_an_expired_call_delays_no_other_batcher() -> None:
    fn: Any = batched.dynamically(flush="window", timeout_ms=1e9, queue_timeout_ms=10)(
        lambda items: items
    )
    other = fn.with_options()
    retried = threading.Event()

    def retry(_: Any) -> None:
        with pytest.raises(batched.QueueTimeout):
            fn("retry")
        retried.set()

    future = fn.submit("first")
    future.add_done_callback(retry)
    assert isinstance(future.exception(BOUND), batched.QueueTimeout)
    assert isinstance(other.submit("other").exception(BOUND), batched.QueueTimeout)
    assert retried.wait(BOUND)
    fn.shutdown()
    other.shutdown()


def test_callbacks_of_expired_calls_run_even_if_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fn: Any = batched.dynamically(flush="window", timeout_ms=1e9, queue_timeout_ms=10)(
        lambda items: items
    )
    assert isinstance(fn.submit("first").exception(BOUND), batched.QueueTimeout)
    called = threading.Event()
    future = fn.submit("second")
    future.add_done_callback(lambda _: called.set())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        assert called.wait(BOUND)
    fn.shutdown()


def test_a_caller_that_gets_room_is_woken_before_callbacks_run() -> None:
    gate, fn, running = held(max_queue_size=1)
    waiting, got_room, in_time = fn.submit("waiting"), threading.Event(), []
    waiting.add_done_callback(lambda _: in_time.append(got_room.wait(BOUND)))

    def submit() -> None:
        fn.submit("late")
        got_room.set()

    thread = threading.Thread(target=submit, daemon=True)
    thread.start()
    wait_until(lambda: fn.stats.blocked == 1)
    assert waiting.cancel()
    assert in_time == [True]
    gate.opened.set()
    assert running.result(BOUND) == "running"
    fn.shutdown()


@pytest.mark.parametrize("closing", ["shutdown", "aclose"])
def test_closing_with_prefetch_waits_until_all_callers_are_answered(closing: str) -> None:
    called, release = threading.Event(), threading.Event()

    fn: Any = batched.dynamically(prefetch=1, batch_size=2, flush="window", timeout_ms=1e9)(
        lambda items: items
    )

    def slow(_: Any) -> None:
        called.set()
        assert release.wait(BOUND)

    first, second = fn.submit(1), fn.submit(2)
    first.add_done_callback(slow)
    assert called.wait(BOUND)

    def close() -> Any:
        if closing == "shutdown":
            fn.shutdown()
        else:
            asyncio.run(fn.aclose())
        return second.done()

    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(close)
        wait_until(lambda: fn._batcher.runtime._workers == 0)
        assert not closed.done()
        release.set()
        assert closed.result(BOUND)


# ---------------------------------------------------------------- forks


@needs_fork
@pytest.mark.parametrize("ending", ["expiry", "shutdown", "cancel"])
def test_calls_end_in_a_child_that_is_forked_before_they_are_answered(
    ending: str,
) -> None:
    """During the fork, another thread runs the callback of the first call."""
    done = python(
        f"""
        import concurrent.futures, os, threading, batched
        ending = {ending!r}

        queue_timeout_ms = 50 if ending == "expiry" else None

        @batched.dynamically(flush="window", timeout_ms=1e9, queue_timeout_ms=queue_timeout_ms)
        def fn(items):
            return items

        telling, forked = threading.Event(), threading.Event()

        parent = os.getpid()

        def callback(_):
            telling.set()
            if os.getpid() == parent:
                forked.wait(10)

        futures = [fn.submit(i) for i in range(4)]
        for future in futures:
            future.add_done_callback(callback)
        if ending == "shutdown":
            threading.Thread(target=lambda: fn.shutdown(cancel_futures=True)).start()
        elif ending == "cancel":
            threading.Thread(target=futures[0].cancel).start()
        assert telling.wait(10)
        child = os.fork()
        if not child:
            forked.set()
            for future in futures:
                try:
                    future.exception(5)
                except concurrent.futures.CancelledError:
                    pass
            with fn:
                eager = fn.with_options(flush="eager", queue_timeout_ms=None)
                os._exit(0 if eager("child") == "child" else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        forked.set()
        fn.shutdown(cancel_futures=True)
        assert status == 0, status
        """
    )
    assert done.returncode == 0, done.stderr


@needs_fork
def test_a_batcher_that_cannot_be_renewed_in_a_child_affects_no_other_batcher() -> None:
    done = python(
        """
        import os, batched

        @batched.dynamically(name="broken")
        def broken(items):
            return items

        others = [broken.with_options() for _ in range(5)]
        assert [fn(1) for fn in (others[0], broken, *others)] == [1] * 7

        def fail(*args, **kwargs):
            raise MemoryError

        broken._batcher.runtime.abort = fail
        child = os.fork()
        if not child:
            os._exit(0 if [fn(2) for fn in others] == [2] * 5 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )
    assert done.returncode == 0, done.stderr
    assert "broken may not work in the forked process" in done.stderr


# ---------------------------------------------------------------- wake-ups


def test_a_cancelled_waiter_does_not_prevent_the_next_waiter_from_waking() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        gone, there = loop.create_future(), loop.create_future()
        gone.cancel()
        wakers._wake_each(loop, [gone, there])
        assert there.done()

    asyncio.run(main())
