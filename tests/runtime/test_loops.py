"""One batcher, many event loops: at once, one after another, closed under waiting callers; and
threads beside them.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import anyio.lowlevel
import pytest
import trio

import batched
from batched._runtime.async_backend import current_loop, current_task, is_cell
from stage import BOUND, LOOPS, echo_coroutine, in_time, wait_until

uvloop: Any = pytest.importorskip("uvloop", reason="uvloop does not exist for Windows")


def plain(items: list[int]) -> list[int]:
    return [2 * item for item in items]


async def coroutine(items: list[int]) -> list[int]:
    await anyio.lowlevel.checkpoint()
    return [2 * item for item in items]


async def gathered(fn: Any, count: int = 50) -> list[int]:
    return list(await asyncio.gather(*(fn.acall(i) for i in range(count))))


EXPECTED = [2 * i for i in range(50)]

makers = pytest.mark.parametrize(
    "make",
    [
        lambda: batched.dynamically(plain),
        lambda: batched.aio.dynamically(plain),
        lambda: batched.aio.dynamically(coroutine),
    ],
    ids=["threads", "aio-sync", "aio-coroutine"],
)
backends = pytest.mark.parametrize(("backend", "options"), LOOPS)
runners = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@makers
@runners
def test_one_loop_after_another(
    make: Callable[[], Any], run: Callable[[Coroutine[Any, Any, list[int]]], list[int]]
) -> None:
    fn = make()
    for _ in range(5):
        assert run(gathered(fn)) == EXPECTED
    assert fn.stats.calls == 250
    assert fn.stats.total_processed == 250


@makers
def test_many_loops_at_once_in_many_threads(make: Callable[[], Any]) -> None:
    fn = make()
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(asyncio.run, gathered(fn)) for _ in range(16)]
        done, not_done = wait(futures, BOUND)
    assert not not_done
    assert all(future.result() == EXPECTED for future in done)
    assert fn.stats.total_processed == 16 * 50


def test_threads_asyncio_uvloop_and_trio_share_one_batcher() -> None:
    gate = threading.Event()
    batches: list[list[int]] = []

    @batched.dynamically(batch_size=32)
    def fn(items: list[int]) -> list[int]:
        batches.append(items.copy())
        assert gate.wait(BOUND)
        return [2 * item for item in items]

    async def once(item: int) -> int:
        return await fn.acall(item)

    with ThreadPoolExecutor(5) as pool:
        busy = pool.submit(fn, 0)
        wait_until(lambda: len(batches) == 1)
        futures: list[Future[int]] = [
            pool.submit(fn, 1),
            pool.submit(asyncio.run, once(2)),
            pool.submit(uvloop.run, once(3)),
            pool.submit(trio.run, once, 4),
        ]
        wait_until(lambda: fn.stats.queue_size == 4)
        gate.set()
        assert busy.result(BOUND) == 0
        assert [future.result(BOUND) for future in futures] == [2, 4, 6, 8]
    assert sorted(map(len, batches)) == [1, 4]


@makers
def test_nothing_is_kept_of_a_loop_that_is_gone(make: Callable[[], Any]) -> None:
    fn = make()

    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        assert await fn.acall(1) == 2
        return weakref.ref(asyncio.get_running_loop())

    refs = [asyncio.run(main()) for _ in range(3)]
    trio.run(fn.acall, 1)
    queues = getattr(fn._batcher.runtime, "_runtimes", ())  # of a coroutine function
    # tasks of other loops may end in a first collection, and hold these until then
    wait_until(lambda: gc.collect() >= 0 and not (len(queues) or any(ref() for ref in refs)))
    assert fn.stats.calls == 4


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
        assert await asyncio.wrap_future(future) == 2
        assert future.result() == 2
        assert await fn(3) == 6, "a refused shutdown closes nothing"
        with fn:  # which closes it at once, for all calls are answered
            assert await fn(4) == 8
        with pytest.raises(batched.BatcherClosed):
            await fn(5)

    asyncio.run(main())


@backends
@makers
def test_a_future_is_awaited_on_any_loop(
    backend: str, options: dict[str, Any], make: Callable[[], Any]
) -> None:
    fn = make()

    async def main() -> None:
        with anyio.fail_after(BOUND):
            assert await fn.submit(1) == 2
            future = fn.submit(2)
            assert [await future, await future] == [4, 4], "also once it is done"
            with pytest.raises(TypeError):
                await fn.submit(None)
            await fn.aclose()

    anyio.run(main, backend=backend, backend_options=options)


@backends
def test_a_task_that_gives_up_a_future_takes_the_item_out_of_the_queue(
    backend: str, options: dict[str, Any]
) -> None:
    held: Any = batched.aio.dynamically(batch_size=2, flush="window", timeout_ms=1e9)(
        echo_coroutine
    )

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

    anyio.run(main, backend=backend, backend_options=options)


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
        future = asyncio.run_coroutine_threadsafe(submitted(5), loop).result(BOUND)
        assert future.result(BOUND) == 10, "a thread may wait, too"

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

    async def again() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(never(3), 0.01)

    asyncio.run(again())


def test_cancelling_every_task_of_a_loop_ends_its_calls_and_the_next_one_is_served() -> None:
    @batched.aio.dynamically(batch_size=2, flush="window", timeout_ms=1e9)
    async def held(items: list[int]) -> list[int]:
        return [2 * item for item in items]

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

    assert asyncio.run(main()) == [2, 4]


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


def test_a_function_that_is_cancelled_within_harms_its_own_batch_only() -> None:
    @batched.aio.dynamically(batch_size=1)
    async def fn(items: list[str]) -> list[str]:
        if items == ["cancelled"]:
            inner = asyncio.get_running_loop().create_future()
            inner.cancel()
            await inner
        if items == ["late"]:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await asyncio.Event().wait()
        return items

    async def main() -> Any:
        return await asyncio.gather(
            *map(fn, ["late", "cancelled", "good", "late"]), return_exceptions=True
        )

    late, cancelled, good, later = asyncio.run(main())
    assert (late, good, later) == ("late", "good", "late")
    assert isinstance(cancelled, batched.BatchFunctionError)


@pytest.mark.parametrize(
    "factory", dict.fromkeys([None, getattr(asyncio, "eager_task_factory", None)])
)
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


def test_trio_as_a_guest_of_asyncio_is_told_from_its_host() -> None:
    """In guest mode both loops run in one thread."""

    async def guest() -> object:
        return current_loop()

    async def host() -> None:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[Any] = loop.create_future()
        trio.lowlevel.start_guest_run(
            guest, run_sync_soon_threadsafe=loop.call_soon_threadsafe, done_callback=over.set_result
        )
        outcome = await asyncio.wait_for(over, BOUND)
        assert isinstance(outcome.unwrap(), trio.lowlevel.TrioToken)
        assert current_loop() is loop

    asyncio.run(host())


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


@pytest.mark.parametrize("kernel", [None, 1])
def test_a_cell_of_a_notebook_runs_in_the_main_thread_of_a_kernel(
    kernel: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = SimpleNamespace(kernel=kernel)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert is_cell() == (kernel is not None)
    assert not in_time(is_cell), "a loop of another thread"


def test_another_thread_may_wait_for_a_result_of_a_loop() -> None:
    fn = batched.aio.dynamically(coroutine)

    async def main() -> int:
        return await asyncio.to_thread(fn.submit(4).result, BOUND)

    assert asyncio.run(main()) == 8
    asyncio.run(fn.aclose())
    with pytest.raises(batched.BatcherClosed):  # on another loop, too
        asyncio.run(fn.acall(4))
