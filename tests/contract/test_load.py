"""More calls than the queue may hold, and calls that wait too long."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import batched
from stage import BOUND, Stage

pytestmark = pytest.mark.anyio


def only_calls_that_can_be_cancelled(stage: Stage) -> None:
    if stage.calls_from_threads:
        pytest.skip("a thread that waits in a plain call cannot be cancelled")


async def test_calls_wait_for_room_and_enter_in_their_order(stage: Stage) -> None:
    fn = stage.decorate(gated=True, batch_size=2, max_queue_size=2)
    async with stage.busy() as callers:
        calls = [await callers.call(number) for number in range(6)]
        assert (fn.stats.queue_size, fn.stats.blocked) == (2, 4)
        stage.let_through(100)
    assert stage.batches == [["busy"], [0, 1], [2, 3], [4, 5]]
    assert [callers.answers[call] for call in calls] == [("done", number) for number in range(6)]
    assert (fn.stats.calls, fn.stats.blocked, fn.stats.rejected) == (7, 0, 0)


async def test_a_call_larger_than_the_queue_enters_alone_and_holds_newer_ones_back(
    stage: Stage,
) -> None:
    fn = stage.decorate(gated=True, batch_size=8, max_queue_size=3)
    async with stage.busy() as callers:
        await callers.call(10)
        large = await callers.call([*range(5)])
        await callers.call(11)
        assert (fn.stats.queue_size, fn.stats.blocked) == (1, 2)
        stage.let_through(100)
    assert stage.batches == [["busy"], [10], [0, 1, 2, 3, 4], [11]]
    assert callers.answers[large] == [("done", number) for number in range(5)]


async def test_a_full_queue_refuses_if_it_is_to(stage: Stage) -> None:
    fn = stage.decorate(gated=True, max_queue_size=2, on_full="raise")
    async with stage.busy() as callers:
        await callers.call([1, 2])
        for item in (3, [3]):
            with pytest.raises(
                batched.QueueFull,
                match=r"has no room for a call of 1: 2 items wait, of at most 2 "
                r"\(max_queue_size\)",
            ):
                await stage.call(item)
        with pytest.raises(batched.QueueFull):  # from the future, if the queue is elsewhere
            fn.submit(4).result(BOUND)
        stage.let_through(100)
    assert stage.batches == [["busy"], [1, 2]]
    assert (fn.stats.calls, fn.stats.rejected) == (2, 3)
    assert await stage.call(5) == ("done", 5)


async def test_a_call_that_is_cancelled_in_line_is_never_computed(stage: Stage) -> None:
    only_calls_that_can_be_cancelled(stage)
    fn = stage.decorate(gated=True, max_queue_size=1)
    async with stage.busy() as callers:
        await callers.call(1)
        future = fn.submit(2)
        async with anyio.create_task_group() as group:
            for number in range(3, 6):
                group.start_soon(stage.call, number)
            await stage.until(lambda: fn.stats.blocked == 4)
            group.cancel_scope.cancel()
        await stage.until(lambda: (fn.stats.blocked, fn.stats.cancelled) == (1, 3))
        assert future.cancel()
        await stage.until(lambda: (fn.stats.blocked, fn.stats.cancelled) == (0, 4))
        stage.let_through(100)
    assert stage.batches == [["busy"], [1]]


async def test_a_call_that_waits_too_long_ends_and_is_never_computed(stage: Stage) -> None:
    fn = stage.decorate(gated=True, queue_timeout_ms=20, max_queue_size=2)
    async with stage.callers() as callers:
        while not stage.batches:  # on a slow machine the first may come too late, too
            first = await callers.call("busy")
            await stage.until(lambda first=first: bool(stage.batches) or first in callers.answers)  # type: ignore[misc]
        late = [await callers.call(item) for item in (1, [2, 3], 4)]
        await stage.until(lambda: set(late) <= set(callers.answers))
        for number in late:
            assert isinstance(callers.answers[number], batched.QueueTimeout)
            assert isinstance(callers.answers[number], TimeoutError)
            assert str(callers.answers[number]) == (
                f"{stage.name}: the call had waited for 20.0 ms (queue_timeout_ms), and "
                "none of its items had begun to run; raise queue_timeout_ms, or limit the waiting "
                "items by max_queue_size"
            )
        future = fn.submit(5)
        await stage.until(future.done)
        assert isinstance(future.exception(), batched.QueueTimeout)
        stage.let_through(100)
    assert stage.batches == [["busy"]]
    stats = fn.stats
    assert (stats.queue_size, stats.blocked, stats.cancelled) == (0, 0, 0)
    assert stats.timed_out == stats.calls - 1 >= 4


@pytest.mark.parametrize("flush", ["auto", "window"])
async def test_the_books_agree_whatever_becomes_of_the_calls(stage: Stage, flush: Any) -> None:
    only_calls_that_can_be_cancelled(stage)

    def compute(numbers: list[int]) -> list[int]:
        if numbers == [13]:
            raise KeyError(13)
        return numbers

    fn = stage.decorate(compute, gated=True, batch_size=1, max_queue_size=3, flush=flush)
    async with stage.busy() as callers:
        await callers.call(13)
        futures = [fn.submit(number) for number in range(6)]
        # at once, unless the queue is in another process
        await stage.until(lambda: fn.stats.calls == 8)
        for future in futures[1::2]:
            assert future.cancel()
        await stage.until(lambda: fn.stats.cancelled == 3)
        stage.let_through(100)
    await stage.until(lambda: all(future.done() for future in futures))
    await fn.aclose()
    with pytest.raises(batched.BatcherClosed):
        await stage.call(1)
    answered = 1 + 3
    stats = fn.stats
    assert (stats.calls, stats.errors, stats.cancelled) == (answered + 1 + 3, 1, 3)
    assert stage.own_stats.rejected == 1
    assert stats.total_processed == answered + 1
