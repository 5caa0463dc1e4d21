"""Rows and streams, where something goes wrong around a run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import batched
from batched import BatcherClosed, Future, Rows, Stream
from batched._runtime import runtime as runtime_module
from batched._runtime.stream import Pieces


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Held:
    """Function that finishes its rows once the test allows it."""

    def __init__(self, **settings: Any) -> None:
        self.go = threading.Event()
        self.joined = threading.Event()
        self.given_up: list[int] = []
        self.before_look: Callable[[], None] = lambda: None
        decorate: Any = batched.continuously(**settings)
        self.fn: Any = decorate(self.work)

    def work(self, rows: Rows[int, int, Any]) -> None:
        while rows:
            for row in rows.join():
                row.emit(row.item)
            rows.leave()
            self.joined.set()
            assert self.go.wait(30)
            self.given_up += [row.item for row in rows if row.given_up]
            for row in rows:
                if row.item >= 0:
                    row.finish(row.item)
            rows.leave()
            self.before_look()

    def begin(self, item: int) -> Any:
        future = self.fn.submit(item)
        assert self.joined.wait(30)
        return future


@pytest.mark.parametrize("item", [1, -1], ids=["finished", "given up"])
def test_a_run_goes_on_after_the_queue_was_reset_and_no_call_of_before_is_left(item: int) -> None:
    held = Held()
    future = held.begin(item)
    waiting = held.fn.submit(item)
    held.fn._batcher.runtime.abort("for the test")
    for each in (future, waiting):
        with pytest.raises(BatcherClosed, match="for the test"):
            each.result(30)
    held.go.set()
    assert held.fn(5) == 5
    wait_until(lambda: held.given_up)
    assert held.given_up[0] == item
    assert held.fn.stats.in_flight == 0


def test_a_failure_while_a_caller_is_answered_leaves_no_caller_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> int:
        monkeypatch.undo()
        raise MemoryError

    held = Held(on_oom="raise")
    with ThreadPoolExecutor(2) as callers:
        futures = [callers.submit(held.fn, item) for item in (1, 2)]
        wait_until(lambda: held.fn.stats.in_flight + held.fn.stats.queue_size == 2)
        monkeypatch.setattr(runtime_module, "complete", broken)
        held.go.set()
        outcomes = [future.exception(30) or future.result() for future in futures]
    assert all(each in (1, 2) or isinstance(each, MemoryError) for each in outcomes)
    wait_until(lambda: held.fn.stats.in_flight == 0)
    assert held.fn(7) == 7


def test_a_change_that_a_signal_interrupted_is_repaired_before_calls_join_and_end() -> None:
    held = Held(batch_size=4)
    first = held.begin(1)
    second = held.fn.submit(2)
    runtime = held.fn._batcher.runtime
    repaired: list[None] = []
    repair = runtime._repair

    def note() -> None:
        repaired.append(None)
        repair()

    runtime._repair = note
    runtime._changing = True
    held.go.set()
    assert [first.result(30), second.result(30)] == [1, 2]
    assert repaired
    assert held.fn(3) == 3
    repaired.clear()

    def change() -> None:
        runtime._changing = True

    held.before_look = change
    held.go.clear()
    held.joined.clear()
    third = held.begin(5)
    fourth = held.fn.submit(6)
    held.go.set()
    assert [third.result(30), fourth.result(30)] == [5, 6]
    assert repaired
    held.before_look = lambda: None
    runtime._changing = True
    assert held.fn(4) == 4


def test_the_batches_of_a_run_are_known_to_the_search_for_deadlocks() -> None:
    @batched.dynamically
    def outer(items: list[int]) -> list[int]:
        return [inner(item) for item in items]

    @batched.continuously
    def inner(rows: Rows[int, int]) -> None:
        while rows:
            for row in rows.join():
                row.finish(outer(row.item) if row.item else 0)
            rows.leave()

    assert outer(0) == 0
    with pytest.raises(RuntimeError, match="would wait for itself"):
        outer(1)
    with pytest.raises(RuntimeError, match="would wait for itself"):
        inner(1)


def test_callers_that_waited_for_room_are_admitted_when_rows_join_and_end() -> None:
    held = Held(batch_size=1, max_queue_size=1)
    held.go.set()
    with ThreadPoolExecutor(8) as callers:
        assert list(callers.map(held.fn, range(40))) == list(range(40))
    assert list(held.fn.stream(3)) == [3]


def test_pieces_are_joined_by_their_type() -> None:
    pieces = Pieces(2)
    assert not pieces.is_full
    for piece in ("a", b"x", b"y", "b", "c", 1, "d"):
        pieces.put(piece)
    assert pieces.is_full
    taken = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(pieces.take())
    assert taken == ["a", b"xy", "bc", 1, "d"]


class Prompt(Pieces):
    """Pieces of which one comes just before the reader would wait."""

    def set_waker(self, waker: Any) -> bool:
        self.put("late")
        return super().set_waker(waker)


def test_a_reader_does_not_wait_if_a_piece_comes_just_before() -> None:
    async def read() -> str:
        piece: str = await anext(Stream(Prompt(2), Future()))
        return piece

    assert next(Stream(Prompt(2), Future())) == "late"
    assert asyncio.run(read()) == "late"


def test_a_row_that_was_given_up_is_counted_if_the_function_raises() -> None:
    joined, go = threading.Event(), threading.Event()

    @batched.continuously
    def work(rows: Rows[int, int]) -> None:
        while rows:
            rows.join()
            joined.set()
            assert go.wait(30)
            raise ValueError("wrong")

    future = work.submit(1)
    assert joined.wait(30)
    assert future.cancel()
    go.set()
    with pytest.raises(ValueError, match="wrong"):
        work(2)
    assert work.stats.row_endings == {"given up": 1, "failed": 1}
    assert work.stats.in_flight == 0


@pytest.mark.parametrize("call", ["one", "list"])
def test_a_row_whose_result_cannot_be_copied_fails(call: str) -> None:
    vast = np.broadcast_to(np.float64(0), (10**7, 10**7))  # a copy would take 800 TB

    @batched.continuously(batch_size=2)
    def work(rows: Rows[int, Any]) -> None:
        while rows:
            rows.join()
            for row in rows:
                row.finish(vast if row.item == 1 else row.item)
            rows.leave()

    with pytest.raises(MemoryError):
        work(1 if call == "one" else [0, 1, 2, 3])
    assert work([0, 2, 3]) == [0, 2, 3]
    work.shutdown()
    assert work.stats.in_flight == 0


def test_an_error_that_cannot_be_described_reaches_its_caller() -> None:
    class Odd(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no words")

    @batched.continuously
    def work(rows: Rows[int, int]) -> None:
        rows.join()
        raise Odd

    with pytest.raises(Odd):
        work(1)
    with pytest.raises(Odd):
        work(2)


def test_a_size_that_has_failed_does_not_count_as_fitting() -> None:
    @batched.continuously(batch_size=8)
    def work(rows: Rows[int, int]) -> None:
        while rows:
            rows.join()
            if len(rows) > 4:
                raise MemoryError
            for row in rows:
                row.finish(row.item)
            rows.leave()

    assert work(list(range(40))) == list(range(40))
    assert work._batcher.runtime._scheduler.capacity.known == 4


@pytest.mark.parametrize("limit", [0, -1])
def test_join_refuses_a_limit_below_1(limit: int) -> None:
    @batched.continuously
    def work(rows: Rows[int, int]) -> None:
        while rows:
            rows.join(limit)

    with pytest.raises(ValueError, match=f"limit must be at least 1, got {limit}"):
        work(1)


def test_rows_that_were_given_up_do_not_join() -> None:
    joined: list[int] = []
    taken, go = threading.Event(), threading.Event()

    @batched.continuously
    def work(rows: Rows[int, int]) -> None:
        while rows:
            taken.set()
            assert go.wait(30)
            for row in rows.join(1):
                joined.append(row.item)
                row.finish(row.item)
            rows.leave()

    futures = [work.submit(item) for item in range(4)]
    assert taken.wait(30)
    wait_until(lambda: work.stats.in_flight + work.stats.queue_size == 4)
    for future in futures[1:]:
        assert future.cancel()
    go.set()
    assert futures[0].result(30) == 0
    assert work(9) == 9
    assert joined == [0, 9]


def test_an_error_after_the_last_row_has_ended_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @batched.continuously
    def work(rows: Rows[int, int]) -> None:
        while rows:
            for row in rows.join():
                row.finish(row.item)
            rows.leave()
        raise ValueError("too late")

    assert work(1) == 1
    work.shutdown()
    assert "raised after all of its rows had ended" in caplog.text
    assert "too late" in caplog.text


def test_a_closed_stream_has_no_pieces() -> None:
    held = Held()
    stream = held.fn.stream(1)
    assert held.joined.wait(30)
    stream.close()
    assert list(stream) == []
    held.go.set()


def test_a_piece_that_is_taken_while_it_is_joined_is_kept() -> None:
    class Raced(Pieces):
        @property
        def is_full(self) -> bool:
            return True  # and the reader takes all meanwhile

    pieces = Raced(1)
    pieces.put("a")
    assert pieces.take() == "a"


def test_a_stream_of_a_coroutine_function_is_read_by_async_for() -> None:
    go = asyncio.Event()

    @batched.aio.continuously
    async def work(rows: Rows[int, int, int]) -> None:
        while rows:
            for row in rows.join():
                row.emit(row.item)
            rows.leave()
            await go.wait()
            for row in rows:
                row.finish(row.item)
            rows.leave()

    async def main() -> None:
        async with work.stream(1) as stream:
            assert await anext(stream) == 1
            with pytest.raises(RuntimeError, match="read by `async for`"):
                next(stream)
            go.set()
            assert [piece async for piece in stream] == []
            assert stream.result() == 1
        stream = work.stream(2)
        await stream.aclose()
        assert [piece async for piece in stream] in ([], [2])

    asyncio.run(main())


def test_a_stream_of_one_loop_is_read_on_another() -> None:
    made: list[Any] = []
    go = threading.Event()
    read = threading.Event()

    @batched.aio.continuously
    async def work(rows: Rows[int, int, int]) -> None:
        while rows:
            rows.join()
            await asyncio.to_thread(go.wait, 30)
            for row in rows:
                row.emit(row.item)
                row.finish(row.item)
            rows.leave()

    async def make() -> None:
        made.append(work.stream(4))
        await asyncio.to_thread(read.wait, 30)

    async def reading() -> list[int]:
        asyncio.get_running_loop().call_later(0.3, go.set)
        return [piece async for piece in made[0]]

    with ThreadPoolExecutor(1) as other:
        loop = other.submit(asyncio.run, make())
        wait_until(lambda: made)
        assert asyncio.run(reading()) == [4]
        read.set()
        loop.result(30)


def test_a_stream_whose_loop_was_closed_raises() -> None:
    @batched.aio.continuously
    async def work(rows: Rows[int, int, int]) -> None:
        while rows:
            rows.join()
            await asyncio.sleep(3600)

    async def make() -> Any:
        return work.stream(4)

    stream = asyncio.run(make())

    async def read() -> list[int]:
        return [piece async for piece in stream]

    with pytest.raises(BatcherClosed):
        asyncio.run(read())


@pytest.fixture
def alarm() -> Iterator[None]:
    """Let SIGALRM raise a KeyboardInterrupt in the main thread."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if not hasattr(signal, "setitimer"):
        pytest.skip("there are no such timers")
    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
def test_an_interrupted_reader_gives_its_call_up() -> None:
    held = Held()
    stream = held.fn.stream(-1)
    assert next(stream) == -1
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    held.go.set()
    assert held.fn(1) == 1
    assert held.fn.stats.cancelled == 1
