"""Batched functions that call each other. Only a call that would wait for itself is refused."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import Any

import anyio
import pytest

import batched
from batched._runtime import waits
from stage import BOUND, LOOPS, Stage, echo_coroutine, python, wait_until


def raised_or_returned(future: Any) -> Any:
    error = future.exception()
    if error is not None:
        raise error
    return future.result()


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "call": lambda fn, item: fn(item),
    "list call": lambda fn, item: fn([item])[0],
    "submit": lambda fn, item: fn.submit(item).result(),
    "exception": lambda fn, item: raised_or_returned(fn.submit(item)),
    "map": lambda fn, item: next(fn.map([item])),
    "acall": lambda fn, item: asyncio.run(fn.acall(item)),
}


async def listed(fn: Any, item: Any) -> Any:
    return (await fn([item]))[0]


async def mapped(fn: Any, item: Any) -> Any:
    results = [result async for result in fn.map([item])]
    return results[0]


COROUTINE_WAYS: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {
    "call": lambda fn, item: fn(item),
    "list call": listed,
    "submit": lambda fn, item: fn.submit(item),
    "map": mapped,
    "acall": lambda fn, item: fn.acall(item),
}


@pytest.fixture(autouse=True)
def no_wait_stays_noted(monkeypatch: pytest.MonkeyPatch) -> Any:
    noted: list[Any] = []
    make = waits.Pool.__init__

    def make_and_note(self: Any, *args: Any) -> None:
        make(self, *args)
        noted.append(self.waits)

    monkeypatch.setattr(waits.Pool, "__init__", make_and_note)
    yield
    assert not any(noted)


@pytest.mark.parametrize(
    ("way", "settings"),
    [(way, settings) for way in WAYS for settings in ({}, {"prefetch": 1})]
    # futures may be done before anybody waits
    + [(way, {"max_concurrent_batches": 4}) for way in ("call", "list call", "acall")],
    ids=str,
)
def test_a_function_that_waits_for_itself_is_told_so(way: str, settings: dict[str, Any]) -> None:
    def again(items: list[int]) -> list[int]:
        return [WAYS[way](fn, item - 1) if item else 0 for item in items]

    fn: Any = batched.dynamically(**settings)(again)
    with fn:
        assert fn(0) == 0
        for _ in range(3):
            with pytest.raises(
                RuntimeError,
                match=r"again is called from within its own batch, and would wait "
                r"for itself; call \S+again.__wrapped__",
            ):
                fn(1)
        assert fn(0) == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [2, 3, 5])
def test_a_circle_of_functions_is_told_so(way: str, length: int) -> None:
    fns: list[Any] = []

    def member(number: int) -> Any:
        @batched.dynamically(name=f"fn{number}", max_concurrent_batches=number + 1)
        def fn(items: list[int]) -> list[int]:
            return [
                WAYS[way](fns[(number + 1) % length], item - 1) if item else number
                for item in items
            ]

        return fn

    fns += [member(number) for number in range(length)]
    for _ in range(2):
        assert fns[0](length - 1) == length - 1, "a chain that ends is no circle"
        with pytest.raises(
            RuntimeError,
            match=f"fn0 is called from within a batch of fn{length - 1}, and would wait for itself",
        ):
            fns[0](length)
    for fn in fns:
        fn.shutdown()


@pytest.mark.parametrize(("backend", "options"), LOOPS)
@pytest.mark.parametrize("way", COROUTINE_WAYS)
def test_a_circle_of_coroutine_functions_is_told_so(
    backend: str, options: dict[str, Any], way: str
) -> None:
    @batched.aio.dynamically
    async def one(items: list[int]) -> list[int]:
        return [await COROUTINE_WAYS[way](two, item - 1) if item else 1 for item in items]

    @batched.aio.dynamically
    async def two(items: list[int]) -> list[int]:
        return [await COROUTINE_WAYS[way](one, item - 1) if item else 2 for item in items]

    async def main() -> None:
        with anyio.fail_after(BOUND):
            assert await one(0) == 1
            assert await one(1) == 2
            with pytest.raises(
                RuntimeError,
                match=r"one is called from within a batch of \S+two, "
                r"and would wait for itself",
            ):
                await one(2)
            assert await two(1) == 1
            await one.aclose()
            await two.aclose()

    anyio.run(main, backend=backend, backend_options=options)


def test_a_circle_through_threads_and_a_loop_is_told_so() -> None:
    loop: Any = None

    @batched.aio.dynamically
    async def on_loop(items: list[int]) -> list[int]:
        return [await in_thread.acall(item - 1) if item else 0 for item in items]

    @batched.dynamically
    def in_thread(items: list[int]) -> list[int]:
        return [
            asyncio.run_coroutine_threadsafe(on_loop.acall(item - 1), loop).result() if item else 0
            for item in items
        ]

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        assert await on_loop(1) == 0
        with pytest.raises(
            RuntimeError,
            match=r"on_loop is called from within a batch of "
            r"\S+in_thread, and would wait for itself",
        ):
            await on_loop(2)
        await on_loop.aclose()

    asyncio.run(main())
    in_thread.shutdown()


@pytest.mark.parametrize("workers", [1, 2])
def test_two_functions_that_wait_for_the_queues_of_each_other_are_told_so(workers: int) -> None:
    """No request of one is in a batch of the other: each is queued behind batches that wait for the
    other function.
    """
    entered = threading.Barrier(2 * workers)

    def member(other: Callable[[], Any]) -> Any:
        @batched.dynamically(batch_size=1, max_concurrent_batches=workers)
        def fn(items: list[str]) -> list[str]:
            if items == ["inner"]:
                return items
            entered.wait(BOUND)
            return [other()("inner")]

        return fn

    left: Any = member(lambda: right)
    right: Any = member(lambda: left)
    outer = [fn.submit("outer") for fn in (left, right) for _ in range(workers)]
    # one call is refused, and the other calls get their results
    [refused] = filter(None, [future.exception() for future in outer])
    assert isinstance(refused, RuntimeError)
    assert "would wait for itself" in str(refused)
    assert left("inner") == right("inner") == "inner"
    left.shutdown()
    right.shutdown()


def test_a_worker_that_is_free_is_waited_for() -> None:
    """Two functions call each other, but in no circle: a second worker runs the inner call."""
    both = threading.Barrier(2)

    def member(other: Callable[[], Any]) -> Any:
        @batched.dynamically(batch_size=1, max_concurrent_batches=2)
        def fn(items: list[str]) -> list[str]:
            if items == ["outer"]:
                both.wait(BOUND)
                return [other()("inner")]
            return items

        return fn

    left: Any = member(lambda: right)
    right: Any = member(lambda: left)
    outer = [left.submit("outer"), right.submit("outer")]
    assert [future.result() for future in outer] == ["inner", "inner"]
    left.shutdown()
    right.shutdown()


def test_a_task_that_outlives_its_run_may_wait_for_other_functions() -> None:
    async def main() -> None:
        over = asyncio.Event()
        tasks: list[asyncio.Task[int]] = []

        @batched.aio.dynamically
        async def inner(items: list[int]) -> list[int]:
            return [await outer(item - 1) if item else item for item in items]

        @batched.aio.dynamically
        async def outer(items: list[int]) -> list[int]:
            if not tasks:
                tasks.append(asyncio.create_task(after()))
            return items

        async def after() -> int:
            await over.wait()
            return await inner(2)

        assert await outer(0) == 0
        over.set()
        assert await asyncio.wait_for(tasks[0], BOUND) == 1
        await inner.aclose()
        await outer.aclose()

    asyncio.run(main())


def test_many_runs_may_wait_for_one_function() -> None:
    @batched.dynamically
    def inner(items: list[int]) -> list[int]:
        return [item + 1 for item in items]

    @batched.dynamically(batch_size=1, max_concurrent_batches=8)
    def outer(items: list[int]) -> list[int]:
        with ThreadPoolExecutor(2):
            return inner(items)

    with outer, inner:
        assert outer(list(range(100))) == list(range(1, 101))


def test_a_call_that_its_function_only_starts_is_no_circle() -> None:
    later: list[Any] = []

    @batched.dynamically
    def fn(items: list[int]) -> list[int]:
        later.extend(fn.submit(item - 1) for item in items if item)
        return items

    assert fn(2) == 2
    assert later[0].result() == 1
    assert later[1].result() == 0
    fn.shutdown()


def test_a_full_queue_does_not_block_the_function_that_empties_it() -> None:
    started: list[Any] = []

    @batched.dynamically(max_queue_size=1)
    def fn(items: list[str]) -> list[str]:
        if items == ["first"]:
            started.extend(fn.submit(f"later {i}") for i in range(3))
        return items

    assert fn("first") == "first"
    assert [future.result() for future in started] == ["later 0", "later 1", "later 2"]
    fn.shutdown()


@pytest.mark.parametrize("wait", [True, False])
def test_a_function_may_close_the_one_that_waits_for_it(wait: bool) -> None:
    @batched.dynamically
    def outer(items: list[int]) -> list[int]:
        return inner(items)

    @batched.dynamically
    def inner(items: list[int]) -> list[int]:
        outer.shutdown(wait=wait)
        return items

    assert outer(1) == 1
    with pytest.raises(batched.BatcherClosed):
        outer(2)
    inner.shutdown()


def test_two_functions_that_close_each_other_do_not_hang() -> None:
    both = threading.Barrier(2)

    def member(other: Callable[[], Any]) -> Any:
        @batched.dynamically
        def fn(items: list[int]) -> list[int]:
            both.wait(BOUND)
            other().shutdown()
            return items

        return fn

    left: Any = member(lambda: right)
    right: Any = member(lambda: left)
    outer = [left.submit(1), right.submit(2)]
    assert [future.result() for future in outer] == [1, 2]


@pytest.mark.parametrize("during", [True, False], ids=["during the run", "after it"])
@pytest.mark.parametrize("way", COROUTINE_WAYS)
def test_tasks_that_a_run_has_started_get_the_same_answer_whenever_they_call(
    way: str, during: bool
) -> None:
    async def main() -> None:
        go = asyncio.Event()
        tasks: list[asyncio.Task[Any]] = []

        @batched.aio.dynamically
        async def fn(items: list[str]) -> list[str]:
            if items == ["starts"]:
                tasks.append(asyncio.create_task(calling("waits")))
                tasks.append(asyncio.create_task(submitting("submitted")))
                tasks.append(asyncio.create_task(calling("apart"), context=Context()))
                if during:
                    go.set()
                    await Stage.until(lambda: fn.stats.queue_size >= 2 and tasks[0].done())
            return items

        async def calling(item: str) -> Any:
            await go.wait()
            return await COROUTINE_WAYS[way](fn, item)

        async def submitting(item: str) -> Any:
            await go.wait()
            return fn.submit(item)

        async with asyncio.timeout(BOUND):
            assert await fn("starts") == "starts"
            go.set()
            with pytest.raises(RuntimeError, match="in an empty contextvars.Context"):
                await tasks[0]
            assert await (await tasks[1]) == "submitted"
            assert await tasks[2] == "apart"
            await fn.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("during", [True, False], ids=["during the run", "after it"])
@pytest.mark.parametrize("way", ["call", "list call", "acall"])  # a future may be done at once
def test_threads_with_the_context_of_a_run_get_the_same_answer_whenever_they_call(
    way: str, during: bool
) -> None:
    go = threading.Event()
    started: list[futures.Future[Any]] = []

    def calling(item: str) -> Any:
        assert go.wait(BOUND)
        return WAYS[way](fn, item)

    def submitting(item: str) -> Any:
        assert go.wait(BOUND)
        return fn.submit(item)

    with ThreadPoolExecutor(3) as pool:

        @batched.dynamically
        def fn(items: list[str]) -> list[str]:
            if items == ["starts"]:
                started.append(pool.submit(copy_context().run, calling, "waits"))
                started.append(pool.submit(copy_context().run, submitting, "submitted"))
                started.append(pool.submit(Context().run, calling, "apart"))
                if during:
                    go.set()
                    wait_until(lambda: fn.stats.queue_size >= 2 and started[0].done())
            return items

        assert fn("starts") == "starts"
        go.set()
        with pytest.raises(RuntimeError, match="in an empty contextvars.Context"):
            started[0].result(BOUND)
        assert started[1].result(BOUND).result(BOUND) == "submitted"
        assert started[2].result(BOUND) == "apart"
        fn.shutdown()


def test_two_functions_that_wait_for_prefetched_batches_of_each_other_are_told_so() -> None:
    ready = threading.Event()
    both = threading.Barrier(2)

    @batched.dynamically(batch_size=1, prefetch=1)
    def left(items: list[str]) -> list[Any]:
        if items == ["outer"]:
            both.wait(BOUND)
            assert ready.wait(BOUND)
            return [right("inner")]
        return items

    @batched.dynamically(batch_size=1)
    def right(items: list[str]) -> list[Any]:
        if items == ["outer"]:
            both.wait(BOUND)
            inner = left.submit("inner")
            wait_until(lambda: left.stats.in_flight == 2)  # it has been made ready, and runs next
            ready.set()
            return [inner.result()]
        return items

    outer = left.submit("outer"), right.submit("outer")
    [error] = filter(None, [future.exception(BOUND) for future in outer])
    assert isinstance(error, RuntimeError)
    assert "would wait for itself" in str(error)
    left.shutdown()
    right.shutdown()


def test_a_run_that_has_been_answered_waits_no_more() -> None:
    """A callback on the worker of `inner` calls the function of the run that waited for it."""
    answers: list[Any] = []
    called = threading.Event()

    @batched.dynamically
    def outer(items: list[str]) -> list[str]:
        return [inner("x")] if items == ["outer"] else items

    inner: Any = batched.dynamically(flush="window", timeout_ms=1e9, batch_size=2)(
        lambda items: items
    )

    def callback(_: Any) -> None:
        try:
            answers.append(outer("from a callback"))
        except RuntimeError as error:
            answers.append(error)
        called.set()

    inner.submit("y").add_done_callback(callback)
    assert outer("outer") == "x"
    assert called.wait(BOUND)
    assert answers == ["from a callback"]
    outer.shutdown()
    inner.shutdown()


def test_a_function_may_wait_for_a_batch_that_another_worker_runs() -> None:
    @batched.dynamically(batch_size=1, max_concurrent_batches=2)
    def fn(items: list[Any]) -> list[Any]:
        if isinstance(items[0], str):
            assert go.wait(BOUND)
            return items
        go.set()
        return [items[0].result()]

    go = threading.Event()
    running = fn.submit("running")
    wait_until(running.running)
    assert fn(running) == "running"
    fn.shutdown()


def test_a_wait_that_ends_by_itself_is_not_refused() -> None:
    @batched.dynamically
    def fn(items: list[int]) -> list[str]:
        if items == [1]:
            with pytest.raises(futures.TimeoutError):
                fn.submit(0).result(0)
        return ["not yet" for _ in items]

    assert fn(1) == "not yet"
    fn.shutdown()


def test_who_waited_for_room_only_is_waited_for_by_nobody() -> None:
    """A function submits an item to a full queue. The item calls the function: nothing waits."""
    gate = threading.Semaphore(0)

    @batched.dynamically
    def first(items: list[str]) -> list[str]:
        started.extend(second.submit(f"calls {item}") for item in items if item == "starts")
        return items

    @batched.dynamically(batch_size=1, max_queue_size=1, max_concurrent_batches=2)
    def second(items: list[str]) -> list[str]:
        if items[0].startswith("calls"):
            return [first("again")]
        assert gate.acquire(timeout=BOUND)
        return items

    for _ in range(20):
        started: list[Any] = []
        busy = [second.submit(f"busy {i}") for i in range(2)]
        wait_until(lambda: second.stats.in_flight == 2)
        busy.append(second.submit("waiting"))
        starting = first.submit("starts")
        wait_until(lambda: second.stats.blocked == 1)
        gate.release(3)
        assert starting.result(BOUND) == "starts"
        assert [future.result(BOUND) for future in (*busy, *started)] == [
            "busy 0",
            "busy 1",
            "waiting",
            "again",
        ]
    first.shutdown()
    second.shutdown()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_that_a_function_forks_may_call_that_function() -> None:
    done = python(
        """
        import os, batched

        @batched.dynamically
        def fn(items):
            if items == ["fork"]:
                child = os.fork()
                if not child:
                    os._exit(0 if fn("child") == "child" else 1)
                return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
            return items

        assert fn("fork") == 0
        """
    )
    assert done.returncode == 0, done.stderr


def test_many_calls_of_one_run_cost_the_same_each(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0
    is_blocked = waits.Wait.is_blocked

    def counting(*args: Any) -> bool:
        nonlocal looked_at
        looked_at += 1
        return is_blocked(*args)

    monkeypatch.setattr(waits.Wait, "is_blocked", counting)

    inner: Any = batched.aio.dynamically(batch_size=256)(echo_coroutine)

    @batched.aio.dynamically
    async def outer(items: list[int]) -> list[int]:
        return [len(await asyncio.gather(*[inner(i) for i in range(item)])) for item in items]

    async def main() -> None:
        assert await outer(1000) == 1000
        await inner.aclose()
        await outer.aclose()

    asyncio.run(main())
    assert looked_at <= 1000


def test_a_loop_that_is_closed_while_runs_wait_there_is_collected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Item:
        pass

    def closed() -> list[weakref.ref[Any]]:
        @batched.aio.dynamically
        async def inner(items: list[Item]) -> list[Item]:
            started.set()
            await asyncio.sleep(1000)
            return items

        @batched.aio.dynamically
        async def outer(items: list[Item]) -> list[Item]:
            return [await inner(item) for item in items]

        async def main() -> None:
            tasks.append(asyncio.create_task(outer(item)))
            await asyncio.wait_for(started.wait(), BOUND)

        loop, item, started = asyncio.new_event_loop(), Item(), asyncio.Event()
        tasks: list[Any] = []
        loop.run_until_complete(main())
        loop.close()
        return [weakref.ref(item), weakref.ref(loop)]

    with caplog.at_level("CRITICAL"):
        refs = closed()
        gc.collect()
        gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_work_that_a_callback_gives_to_a_loop_may_wait_for_the_next_batch() -> None:
    """It starts with the context of the run, which is not over until all its callers have been
    told.
    """
    told = threading.Event()

    @batched.dynamically(on_batch=lambda _: told.wait(BOUND))
    def fn(items: list[int]) -> list[int]:
        return [item + 1 for item in items]

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    seconds: list[Any] = []
    first = fn.submit(1)

    async def second(value: int) -> int:
        loop.call_later(0.01, told.set)
        return await fn.acall(value)

    first.add_done_callback(
        lambda future: seconds.append(
            asyncio.run_coroutine_threadsafe(second(future.result()), loop)
        )
    )
    wait_until(lambda: bool(seconds))
    assert seconds[0].result(BOUND) == 3
    loop.call_soon_threadsafe(loop.stop)
    thread.join(BOUND)
    loop.close()
    fn.shutdown()


def test_a_wait_that_outlives_its_run_is_no_wait_of_the_next_run() -> None:
    entered, opened = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []
    runs: list[Any] = []

    @batched.dynamically
    def slow(items: list[int]) -> list[int]:
        entered.set()
        assert opened.wait(BOUND)
        return items

    @batched.dynamically
    def fn(items: list[int]) -> list[int]:
        if not threads:
            threads.append(threading.Thread(target=copy_context().run, args=(slow, 1)))
            threads[0].start()
            assert entered.wait(BOUND)
        present = waits.current_worker()
        assert present is not None
        live = [wait for wait in present.pool.waits if wait.batch is present.batch]
        runs.append(len(live))
        return items

    assert [fn(1), fn(2)] == [1, 2]
    assert runs == [1, 0]
    opened.set()
    threads[0].join(BOUND)
    for each in (fn, slow):
        each.shutdown()
