"""Finalizers and signal handlers that call the batcher they break in on: Python runs them anywhere,
also under a lock.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import batched
from batched._core.linger import NEVER
from batched._core.scheduler import Scheduler
from batched._runtime.runtime import Runtime
from batched._runtime.thread import ThreadRuntime
from stage import BOUND, echo_coroutine, held, in_time, python, wait_until


def breaking_in(
    monkeypatch: pytest.MonkeyPatch,
    fn: Any,
    name: str,
    act: Callable[[], object],
    of: type = Scheduler,
) -> list[Any]:
    """Call `act` once in the midst of the method `name` for `fn`, under the lock.

    The list that is returned gets its result or its error.
    """
    method = getattr(of, name)
    policy = fn._function.options.policy
    came: list[Any] = []

    def broken_in_on(*args: Any, **kwargs: Any) -> Any:
        # calls of an earlier test may still be ended by the garbage collector
        if not came and args[0].policy is policy:
            came.append(None)
            try:
                came[0] = act()
            except Exception as error:
                came[0] = error
        return method(*args, **kwargs)

    monkeypatch.setattr(of, name, broken_in_on)
    return came


@pytest.mark.parametrize("where", ["submit", "_enqueue", "take", "_learn", "finished"])
def test_a_finalizer_may_submit_under_the_lock(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn: Any = batched.dynamically(batch_size=2)(lambda items: [item * 2 for item in items])
    came = breaking_in(monkeypatch, fn, where, lambda: fn.submit(21))
    assert in_time(lambda: fn(1)) == 2
    wait_until(lambda: came not in ([], [None]))  # the worker may break in after it has answered
    assert came[0].result(BOUND) == 42
    in_time(fn.shutdown)
    assert (fn.stats.calls, fn.stats.queue_size) == (2, 0)


def test_a_finalizer_may_cancel_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    fn: Any = batched.dynamically(batch_size=4, flush="window", timeout_ms=1e9)(lambda items: items)
    first, second = fn.submit(1), fn.submit(2)
    came = breaking_in(monkeypatch, fn, "submit", second.cancel)
    third = in_time(lambda: fn.submit(3))
    assert came == [False], "not yet"
    wait_until(second.cancelled)
    others = in_time(lambda: [fn.submit(4), fn.submit(5)])
    assert [future.result(BOUND) for future in (first, third, *others)] == [1, 3, 4, 5]
    in_time(fn.shutdown)


def test_a_finalizer_may_begin_the_time_of_an_item_under_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fn: Any = batched.dynamically(flush="window", timeout_ms=1e9, queue_timeout_ms=1e6)(
        lambda items: items
    )
    first = fn.submit(1)
    came = breaking_in(monkeypatch, fn, "submit", lambda: first.count_wait(False))
    second = in_time(lambda: fn.submit(2))
    assert came == [None]
    second.count_wait(False)
    wait_until(lambda: fn._batcher.runtime._scheduler.next_expiry() == NEVER)
    in_time(fn.shutdown)
    assert first.result(BOUND) == 1


@pytest.mark.parametrize("wait", [True, False])
def test_a_finalizer_may_close_and_open_under_the_lock(
    wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn: Any = batched.dynamically(lambda items: items)
    with monkeypatch.context() as patch:
        came = breaking_in(patch, fn, "take", lambda: fn.shutdown(wait=wait))
        assert in_time(lambda: fn(1)) == 1
        assert came == [None]

    def is_closed() -> bool:
        try:
            return fn.submit(2).result(BOUND) is None
        except batched.BatcherClosed:
            return True

    wait_until(is_closed)
    fn.__enter__()
    assert in_time(lambda: fn(2)) == 2
    wait_until(lambda: fn._batcher.runtime._parked)
    with monkeypatch.context() as patch:
        came = breaking_in(patch, fn, "_look", fn.__enter__, of=Runtime)
        in_time(fn.shutdown)
        assert came == [fn]
    wait_until(lambda: not fn._batcher.runtime._closed)
    assert in_time(lambda: fn(3)) == 3
    in_time(fn.shutdown)


def test_an_item_that_a_finalizer_submits_under_the_lock_fails_after_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fn: Any = batched.dynamically(lambda items: items)
    assert in_time(lambda: fn(0)) == 0
    wait_until(lambda: fn._batcher.runtime._parked)
    came = breaking_in(monkeypatch, fn, "_look", lambda: fn.submit(1), of=Runtime)
    in_time(fn.shutdown)
    assert isinstance(came[0].exception(BOUND), batched.BatcherClosed)


@pytest.mark.parametrize("way", ["call", "list", "map", "result"])
def test_a_finalizer_that_would_wait_under_the_lock_is_told_so(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn: Any = batched.dynamically(lambda items: items)
    ways: dict[str, Callable[[], Any]] = {
        "call": lambda: fn(1),
        "list": lambda: fn([1, 2]),
        "map": lambda: list(fn.map([1, 2])),
        "result": lambda: fn.submit(1).result(),
    }
    came = breaking_in(monkeypatch, fn, "submit", ways[way])
    assert in_time(lambda: fn(1)) == 1
    assert isinstance(came[0], RuntimeError)
    assert (
        "called by a finalizer or a signal handler that interrupted it, and would wait for itself"
        in str(came[0])
    )
    in_time(fn.shutdown)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_finalizer_may_submit_and_cancel_on_a_loop(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    anyio = pytest.importorskip("anyio")

    @batched.aio.dynamically
    async def fn(items: list[int]) -> list[int]:
        await anyio.lowlevel.checkpoint()
        return [item * 2 for item in items]

    async def main() -> None:
        with anyio.fail_after(BOUND):
            came = breaking_in(monkeypatch, fn, "submit", lambda: fn.submit(21))
            assert await fn(1) == 2
            while not came[0].done():
                await anyio.sleep(0.001)
            assert came[0].result() == 42
            await fn.aclose()

    anyio.run(main, backend=backend)


def test_a_finalizer_in_another_thread_may_cancel_a_future_of_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fn: Any = batched.aio.dynamically(flush="window", timeout_ms=1e9)(echo_coroutine)

    async def main() -> None:
        futures = [fn.submit(item) for item in range(3)]
        came = breaking_in(monkeypatch, fn, "cancel", futures[1].cancel)
        assert await asyncio.to_thread(futures[0].cancel)
        await asyncio.wait({asyncio.wrap_future(futures[1])}, timeout=BOUND)
        assert (came, futures[1].cancelled()) == ([False], True)
        await asyncio.wait_for(fn.aclose(), BOUND)
        assert await asyncio.wrap_future(futures[2]) == 2

    asyncio.run(main())


@pytest.mark.parametrize("act", ["shutdown", "call"])
def test_a_finalizer_in_a_worker_between_batches_does_not_wait_for_itself(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn: Any = batched.dynamically(lambda items: items)
    way = fn.shutdown if act == "shutdown" else lambda: fn(1)
    came = breaking_in(
        monkeypatch, fn, "_leave" if act == "shutdown" else "_take", way, ThreadRuntime
    )
    assert in_time(lambda: fn(2)) == 2
    in_time(fn.shutdown)
    wait_until(lambda: came != [None] or act == "shutdown")
    assert came == [None] or "would wait for itself" in str(came[0])


@pytest.mark.parametrize("act", ["shutdown", "call"])
def test_the_finalizer_of_an_item_does_not_wait_for_its_own_batch(act: str) -> None:
    gate = threading.Event()
    came: list[Any] = []

    @batched.dynamically
    def fn(items: list[Any]) -> list[None]:
        assert gate.wait(BOUND)
        return [None for _ in items]

    class Item:
        def __del__(self) -> None:
            outcome = ""
            try:
                if act == "shutdown":
                    fn.shutdown()
                else:
                    fn(1)
            except RuntimeError as error:
                outcome = str(error)
            came.append((threading.current_thread().name, outcome))

    future = fn.submit(Item())  # from now on the batch alone has it
    gate.set()
    assert future.result(BOUND) is None
    wait_until(lambda: bool(came))
    name, outcome = came[0]
    assert "batched" in name
    assert not outcome if act == "shutdown" else "would wait for itself" in outcome
    in_time(fn.shutdown)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no such timers")
def test_a_signal_handler_may_submit_and_close() -> None:
    done = python(
        """
        import itertools, signal, sys, threading, time
        import batched

        # the tracer of coverage has a lock of its own, and the handler would wait for those who
        # wait for that
        sys.settrace(None)
        threading.settrace(None)

        fn = batched.dynamically(batch_size=4)(lambda items: items)
        numbers, futures = itertools.count(), {}

        def handler(*_):
            number = next(numbers)
            futures[number] = fn.submit(number)
            signal.setitimer(signal.ITIMER_REAL, 0.0005)  # the next one, never in this one

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        end = time.monotonic() + 2
        while time.monotonic() < end:
            fn.submit(1).cancel()
        signal.signal(signal.SIGALRM, lambda *_: None)
        right = [future.result(10) == number for number, future in list(futures.items())]
        print(len(futures) > 100, all(right))
        signal.signal(signal.SIGALRM, lambda *_: fn.shutdown(wait=False))
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        while True:
            try:
                fn.submit(1).cancel()
            except batched.BatcherClosed:
                break
        fn.shutdown()
        """,
        timeout=60,
    )
    assert done.stdout == "True True\n", done.stdout + done.stderr


def test_cancelled_calls_behind_a_large_one_keep_no_items() -> None:
    class Item:
        pass

    async def cancelled(item: Item) -> None:
        task = asyncio.ensure_future(fn.acall(item))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    gate, fn, _ = held()
    large = threading.Thread(target=fn, args=(list(range(100)),))
    large.start()
    wait_until(lambda: fn.stats.queue_size == 100)
    refs = []
    for _ in range(5):
        items = [Item(), Item()]
        refs += [weakref.ref(item) for item in items]
        assert fn.submit(items[0]).cancel()
        asyncio.run(cancelled(items[1]))
        del items
    gc.collect()
    assert [ref() for ref in refs] == [None] * 10
    gate.opened.set()
    large.join(BOUND)
    fn.shutdown()
