"""Streams: the pieces of one call, read by a thread or a coroutine while its row runs."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import pytest
from countdowns import Gate, countdown, countdown_on_a_loop, stepwise

from batched import BatcherClosed, Rows
from batched._steps.stream import Pieces
from stage import interrupted_once


def test_pieces_arrive_while_the_row_runs_and_before_its_error() -> None:
    gate = Gate()
    stream = countdown(gate).stream(-3)
    for left in (2, 1, 0):
        gate.allow()
        assert next(stream) == left
    for wait in (stream.__next__, stream.result):
        with pytest.raises(ValueError, match="row -3"):
            wait()


async def entered(stream: Any) -> None:
    async with stream:
        pass


@pytest.mark.parametrize("way", ["drop", "with", "async with", "aclose", "future"])
def test_a_call_that_is_given_up_frees_its_place(way: str) -> None:
    gate = Gate()
    count = countdown(gate, batch_size=1)
    call: Any = count.submit(10**9) if way == "future" else count.stream(10**9)
    gate.wait_for_step()
    if way == "future":
        assert call.cancel()
    elif way == "with":
        with call:
            pass
        assert list(call) == [], "a closed stream has pieces"
    elif way == "async with":
        asyncio.run(entered(call))
    elif way == "aclose":
        asyncio.run(call.aclose())
    del call
    gc.collect()
    gate.open()
    assert count(2) == "2 x 1"
    assert count.stats.row_endings == {"given up": 1, "finished": 1}
    assert count.stats.cancelled == 1


def test_a_task_that_is_cancelled_while_it_reads_or_waits_frees_its_place() -> None:
    gate = Gate()
    count = countdown(gate, batch_size=1)

    async def main() -> None:
        reading = asyncio.ensure_future(anext(count.stream(10**9)))
        calling = asyncio.ensure_future(count.acall(10**9))
        await asyncio.to_thread(gate.wait_for_step)
        for task in (reading, calling):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        gate.open()
        assert await count.acall(1) == "1 x 1"

    asyncio.run(main())


@pytest.mark.skipif(sys.platform == "win32", reason="a signal ends a process there")
def test_a_thread_that_is_interrupted_while_it_reads_frees_its_place() -> None:
    gate = Gate()
    count = countdown(gate, batch_size=1)
    stream = count.stream(10**9)
    with interrupted_once(gate.wait_for_step):
        next(stream)
    gate.open()
    assert count(1) == "1 x 1"


def test_text_that_is_not_read_is_joined_and_bounded() -> None:
    behind: list[bool] = []
    readers: list[bool] = []

    def write(rows: Rows[int, str, str]) -> None:
        for row in rows:
            readers.append(row.has_reader)
            for number in range(row.item):
                row.emit(f"{number} ")
                behind.append(row.behind)
            row.finish("end")

    function = stepwise(write, max_pieces=3)
    stream = function.stream(100)
    assert stream.result(30) == "end"
    assert function(1) == "end"
    assert readers == [True, False]
    pieces = list(stream)
    assert len(pieces) == 3
    assert "".join(pieces) == "".join(f"{number} " for number in range(100))
    assert behind[:3] == [False, False, True]


def test_pieces_are_joined_by_their_type_and_none_is_lost() -> None:
    pieces = Pieces(2)
    for piece in ("a", b"x", b"y", "b", "c", 1, "d"):
        pieces.put(piece)
    assert [pieces.take() for _ in range(5)] == ["a", b"xy", "bc", 1, "d"]
    raced = Pieces(0)  # full, although the reader has just taken all
    raced.put("a")
    assert raced.take() == "a"


def test_a_stream_of_a_closed_batcher_raises() -> None:
    gate = Gate()
    count = countdown(gate, batch_size=1)
    first, second = count.stream(1), count.stream(1)
    gate.wait_for_step()
    count.shutdown(wait=False, cancel_futures=True)
    gate.open()
    assert list(first) == [0]
    with pytest.raises(BatcherClosed):
        next(second)
    with pytest.raises(BatcherClosed):
        count.stream(1)


@pytest.mark.parametrize("moment", ["before", "while another loop reads"])
def test_a_stream_whose_loop_is_closed_raises(moment: str) -> None:
    paused = asyncio.Event()

    async def pause() -> None:
        paused.set()
        await asyncio.get_running_loop().create_future()

    async def begin() -> Any:
        stream = count.stream(4)
        await paused.wait()
        return stream

    async def read() -> None:
        asyncio.get_running_loop().call_soon(loop.close)
        with pytest.raises(BatcherClosed):
            await anext(stream)

    count, loop = countdown_on_a_loop(pause), asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    stream = loop.run_until_complete(begin())
    tasks = asyncio.all_tasks(loop)
    if moment == "before":  # as `asyncio.run` does
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
    asyncio.run(read())
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # left pending on purpose
    del task, tasks
    gc.collect()  # the task ends here, and not in a later test
