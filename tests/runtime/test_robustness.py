"""Hostile but plausible user code that broke earlier versions."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import batched
from stage import BOUND, held, in_time, wait_until


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
    for result in (fn(1), *fn([1]), fn([0, 1, 2])[1]):
        assert type(result) is Lazy
    assert fn.stats.errors == 0
    fn.shutdown()


def test_map_reports_a_shutdown_as_batcher_closed() -> None:
    fn: Any = batched.dynamically(flush="window", timeout_ms=1e9)(echo)

    def source() -> Iterator[int]:
        yield 1
        fn.shutdown(wait=False, cancel_futures=True)

    [error] = fn.map(source(), return_exceptions=True)
    assert type(error) is batched.BatcherClosed
    with pytest.raises(batched.BatcherClosed):
        list(fn.map([2], return_exceptions=True))
