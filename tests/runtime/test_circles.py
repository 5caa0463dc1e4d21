"""Batched functions that wait for each other: a wait that might never end is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any

import anyio
import pytest

import batched
from batched._runtime.waits import Pool, check_wait, enter_worker
from stage import BOUND, LOOPS, held

WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "call": lambda fn, item: fn(item),
    "list call": lambda fn, item: fn([item])[0],
    "acall": lambda fn, item: asyncio.run(fn.acall(item)),
    # a future may be done at once, except where a function waits for itself
    "result": lambda fn, item: fn.submit(item).result(),
    "map": lambda fn, item: next(fn.map([item])),
}


def circle(length: int, way: str = "call") -> list[Any]:
    """Return functions, each of which calls the next one for as many steps as its item says."""
    fns: list[Any] = []
    for number in range(length):

        @batched.dynamically(name=f"fn{number}", max_concurrent_batches=number + 1)
        def fn(items: list[int], number: int = number) -> list[Any]:
            following = fns[(number + 1) % length]
            return [WAYS[way](following, item - 1) if item else 0 for item in items]

        fns.append(fn)
    return fns


@pytest.mark.parametrize("way", WAYS)
def test_a_function_that_waits_for_itself_is_told_so(way: str) -> None:
    [fn] = circle(1, way)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"fn0 is called from within its own batch, .*"):
            fn(1)
    assert fn(0) == 0
    fn.shutdown()


@pytest.mark.parametrize("way", ["call", "list call", "acall"])
def test_a_circle_of_functions_is_told_so_whatever_the_timing(way: str) -> None:
    fns = circle(3, way)
    assert fns[0](2) == 0, "a chain that ends is no circle"
    for steps, fn in ((3, fns[0]), (1, fns[-1])):  # it never waits again for the first one
        with pytest.raises(RuntimeError, match=r"fn0 is .* a batch of fn2, .* itself"):
            fn(steps)
    for fn in fns:
        fn.shutdown()


def test_of_two_waits_that_close_a_circle_at_the_same_moment_one_is_refused() -> None:
    looked = threading.Barrier(2)

    class Watched(Pool):
        def reaches(self, other: Pool) -> bool:
            found = super().reaches(other)
            with suppress(threading.BrokenBarrierError):  # the other one has to wait
                looked.wait(0.1)
            return found

    def is_accepted(worker: Pool, pool: Pool) -> bool:
        enter_worker(worker, thread=True)
        try:
            check_wait(pool)
        except RuntimeError:
            return False
        return True

    one, two = Watched("one", 1), Watched("two", 1)
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(is_accepted, *pools) for pools in ((one, two), (two, one))]
    assert sum(wait.result() for wait in waits) == 1


@pytest.mark.parametrize("run", LOOPS)
def test_a_circle_through_a_loop_is_told_so(run: Any) -> None:
    @batched.aio.dynamically(name="one")
    async def one(items: list[int]) -> list[Any]:
        return [await two.acall(item - 1) if item else 1 for item in items]

    @batched.aio.dynamically(name="two")
    async def two(items: list[int]) -> list[Any]:
        return [await three.submit(item - 1) if item else 2 for item in items]

    @batched.aio.dynamically(name="three")  # runs in a thread
    def three(items: list[int]) -> list[Any]:
        return [run(one, item - 1) if item else 3 for item in items]

    async def main() -> None:
        with anyio.fail_after(BOUND):
            assert await one(2) == 3
            assert await one(3) == 1, "each loop has a queue of its own"
            with pytest.raises(RuntimeError, match="three is called from within a batch of two"):
                await one(5)
            for fn in (one, two, three):
                await fn.aclose()

    run(main)


def test_calls_that_are_only_started_and_waits_with_a_limit_are_no_circle() -> None:
    later: list[Any] = []

    @batched.dynamically(batch_size=1, max_queue_size=1)
    def fn(items: list[int]) -> list[int]:
        later.extend(fn.submit(item - 1) for item in items if item)
        if items == [3]:
            with pytest.raises(TimeoutError):
                later[0].result(0.001)
        return items

    assert fn(3) == 3
    while later:
        later.pop().result(BOUND)
    fn.shutdown()


def test_work_that_a_run_starts_belongs_to_it_unless_its_context_is_empty() -> None:
    with ThreadPoolExecutor(1) as pool:

        @batched.dynamically
        def fn(items: list[Any]) -> list[Any]:
            return [pool.submit(each().run, fn, 1) if each != 1 else 1 for each in items]

        assert fn(Context).result(BOUND) == 1
        with pytest.raises(RuntimeError, match=r"in an empty contextvars\.Context"):
            fn(copy_context).result(BOUND)
    fn.shutdown()


def test_a_task_that_a_callback_starts_may_call_the_function() -> None:
    gate = threading.Event()
    fn = batched.dynamically(lambda items: items if gate.wait(BOUND) else [])

    async def main() -> Any:
        loop, started = asyncio.get_running_loop(), Future[Any]()

        def start(_: object) -> None:
            started.set_result(asyncio.run_coroutine_threadsafe(fn.acall(2), loop))

        fn.submit(1).add_done_callback(start)
        gate.set()
        return await asyncio.wrap_future(await asyncio.wrap_future(started))

    assert asyncio.run(main()) == 2
    fn.shutdown()


def test_a_callback_on_the_worker_cannot_wait_for_that_worker() -> None:
    gate, fn, running = held()
    refused: list[bool] = []

    def callback(_: object) -> None:
        with pytest.raises(RuntimeError, match="would wait for itself"):
            fn(2)
        fn.shutdown()  # returns at once
        refused.append(True)

    running.add_done_callback(callback)
    gate.opened.set()
    fn.shutdown()
    assert refused == [True]
