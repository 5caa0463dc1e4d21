"""Answers of calls that end, while plausible user code is hostile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import batched
from batched._runtime.wakers import Future, wait
from stage import BOUND, held, in_time, wait_until


def test_a_done_callback_may_raise_anything(caplog: pytest.LogCaptureFixture) -> None:
    gate, fn, running = held()
    futures = [running, *(fn.submit(number) for number in range(3))]

    def callback(_: object) -> None:
        raise SystemExit("from a callback")

    for future in futures[:2]:
        future.add_done_callback(callback)
    assert futures[1].cancel()
    assert concurrent.futures.wait([futures.pop(1)], timeout=0).done
    gate.opened.set()
    assert [future.result(BOUND) for future in futures] == ["running", 1, 2]
    assert fn(4) == 4
    assert caplog.text.count("callback of a future") == 2
    fn.shutdown()


def test_a_task_that_comes_to_a_done_future_is_woken() -> None:
    future: Future[int] = Future()
    future.set_result(7)

    async def come() -> bool:
        return await wait(future.new_waker(asyncio.get_running_loop()), BOUND)

    assert asyncio.run(come())


@pytest.mark.parametrize("end", ["fails", "is cancelled"])
def test_a_task_that_awaits_a_call_whose_preparation_ends_it_is_woken(end: str) -> None:
    gate = threading.Event()

    def prepare(item: int) -> int:
        assert gate.wait(BOUND)
        raise ValueError(item)

    fn = batched.dynamically(prepare=prepare)(sorted)

    async def main() -> None:
        future = fn.submit(1)
        waiting = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        error = ValueError if end == "fails" else concurrent.futures.CancelledError
        if end == "is cancelled":
            assert future.cancel()
        gate.set()
        with pytest.raises(error):
            await asyncio.wait_for(waiting, BOUND)

    asyncio.run(main())


@pytest.mark.parametrize("trio", [None, types.ModuleType("half imported")])
def test_calls_succeed_without_a_whole_trio(trio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trio", trio)
    fn: Any = batched.dynamically(lambda items: items)
    afn: Any = batched.aio.dynamically(lambda items: items)
    assert fn(1) == 1
    assert asyncio.run(fn.acall(2)) == 2
    assert asyncio.run(afn(3)) == 3


def test_a_callback_may_wait_for_a_shutdown() -> None:
    fn: Any = batched.dynamically(flush="window", timeout_ms=1e9)(lambda items: items)
    future = fn.submit(1)
    future.add_done_callback(lambda _: fn.shutdown())
    in_time(lambda: fn.shutdown(cancel_futures=True))
    assert future.cancelled()


def test_a_slow_callback_delays_no_other_caller_of_its_batch() -> None:
    release = threading.Event()
    gate, fn, _ = held(batch_size=2)
    fn.submit("slow").add_done_callback(lambda _: release.wait(BOUND))
    with ThreadPoolExecutor(1) as thread:
        plain = thread.submit(fn, "plain")
        wait_until(lambda: fn.stats.queue_size == 2)
        gate.opened.set()
        assert plain.result(BOUND / 2) == "plain"
    release.set()
    fn.shutdown()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("way", ["call", "submit", "map", "broken map", "acall", "aio"])
def test_a_failed_call_leaves_no_garbage(way: str) -> None:
    class Item:
        pass

    def fail(items: list[Any]) -> list[Any]:
        raise ValueError

    async def fail_async(items: list[Any]) -> list[Any]:
        raise ValueError

    def broken(item: Any) -> Iterator[Any]:
        yield item
        raise ValueError

    fn: Any = batched.aio.dynamically(fail_async) if way == "aio" else batched.dynamically(fail)
    ways: dict[str, Callable[[Any], Any]] = {
        "call": fn,
        "submit": lambda item: fn.submit(item).result(BOUND),
        "map": lambda item: list(fn.map([item] * 50)),
        "broken map": lambda item: list(fn.map(broken(item), return_exceptions=True)),
    }

    def attempt() -> weakref.ref[Item]:
        item = Item()

        async def awaited() -> None:
            with pytest.raises(ValueError):
                await fn.acall(item)

        if way in ("acall", "aio"):
            asyncio.run(awaited())
        else:
            with pytest.raises(ValueError):
                ways[way](item)
        return weakref.ref(item)

    ref = attempt()
    wait_until(lambda: ref() is None)


def test_a_result_may_raise_on_every_access_to_an_attribute() -> None:
    class Lazy:
        """A proxy whose target is gone."""

        def __getattribute__(self, name: str) -> Any:
            raise ReferenceError(name)

    fn: Any = batched.dynamically(lambda items: [Lazy() for _ in items])
    for result in (fn(1), *fn([1, 2])):
        assert type(result) is Lazy
    assert fn.stats.errors == 0


def test_map_reports_a_shutdown_as_batcher_closed() -> None:
    fn: Any = batched.dynamically(flush="window", timeout_ms=1e9)(lambda items: items)

    def source() -> Iterator[int]:
        yield 1
        fn.shutdown(wait=False, cancel_futures=True)

    [error] = fn.map(source(), return_exceptions=True)
    assert type(error) is batched.BatcherClosed
    with pytest.raises(batched.BatcherClosed):
        list(fn.map([2], return_exceptions=True))
