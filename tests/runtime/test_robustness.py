"""Hostile but plausible user code that broke earlier versions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import batched
from batched._runtime.async_backend import is_over
from stage import (
    BOUND,
    Gate,
    call_with_little_stack,
    echo_coroutine,
    held,
    in_time,
    wait_until,
    whole_stack,
)


def echo(items: list[Any]) -> list[Any]:
    return items


@pytest.mark.parametrize(
    "module", [None, types.ModuleType("trio")], ids=["blocked", "half imported"]
)
def test_calls_succeed_while_trio_is_blocked_or_half_imported(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trio", module)
    fn: Any = batched.dynamically(echo)
    afn: Any = batched.aio.dynamically(echo)
    assert fn(1) == 1
    assert asyncio.run(fn.acall(2)) == 2
    assert asyncio.run(afn(3)) == 3


@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize("attribute", [None, object()], ids=["half imported", "mocked"])
def test_calls_succeed_while_an_array_library_is_half_imported_or_mocked(
    name: str, attribute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType(name)
    if attribute is not None:
        vars(module).update(ndarray=attribute, void=attribute, Tensor=attribute)
    monkeypatch.setitem(sys.modules, name, module)
    gate = Gate()
    fn: Any = batched.dynamically(gate)
    futures = [fn.submit(i) for i in range(4)]
    gate.opened.set()
    assert [future.result(BOUND) for future in futures] == [0, 1, 2, 3]


def _raising(error: type[BaseException]) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@whole_stack
def test_a_batcher_serves_calls_after_calls_at_the_end_of_the_stack() -> None:
    fn: Any = batched.dynamically(echo)
    assert fn(1) == 1
    for spare in range(2, 40):
        with contextlib.suppress(RecursionError, batched.BatcherClosed):
            assert call_with_little_stack(spare, lambda: fn(2)) == 2
        assert fn.submit(3).result(BOUND) == 3
    fn.shutdown()


def test_a_callback_may_wait_for_a_shutdown() -> None:
    fn: Any = batched.dynamically(flush="window", timeout_ms=1e9)(echo)
    future = fn.submit(1)
    future.add_done_callback(lambda _: fn.shutdown())
    in_time(lambda: fn.shutdown(cancel_futures=True))
    assert future.cancelled()


def test_a_slow_callback_delays_no_other_caller_of_its_batch() -> None:
    release = threading.Event()
    gate, fn, busy = held(batch_size=2)
    slow = fn.submit("slow")
    slow.add_done_callback(lambda _: release.wait(BOUND))
    answers: list[str] = []
    caller = threading.Thread(target=lambda: answers.append(fn("plain")))
    caller.start()
    wait_until(lambda: fn.stats.queue_size == 2)
    gate.opened.set()
    caller.join(BOUND)
    assert answers == ["plain"]
    release.set()
    assert busy.result(BOUND) == "running"
    fn.shutdown()


def test_a_class_may_be_an_item_of_its_own_static_method() -> None:
    class Registry:
        @staticmethod
        @batched.dynamically
        def name(items: list[type]) -> list[str]:
            return [item.__name__ for item in items]

    assert Registry.name(Registry) == "Registry"


def test_a_refused_call_starts_no_thread() -> None:
    fn: Any = batched.dynamically(name="refused")(echo)
    fn.shutdown()
    for _ in range(3):
        with pytest.raises(batched.BatcherClosed):
            fn(1)
    assert not any("refused" in thread.name for thread in threading.enumerate())


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
    """Lazy objects load their target on access to `__class__`, and fail if the target is gone."""

    class Lazy:
        def __getattribute__(self, name: str) -> Any:
            raise ReferenceError(f"it is gone, and so is its {name}")

    def work(items: list[Any]) -> list[Any]:
        return [Lazy() if item == 1 else [] if item == 2 else item for item in items]

    fn: Any = batched.dynamically(work)
    for item in (1, [1], [0, 1, 2]):
        result = fn(item)
        assert (
            type(result[-2] if item == [0, 1, 2] else result[0] if item == [1] else result) is Lazy
        )
    assert fn.stats.errors == 0
    fn.shutdown()


def test_map_reports_a_shutdown_as_batcher_closed() -> None:
    gate = Gate()
    fn: Any = batched.dynamically(batch_size=1)(gate)
    results: Iterator[Any] = fn.map(range(3), return_exceptions=True)
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.extend(results))
    thread.start()
    wait_until(lambda: fn.stats.queue_size == 2)
    fn.shutdown(wait=False, cancel_futures=True)
    gate.opened.set()
    thread.join(BOUND)
    assert seen[0] == 0
    assert [type(each) for each in seen[1:]] == [batched.BatcherClosed] * 2


def test_a_cancelled_future_is_done_even_if_its_callback_raises() -> None:
    gate, fn, running = held()
    future = fn.submit(2)
    future.add_done_callback(_raising(SystemExit))
    assert future.cancel(), "errors of callbacks are logged"
    assert concurrent.futures.wait([future], timeout=0).done == {future}
    gate.opened.set()
    assert running.result(BOUND) == "running"


def test_shutdown_and_futures_end_when_the_loop_stops() -> None:
    started = threading.Event()

    @batched.aio.dynamically
    async def never(items: list[int]) -> list[int]:
        started.set()
        await asyncio.get_running_loop().create_future()
        return items

    loop = asyncio.new_event_loop()
    futures: list[Any] = []
    stop = asyncio.Event()

    async def main() -> None:
        futures.append(never.submit(1))
        await stop.wait()

    runner = threading.Thread(target=lambda: loop.run_until_complete(main()))
    runner.start()
    assert started.wait(BOUND)
    closer = threading.Thread(target=never.shutdown)
    closer.start()
    loop.call_soon_threadsafe(stop.set)
    for thread in (runner, closer):
        thread.join(BOUND)
        assert not thread.is_alive()
    assert isinstance(futures[0].exception(BOUND), batched.BatcherClosed)
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_a_future_ends_when_the_loop_is_closed() -> None:
    started = threading.Event()

    @batched.aio.dynamically
    async def held(items: list[int]) -> list[int]:
        started.set()
        await asyncio.get_running_loop().create_future()
        return items

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)

    async def main() -> Any:
        future = held.submit(1)
        await asyncio.to_thread(started.wait, BOUND)
        return future

    future = loop.run_until_complete(main())
    with pytest.raises(TimeoutError):
        future.result(0.01)
    loop.run_until_complete(loop.shutdown_default_executor())
    tasks = asyncio.all_tasks(loop)
    loop.close()
    assert isinstance(future.exception(BOUND), batched.BatcherClosed)
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # left pending on purpose
    del tasks


def test_a_plain_with_closes_a_batcher_on_a_loop_once_its_calls_are_answered() -> None:
    fn: Any = batched.aio.dynamically(echo_coroutine)

    async def main() -> None:
        for _ in range(2):
            with fn:
                assert await fn(1) == 1
        with pytest.raises(batched.BatcherClosed):
            await fn(1)
        with fn:
            waiting = fn.submit(2)
            with pytest.raises(RuntimeError, match="aclose"):
                fn.shutdown()
            assert await asyncio.wrap_future(waiting) == 2
            assert await fn(3) == 3, "a refused shutdown closes nothing"

    asyncio.run(main())


def test_a_function_on_a_thread_may_close_its_batcher_as_a_coroutine() -> None:
    @batched.dynamically
    def fn(items: list[int]) -> list[int]:
        asyncio.run(fn.aclose())
        return items

    assert fn(1) == 1
    with pytest.raises(batched.BatcherClosed):
        fn(2)


def test_shutdown_waits_for_a_loop_that_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    glances = 0

    def glance(loop: object) -> bool:
        nonlocal glances
        glances += 1
        return is_over(loop)

    monkeypatch.setattr("batched._runtime.call_queue.POLL_INTERVAL", 0.001)
    monkeypatch.setattr("batched._runtime.call_queue.is_over", glance)

    async def main() -> int:
        gate = asyncio.Event()

        @batched.aio.dynamically
        async def fn(items: list[int]) -> list[int]:
            await gate.wait()
            return items

        future = fn.submit(7)
        closing = asyncio.ensure_future(asyncio.to_thread(fn.shutdown))
        while glances < 3:  # noqa: ASYNC110  # another thread counts
            await asyncio.sleep(0.001)
        assert not closing.done()
        gate.set()
        await closing
        return future.result()

    assert asyncio.run(main()) == 7
