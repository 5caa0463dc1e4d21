"""One batcher, many event loops: at once, one after another, closed; and threads beside them."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import anyio.lowlevel
import pytest
import trio

import batched
from batched._runtime.async_backend import current_task, is_cell
from stage import BOUND, LOOPS, Turnstile, echo_coroutine, in_time, wait_until

uvloop: Any = pytest.importorskip("uvloop", reason="uvloop does not exist for Windows")


def plain(items: list[int]) -> list[int]:
    return [2 * item for item in items]


async def coroutine(items: list[int]) -> list[int]:
    await anyio.lowlevel.checkpoint()
    return [2 * item for item in items]


makers = pytest.mark.parametrize(
    "make",
    [
        lambda: batched.dynamically(plain),
        lambda: batched.aio.dynamically(plain),
        lambda: batched.aio.dynamically(coroutine),
    ],
)
loops = pytest.mark.parametrize("run", LOOPS)
HELD: dict[str, Any] = {"batch_size": 2, "flush": "window", "timeout_ms": 1e9}
"""Settings of a queue that holds an item until there is another one."""


@makers
def test_one_loop_after_another(make: Callable[[], Any]) -> None:
    """Nothing is kept of a loop that is gone."""
    fn = make()

    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        assert await fn.acall([1, 2]) == [2, 4]
        return weakref.ref(asyncio.get_running_loop())

    refs = [run(main()) for run in (asyncio.run, asyncio.run, uvloop.run)]
    trio.run(fn.acall, 1)
    queues = getattr(fn._batcher.runtime, "_runtimes", ())  # of a coroutine function
    # tasks of other loops may end in a first collection, and hold these until then
    wait_until(lambda: gc.collect() >= 0 and not (len(queues) or any(ref() for ref in refs)))
    assert (fn.stats.calls, fn.stats.total_processed) == (4, 7)


@makers
def test_many_loops_at_once_in_many_threads(make: Callable[[], Any]) -> None:
    fn = make()

    async def main() -> Any:
        return await asyncio.gather(*map(fn.acall, range(50)))

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(asyncio.run, main()) for _ in range(16)]
        assert [future.result(BOUND) for future in futures] == [[*range(0, 100, 2)]] * 16
    assert fn.stats.total_processed == 16 * 50


def test_threads_asyncio_uvloop_and_trio_share_one_batcher() -> None:
    turnstile = Turnstile()
    fn: Any = batched.dynamically(turnstile)

    async def once(item: int) -> Any:
        return await fn.acall(item)

    with ThreadPoolExecutor(5) as pool:
        futures = [pool.submit(fn, 0)]
        wait_until(lambda: len(turnstile.batches) == 1)
        futures.append(pool.submit(fn, 1))
        futures.append(pool.submit(asyncio.run, once(2)))
        futures.append(pool.submit(uvloop.run, once(3)))
        futures.append(pool.submit(trio.run, once, 4))
        wait_until(lambda: fn.stats.queue_size == 4)
        turnstile.let_through(2)
        assert [future.result(BOUND) for future in futures] == [0, 1, 2, 3, 4]
    assert [len(batch) for batch in turnstile.batches] == [1, 4]


def test_the_task_of_a_loop_that_is_gone_may_be_closed_between_the_tasks_of_trio() -> None:
    found: list[object] = []

    class Instrument(trio.abc.Instrument):
        def before_io_wait(self, timeout: float) -> None:
            found.append(current_task())

    trio.run(trio.sleep, 0, instruments=[Instrument()])
    assert found
    assert not any(found)


def test_a_coroutine_function_cannot_be_called_where_no_loop_runs() -> None:
    fn = batched.aio.dynamically(coroutine)
    with pytest.raises(RuntimeError, match="event loop"):
        fn.submit(1)
    with pytest.raises(RuntimeError, match="event loop"):
        fn(1).send(None)


def test_blocking_the_loop_that_must_answer_raises_instead_of_hanging() -> None:
    fn = batched.aio.dynamically(coroutine)

    async def main() -> None:
        future = fn.submit(1)
        for blocking in (future.result, future.exception):
            with pytest.raises(RuntimeError, match="await"):
                blocking()
        with pytest.raises(RuntimeError, match="aclose"):
            fn.shutdown()
        assert await asyncio.to_thread(future.result, BOUND) == 2, "another thread may wait"
        assert future.result() == 2
        assert await fn(3) == 6, "a refused shutdown closes nothing"
        waits = fn.submit(6)
        fn.shutdown(cancel_futures=True)  # nothing runs
        assert waits.cancelled()
        with fn:  # which closes it at once, for all calls are answered
            assert await fn(4) == 8
        with pytest.raises(batched.BatcherClosed):
            await fn(5)

    asyncio.run(main())
    with pytest.raises(batched.BatcherClosed):  # on another loop, too
        asyncio.run(fn.acall(5))


@loops
@makers
def test_a_future_is_awaited_on_any_loop(run: Any, make: Callable[[], Any]) -> None:
    fn = make()

    async def main() -> None:
        with anyio.fail_after(BOUND):
            assert await fn.submit(1) == 2
            future = fn.submit(2)
            assert [await future, await future] == [4, 4], "also once it is done"
            with pytest.raises(TypeError):
                await fn.submit(None)
            await fn.aclose()

    run(main)


@loops
def test_a_task_that_gives_up_a_future_takes_the_item_out_of_the_queue(run: Any) -> None:
    held: Any = batched.aio.dynamically(**HELD)(echo_coroutine)

    async def main() -> None:
        future = held.submit(1)
        with anyio.move_on_after(0.01):
            await future
        assert future.cancelled()
        assert held.stats.queue_size == 0
        with pytest.raises(CancelledError):
            await future
        with anyio.fail_after(BOUND):
            assert await held([2, 3]) == [2, 3]
            await held.aclose()

    run(main)


def test_a_future_that_another_loop_answers_is_awaited_as_long_as_that_is_there() -> None:
    fn = batched.aio.dynamically(coroutine)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def submitted(item: int) -> batched.Future[int]:
        return fn.submit(item)

    async def main() -> None:
        future = asyncio.run_coroutine_threadsafe(submitted(4), loop).result(BOUND)
        assert await asyncio.wait_for(future, BOUND) == 8

    asyncio.run(main())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(BOUND)
    orphan = loop.run_until_complete(submitted(5))
    loop.close()

    async def left() -> None:
        with pytest.raises(batched.BatcherClosed, match="was closed"):
            await asyncio.wait_for(orphan, BOUND)

    asyncio.run(left())


def test_a_loop_that_is_closed_ends_what_waited_on_it() -> None:
    started = threading.Event()

    @batched.aio.dynamically
    async def never(items: list[int]) -> list[int]:
        started.set()
        await asyncio.Event().wait()
        return items

    futures: list[Future[int]] = []

    async def main() -> None:
        futures.append(never.submit(1))
        await asyncio.to_thread(started.wait, BOUND)
        futures.append(never.submit(2))

    asyncio.run(main())  # cancels the worker, as it cancels every task
    for future in futures:
        assert isinstance(future.exception(BOUND), batched.BatchedError)


def test_cancelling_every_task_of_a_loop_ends_its_calls_and_the_next_one_is_served() -> None:
    held: Any = batched.aio.dynamically(**HELD)(echo_coroutine)

    async def main() -> Any:
        me = asyncio.current_task()
        future = held.submit(21)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in asyncio.all_tasks():
            if task is not me:
                task.cancel()
        with pytest.raises(batched.BatcherClosed):
            await asyncio.wait_for(asyncio.wrap_future(future), BOUND)
        return await asyncio.wait_for(held([1, 2]), BOUND)

    assert asyncio.run(main()) == [1, 2]


def test_a_batch_that_outlives_its_calls_keeps_no_later_call_waiting() -> None:
    gate = asyncio.Event()

    @batched.aio.dynamically
    async def fn(items: list[str]) -> list[str]:
        if items == ["lost"]:
            await gate.wait()
        return items

    async def begin() -> Future[str]:
        future = fn.submit("lost")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert fn.stats.in_flight == 1
        return future

    async def end_and_call() -> str:
        gate.set()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=BOUND)
        return await asyncio.wait_for(fn("next"), BOUND)

    with closing(asyncio.new_event_loop()) as loop:
        lost = loop.run_until_complete(begin())
        fn.shutdown()  # its loop has stopped, so the call ends
        assert isinstance(lost.exception(), batched.BatcherClosed)
        with fn:
            assert loop.run_until_complete(end_and_call()) == "next"


@pytest.mark.parametrize("factory", [None, getattr(asyncio, "eager_task_factory", None)])
def test_callers_who_come_straight_back_share_the_next_batch(factory: Any) -> None:
    batches: list[int] = []

    @batched.aio.dynamically
    async def fn(items: list[int]) -> list[int]:
        batches.append(len(items))
        await asyncio.sleep(0)
        return items

    async def caller() -> None:
        for i in range(5):
            await fn(i)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(factory)
        await asyncio.gather(*(caller() for _ in range(8)))

    asyncio.run(main())
    assert batches == [8] * 5


def test_a_plain_call_on_a_running_loop_is_answered_and_warned_about_once() -> None:
    class Owner:
        @batched.dynamically(name="fn")
        def fn(self, items: list[int]) -> list[int]:
            return items

    async def main() -> None:
        with pytest.warns(
            RuntimeWarning,
            match=r"waiting for fn blocks the event loop .* use `await fn.acall\(...\)`",
        ) as caught:
            assert Owner().fn(1) == 1
        assert [warning.filename for warning in caught] == [__file__]
        assert Owner().fn(2) == 2
        assert Owner().fn.with_options(batch_size=2)([1, 2]) == [1, 2]

    assert Owner().fn(0) == 0
    asyncio.run(main())


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_aclose_does_not_wait_for_a_loop_that_stops_meanwhile(backend: str) -> None:
    entered = threading.Event()

    @batched.aio.dynamically
    async def fn(items: list[int]) -> list[int]:
        entered.set()
        await asyncio.Event().wait()
        return items

    loop = asyncio.new_event_loop()
    task = loop.create_task(fn(1))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    assert entered.wait(BOUND)

    async def close() -> None:
        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                group.start_soon(fn.aclose)
                await anyio.wait_all_tasks_blocked()
                loop.call_soon_threadsafe(loop.stop)

    anyio.run(close, backend=backend)
    thread.join(BOUND)
    with pytest.raises(batched.BatcherClosed):
        loop.run_until_complete(task)
    loop.close()
    gc.collect()  # its worker ends here, and not in a later test


def test_a_cell_runs_in_the_main_thread_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert not is_cell()
    shell.kernel = 1
    assert is_cell()
    assert not in_time(is_cell), "a loop of another thread"
