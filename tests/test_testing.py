"""`batched.testing`: calls that run at once, and batches as a test wants them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

import batched
import batched.testing
from stage import BOUND, python

BACKENDS = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


class Recorded:
    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.threads: set[threading.Thread] = set()

    def __call__(self, numbers: list[int], add: int = 0) -> list[int]:
        self.batches.append(list(numbers))
        self.threads.add(threading.current_thread())
        return [2 * number + add for number in numbers]

    async def coroutine(self, numbers: list[int], add: int = 0) -> list[int]:
        await anyio.lowlevel.checkpoint()
        return self(numbers, add)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def no_new_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.usefixtures("no_new_threads")
class TestCallsFromThreads:
    def test_each_call_runs_at_once_in_its_caller_and_alone(self, recorded: Recorded) -> None:
        settings: Any = {"max_concurrent_batches": 2, "queue_timeout_ms": 1, "max_queue_size": 1}
        settings |= {"flush": "window", "timeout_ms": 1e6, "prepare": abs}
        fn = batched.dynamically(batch_size=3, **settings)(recorded)
        with batched.testing.inline():
            assert fn(1) == 2
            assert fn(2, add=1) == 5
            assert fn([-3, 4, 5, 6]) == [6, 8, 10, 12]
            assert fn([]) == []
            futures = [fn.submit(number) for number in (7, 8)]
            assert recorded.batches == [[1], [2], [3, 4, 5], [6], [7], [8]]
            assert [future.result(0) for future in futures] == [14, 16]
            results = fn.map(range(10))
            assert next(results) == 0
            results.close()
            assert recorded.batches[6:] == [[0]], "map is lazy"
        assert recorded.threads == {threading.current_thread()}
        stats = fn.stats
        assert (stats.calls, stats.total_processed, stats.total_batches) == (6, 9, 7)
        assert stats.batch_sizes == {1: 6, 3: 1}
        assert (stats.queue_size, stats.in_flight) == (0, 0)

    def test_functions_that_work_in_steps_and_their_streams(self) -> None:
        @batched.continuously(batch_size=2)
        def spell(rows: batched.Rows[str, int, str]) -> None:
            while rows:
                for row in rows.join():
                    for letter in row.item:
                        row.emit(letter)
                    row.finish(len(row.item))
                rows.leave()

        with batched.testing.inline():
            assert spell(["one", "four", "three"]) == [3, 4, 5]
            with spell.stream("abc") as pieces:
                assert list(pieces) == ["a", "b", "c"]
                assert pieces.result(0) == 3

    def test_errors_are_as_always(self) -> None:
        lose: Any = batched.dynamically(lambda items: items[1:])
        with batched.testing.inline():
            with pytest.raises(batched.BatchSizeMismatch):
                lose(1)
            lose.shutdown()
            with pytest.raises(batched.BatcherClosed):
                lose(1)
            with lose:
                assert lose([]) == []

    def test_a_function_that_calls_itself_is_refused(self) -> None:
        @batched.dynamically
        def inner(numbers: list[int]) -> list[int]:
            return [-number for number in numbers]

        @batched.dynamically
        def outer(numbers: list[int]) -> list[int]:
            return [outer(number - 1) if number == 1 else inner(number) for number in numbers]

        with batched.testing.inline():
            assert outer(5) == -5
            with pytest.raises(RuntimeError, match="called from within its own batch"):
                outer(1)


def test_calls_of_all_threads_are_inline_until_the_last_context_ends(recorded: Recorded) -> None:
    fn = batched.dynamically(recorded)
    contexts = [contextlib.ExitStack(), contextlib.ExitStack()]
    for context in contexts:
        context.enter_context(batched.testing.inline())

    def call() -> threading.Thread:
        thread = threading.Thread(target=fn, args=(1,))
        thread.start()
        thread.join(BOUND)
        return thread

    assert call() in recorded.threads
    contexts[0].close()  # not the last one that was opened
    assert call() in recorded.threads
    contexts[1].close()
    assert call() not in recorded.threads
    fn.shutdown()


@pytest.mark.usefixtures("no_new_threads")
@pytest.mark.anyio
@BACKENDS
class TestCallsFromCoroutines:
    async def test_a_plain_function_runs_in_the_loops_thread(self, recorded: Recorded) -> None:
        fn: Any = batched.aio.dynamically(prepare=abs)(recorded)
        with batched.testing.inline():
            assert await fn(1) == 2
            assert await fn.acall([2, 3]) == [4, 6]
            assert await fn.submit(4) == 8
            assert [result async for result in fn.map([5, 6])] == [10, 12]
        assert recorded.batches == [[1], [2, 3], [4], [5], [6]]
        assert recorded.threads == {threading.current_thread()}

    async def test_a_coroutine_function_runs_alone_for_each_call(self, recorded: Recorded) -> None:
        fn = batched.aio.dynamically(batch_size=2)(recorded.coroutine)
        results: dict[int, int] = {}

        async def call(number: int) -> None:
            results[number] = await fn(number)

        with batched.testing.inline():
            async with anyio.create_task_group() as tasks:
                for number in range(3):
                    tasks.start_soon(call, number)
            assert results == {0: 0, 1: 2, 2: 4}
            assert sorted(recorded.batches) == [[0], [1], [2]]
            assert await fn([1, 2, 3]) == [2, 4, 6]
            assert [result async for result in fn.map([5, 6])] == [10, 12]
            with anyio.move_on_after(0):
                await fn([7] * 100)  # is cancelled
        assert recorded.batches[3:5] == [[1, 2], [3]]
        assert fn.stats.calls == 7


class TestHeldCalls:
    def test_calls_that_wait_share_a_batch_and_later_ones_do_not(self, recorded: Recorded) -> None:
        fn = batched.dynamically(flush="window", timeout_ms=1e6)(recorded)
        with batched.testing.hold(fn) as held:
            alone = fn.submit(1)
            held.release()
            assert alone.result(0) == 2
            together = [fn.submit(number) for number in (2, 3)]
            assert recorded.batches == [[1]]
        assert recorded.batches == [[1], [2, 3]]
        assert [future.result(0) for future in together] == [4, 6]

    def test_full_batches_wait_too_and_batch_size_is_the_limit(self, recorded: Recorded) -> None:
        fn = batched.dynamically(batch_size=2, name="doubled")(recorded)
        with batched.testing.hold(fn) as held:
            for number in range(5):
                fn.submit(number)
            held.wait_for(5)
            assert recorded.batches == []
            with pytest.raises(TimeoutError, match=r"5 of 6 items wait in the queue of doubled"):
                held.wait_for(6, timeout=0)
        assert recorded.batches == [[0, 1], [2, 3], [4]]

    def test_a_function_may_be_held_within_another_hold(self, recorded: Recorded) -> None:
        fn = batched.dynamically(recorded)
        with batched.testing.hold(fn) as outer:
            first = fn.submit(1)
            with batched.testing.hold(fn) as inner:
                fn.submit(2)
                inner.wait_for(1)
            assert recorded.batches == [[2]]
            last = fn.submit(3)
            outer.wait_for(2)
            assert not first.done()
        assert recorded.batches == [[2], [1, 3]]
        assert last.done()
        fn(4)
        assert recorded.batches[-1] == [4]

    def test_full_queues_cancellation_and_late_calls_as_always(self, recorded: Recorded) -> None:
        full = batched.dynamically(max_queue_size=1, on_full="raise")(recorded)
        late = batched.dynamically(queue_timeout_ms=20.0)(recorded)
        with batched.testing.hold(full), batched.testing.hold(late):
            future = full.submit(1)
            with pytest.raises(batched.QueueFull):
                full(2)
            assert future.cancel()
            with pytest.raises(batched.QueueTimeout):
                late(3)
        assert recorded.batches == []
        assert (full.stats.rejected, full.stats.cancelled, late.stats.timed_out) == (1, 1, 1)

    def test_callers_count_while_they_wait_for_room_in_the_queue(self, recorded: Recorded) -> None:
        fn = batched.dynamically(max_queue_size=2)(recorded)
        callers = [threading.Thread(target=fn, args=(number,)) for number in range(5)]
        with batched.testing.hold(fn) as held:
            for caller in callers:
                caller.start()
            held.wait_for(5)
        for caller in callers:
            caller.join(BOUND)
        assert sorted(x for batch in recorded.batches for x in batch) == [0, 1, 2, 3, 4]
        assert max(map(len, recorded.batches)) == 2

    def test_calls_wait_within_inline_and_until_an_error(self, recorded: Recorded) -> None:
        fn, other = batched.dynamically(recorded), batched.dynamically(recorded)
        with batched.testing.inline():
            with pytest.raises(ZeroDivisionError), batched.testing.hold(fn) as held:
                futures = [fn.submit(1), fn.submit(2)]
                held.wait_for(2)
                assert other(3) == 6
                raise ZeroDivisionError
            assert recorded.batches == [[3], [1, 2]]
            assert [future.result(0) for future in futures] == [2, 4]
            assert fn(4) == 8

    def test_a_function_that_is_opened_or_closed_meanwhile(self, recorded: Recorded) -> None:
        fn = batched.dynamically(recorded)
        fn.shutdown()
        with batched.testing.hold(fn) as held:
            with fn:
                future = fn.submit(1)
                held.release()
                assert future.result(0) == 2
            with pytest.raises(batched.BatcherClosed):
                fn.submit(2)

    def test_each_instance_is_held_by_itself(self) -> None:
        class Scorer:
            @batched.dynamically
            def score(self, numbers: list[int]) -> list[int]:
                return [number + len(numbers) for number in numbers]

        held_one, other = Scorer(), Scorer()
        with batched.testing.inline(), batched.testing.hold(held_one.score):
            futures = [held_one.score.submit(1), held_one.score.submit(2)]
            assert other.score(1) == 2
        assert [future.result(0) for future in futures] == [3, 4]
        wrong: Any = Scorer.score
        with pytest.raises(TypeError, match="method of an instance"), batched.testing.hold(wrong):
            pass

    def test_other_things_are_refused(self) -> None:
        things: list[tuple[Any, str]] = [(len, "hold takes a batched function"), (7, "hold takes")]
        if hasattr(socket, "AF_UNIX"):
            things.append((batched.connect("module:function"), "of this process"))
        for thing, said in things:
            with pytest.raises(TypeError, match=said), batched.testing.hold(thing):
                pass

    @pytest.mark.anyio
    @BACKENDS
    @pytest.mark.parametrize("coroutine", [False, True], ids=["plain", "coroutine"])
    async def test_callers_in_coroutines_are_awaited(
        self, recorded: Recorded, coroutine: bool
    ) -> None:
        fn: Any = batched.aio.dynamically(recorded.coroutine if coroutine else recorded)
        results: dict[int, int] = {}

        async def call(number: int) -> None:
            results[number] = await fn(number)

        async with anyio.create_task_group() as tasks:
            with batched.testing.hold(fn) as held:
                for number in (1, 2):
                    tasks.start_soon(call, number)
                await held.until(2)
                held.release()
                tasks.start_soon(call, 3)
                await held.until(1)
                with pytest.raises(TimeoutError, match=r"await held.until\(2\)"):
                    await held.until(2, timeout=0)
        assert results == {1: 2, 2: 4, 3: 6}
        assert [sorted(batch) for batch in recorded.batches] == [[1, 2], [3]]
        assert await fn(4) == 8
        await fn.aclose()

    def test_a_coroutine_function_is_held_on_its_loop_only(self, recorded: Recorded) -> None:
        fn = batched.aio.dynamically(recorded.coroutine)
        with pytest.raises(RuntimeError, match="none is running here"), batched.testing.hold(fn):
            pass

        async def nothing() -> None:
            with batched.testing.hold(fn):
                pass
            assert len(asyncio.all_tasks()) == 1

        asyncio.run(nothing())


@pytest.mark.once
def test_the_fixture_makes_calls_inline(tmp_path: Any) -> None:
    (tmp_path / "test_it.py").write_text(
        """\
import threading
import batched.testing

pytest_plugins = ["batched.testing"]

@batched.dynamically
def threads(items: list[int]) -> list[object]:
    return [threading.current_thread() for _ in items]

def test_inline(batched_inline):
    assert threads(1) is threading.current_thread()

def test_not_inline():
    assert threads(1) is not threading.current_thread()
"""
    )
    done = python(
        f"""
        import os, pytest, sys
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        sys.exit(pytest.main([{str(tmp_path)!r}, "-p", "no:cacheprovider"]))
        """
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
