"""More calls than the queue may hold, and calls that wait too long: on every runtime."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import batched
from stage import BOUND, Stage

pytestmark = pytest.mark.anyio


async def test_calls_wait_for_room_and_enter_in_their_order(stage: Stage) -> None:
    fn = stage.decorate(gated=True, batch_size=2, max_queue_size=2)
    async with stage.callers() as callers:
        for number in range(7):
            await callers.call(number)
            if not number:
                await stage.running(1)
        assert (fn.stats.queue_size, fn.stats.blocked) == (2, 4)
        stage.let_through(100)
    assert stage.batches == [[0], [1, 2], [3, 4], [5, 6]]
    assert callers.answers == {number: ("done", number) for number in range(7)}
    assert (fn.stats.calls, fn.stats.blocked, fn.stats.rejected) == (7, 0, 0)


async def test_a_list_larger_than_the_queue_enters_alone_and_holds_newer_calls_back(stage: Stage) -> None:
    fn = stage.decorate(gated=True, batch_size=8, max_queue_size=3)
    async with stage.callers() as callers:
        await callers.call("running")
        await stage.running(1)
        await callers.call("first")
        await callers.call(list(range(5)))
        await callers.call("newer")
        assert (fn.stats.queue_size, fn.stats.blocked) == (1, 2)
        stage.let_through(100)
    assert stage.batches == [["running"], ["first"], [0, 1, 2, 3, 4], ["newer"]]
    assert callers.answers[2] == [("done", i) for i in range(5)]


async def test_a_full_queue_refuses_if_it_is_to(stage: Stage) -> None:
    fn = stage.decorate(gated=True, max_queue_size=2, on_full="raise")
    async with stage.callers() as callers:
        await callers.call("running")
        await stage.running(1)
        await callers.call(["a", "b"])
        for item in ("c", ["c"]):
            with pytest.raises(batched.QueueFull, match=r"has 2 items waiting, of at most 2 \(max_queue_size\)"):
                await stage.call(item)
        with pytest.raises(batched.QueueFull):
            fn.submit("d")
        stage.let_through(100)
    assert stage.batches == [["running"], ["a", "b"]]
    assert (fn.stats.calls, fn.stats.rejected) == (2, 3)
    assert await stage.call("e") == ("done", "e")


async def test_map_never_overfills_the_queue(stage: Stage) -> None:
    fn = stage.decorate(max_queue_size=3, on_full="raise")
    if stage.kind in {"threads", "acall"}:
        results = await anyio.to_thread.run_sync(lambda: list(fn.map(range(50), buffersize=20)))
    else:
        results = [result async for result in fn.map(range(50), buffersize=20)]
    assert results == [("done", i) for i in range(50)]


async def test_a_call_that_is_cancelled_in_line_is_never_computed(stage: Stage) -> None:
    if stage.kind == "threads":
        pytest.skip("a thread that waits in a plain call cannot be cancelled")
    fn = stage.decorate(gated=True, max_queue_size=1)
    async with stage.callers() as callers:
        await callers.call("running")
        await stage.running(1)
        await callers.call("waiting")
        async with anyio.create_task_group() as group:
            for item in range(3):
                group.start_soon(stage.call, item)
            await stage.until(lambda: fn.stats.blocked == 3)
            group.cancel_scope.cancel()
        assert (fn.stats.blocked, fn.stats.cancelled) == (0, 3)
        stage.let_through(100)
    assert stage.batches == [["running"], ["waiting"]]


async def test_a_full_queue_holds_nothing_back_and_one_that_is_full_no_longer_does(stage: Stage) -> None:
    if stage.kind == "threads":
        pytest.skip("a thread that waits in a plain call cannot be cancelled")
    fn = stage.decorate(gated=True, batch_size=4, max_queue_size=4, flush="window", timeout_ms=1e9)
    async with stage.callers() as callers:
        await callers.call(["running"] * 4)
        await stage.running(1)
        await callers.call("held")
        async with anyio.create_task_group() as group:
            group.start_soon(stage.call, ["in line"] * 4)
            await stage.until(lambda: fn.stats.blocked == 1)
            group.cancel_scope.cancel()
        stage.let_through(1)
        await stage.until(lambda: 0 in callers.answers)
        assert fn.stats.queue_size == 1
        await callers.call(["too many"] * 4)
        stage.let_through(100)
    assert stage.batches == [["running"] * 4, ["held"], ["too many"] * 4]


async def test_a_call_that_waits_too_long_ends_and_is_never_computed(stage: Stage) -> None:
    fn = stage.decorate(gated=True, queue_timeout_ms=20, max_queue_size=2)
    async with stage.callers() as callers:
        while not stage.batches:  # on a slow machine the first may come too late, too
            first = await callers.call("running")
            await stage.until(lambda first=first: bool(stage.batches) or first in callers.answers)  # type: ignore[misc]
        late = [await callers.call(item) for item in ("queued", ["queued", "queued"], "in line")]
        await stage.until(lambda: set(late) <= set(callers.answers))
        for number in late:
            assert isinstance(callers.answers[number], batched.QueueTimeout)
            assert isinstance(callers.answers[number], TimeoutError)
            assert "had waited for 20.0 ms (queue_timeout_ms)" in str(callers.answers[number])
        future = fn.submit("submitted")
        await stage.until(future.done)
        assert isinstance(future.exception(), batched.QueueTimeout)
        stage.let_through(100)
    assert stage.batches == [["running"]]
    stats = fn.stats
    assert (stats.queue_size, stats.blocked, stats.cancelled) == (0, 0, 0)
    assert stats.timed_out == stats.calls - 1 >= 4


async def test_a_call_that_runs_in_time_is_answered(stage: Stage) -> None:
    fn = stage.decorate(queue_timeout_ms=1e9)
    assert [await stage.call(i) for i in range(3)] == [("done", i) for i in range(3)]
    assert fn.stats.timed_out == 0


async def test_closing_runs_what_stands_in_line(stage: Stage) -> None:
    fn = stage.decorate(gated=True, max_queue_size=1)
    async with stage.callers() as callers:
        for number in range(4):
            await callers.call(number)
        stage.let_through(100)
        await fn.aclose()
    assert callers.answers == {number: ("done", number) for number in range(4)}


async def test_closing_with_cancel_ends_what_stands_in_line(stage: Stage) -> None:
    fn = stage.decorate(gated=True, max_queue_size=1)
    async with stage.callers() as callers:
        await callers.call(0)
        await stage.running(1)
        for number in range(1, 4):
            await callers.call(number)
        assert (fn.stats.queue_size, fn.stats.blocked) == (1, 2)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: fn.aclose(cancel_futures=True))
            await stage.until(lambda: len(callers.answers) == 3)
            stage.let_through(100)
    assert callers.answers[0] == ("done", 0)
    assert all(isinstance(callers.answers[number], batched.BatcherClosed) for number in (1, 2, 3))
    assert (fn.stats.cancelled, fn.stats.blocked) == (3, 0)


async def test_a_failed_part_of_a_large_call_makes_room_for_who_stands_in_line(stage: Stage) -> None:
    def compute(items: list[Any]) -> list[Any]:
        if 0 in items:
            raise KeyError(0)
        return items

    fn = stage.decorate(compute, gated=True, batch_size=2, max_queue_size=4, small_batch_threshold=0)
    async with stage.callers() as callers:
        await callers.call(list(range(6)))
        await stage.running(1)
        await callers.call("in line")
        assert fn.stats.blocked == 1
        stage.let_through(100)
        await stage.until(lambda: len(callers.answers) == 2)
    assert isinstance(callers.answers[0], KeyError)
    assert callers.answers[1] == "in line"
    with anyio.fail_after(BOUND):
        await fn.aclose()
