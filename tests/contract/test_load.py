"""More calls than the queue may hold, and calls that wait too long: for all four decorators on
every runtime.
"""

from __future__ import annotations

from typing import Any

import anyio
import anyio.to_thread
import pytest

import batched
from number_stage import BUSY, NumberStage
from stage import BOUND

pytestmark = pytest.mark.anyio


@pytest.fixture
def stage(numbers: NumberStage) -> NumberStage:
    return numbers


def only_calls_that_can_be_cancelled(stage: NumberStage) -> None:
    if stage.calls_from_threads:
        pytest.skip("a thread that waits in a plain call cannot be cancelled")


async def test_calls_wait_for_room_and_enter_in_their_order(stage: NumberStage) -> None:
    fn = stage.decorate(gated=True, batch_size=2, max_queue_size=2)
    async with stage.busy() as callers:
        calls = [await callers.call(stage.one(number)) for number in range(6)]
        assert (fn.stats.queue_size, fn.stats.blocked) == (2, 4)
        stage.let_through(100)
    assert stage.given == [[BUSY], [0, 1], [2, 3], [4, 5]]
    assert [stage.values(callers.answers[call]) for call in calls] == [
        [number] for number in range(6)
    ]
    assert (fn.stats.calls, fn.stats.blocked, fn.stats.rejected) == (7, 0, 0)


async def test_a_call_larger_than_the_queue_enters_alone_and_holds_newer_ones_back(
    stage: NumberStage,
) -> None:
    fn = stage.decorate(gated=True, batch_size=8, max_queue_size=3)
    async with stage.busy() as callers:
        await callers.call(stage.one(10))
        large = await callers.call(stage.many(range(5)))
        await callers.call(stage.one(11))
        assert (fn.stats.queue_size, fn.stats.blocked) == (1, 2)
        stage.let_through(100)
    assert stage.given == [[BUSY], [10], [0, 1, 2, 3, 4], [11]]
    assert stage.values(callers.answers[large]) == [0, 1, 2, 3, 4]


async def test_a_full_queue_refuses_if_it_is_to(stage: NumberStage) -> None:
    fn = stage.decorate(gated=True, max_queue_size=2, on_full="raise")
    async with stage.busy() as callers:
        await callers.call(stage.many([1, 2]))
        for item in (stage.one(3), stage.many([3])):
            with pytest.raises(
                batched.QueueFull,
                match=r"has no room for a call of 1: 2 items wait, of at most 2 "
                r"\(max_queue_size\)",
            ):
                await stage.call(item)
        with pytest.raises(batched.QueueFull):  # from the future, if the queue is elsewhere
            fn.submit(stage.one(4)).result(BOUND)
        stage.let_through(100)
    assert stage.given == [[BUSY], [1, 2]]
    assert (fn.stats.calls, fn.stats.rejected) == (2, 3)
    assert stage.values(await stage.call(stage.one(5))) == [5]


async def test_map_never_overfills_the_queue(stage: NumberStage) -> None:
    stage.skip_if_connected("a client does not know the queue of the process")
    fn = stage.decorate(max_queue_size=3, on_full="raise")
    items = [stage.one(number) for number in range(50)]
    if stage.calls_from_threads or stage.kind == "acall":
        results = await anyio.to_thread.run_sync(lambda: list(fn.map(items, buffersize=20)))
    else:
        results = [result async for result in fn.map(items, buffersize=20)]
    assert [stage.values(result) for result in results] == [[number] for number in range(50)]


async def test_a_call_that_is_cancelled_in_line_is_never_computed(stage: NumberStage) -> None:
    only_calls_that_can_be_cancelled(stage)
    fn = stage.decorate(gated=True, max_queue_size=1)
    async with stage.busy() as callers:
        await callers.call(stage.one(1))
        future = fn.submit(stage.one(2))
        async with anyio.create_task_group() as group:
            for number in range(3, 6):
                group.start_soon(stage.call, stage.one(number))
            await stage.until(lambda: fn.stats.blocked == 4)
            group.cancel_scope.cancel()
        await stage.until(lambda: (fn.stats.blocked, fn.stats.cancelled) == (1, 3))
        assert future.cancel()
        await stage.until(lambda: (fn.stats.blocked, fn.stats.cancelled) == (0, 4))
        stage.let_through(100)
    assert stage.given == [[BUSY], [1]]


async def test_a_call_that_waits_too_long_ends_and_is_never_computed(stage: NumberStage) -> None:
    fn = stage.decorate(gated=True, queue_timeout_ms=20, max_queue_size=2)
    async with stage.callers() as callers:
        while not stage.given:  # on a slow machine the first may come too late, too
            first = await callers.call(stage.one(BUSY))
            await stage.until(lambda first=first: bool(stage.given) or first in callers.answers)  # type: ignore[misc]
        late = [
            await callers.call(item) for item in (stage.one(1), stage.many([2, 3]), stage.one(4))
        ]
        await stage.until(lambda: set(late) <= set(callers.answers))
        for number in late:
            assert isinstance(callers.answers[number], batched.QueueTimeout)
            assert isinstance(callers.answers[number], TimeoutError)
            assert str(callers.answers[number]) == (
                f"{stage.name}: the call had waited for 20.0 ms (queue_timeout_ms), and "
                "none of its items had begun to run; raise queue_timeout_ms, or limit the waiting "
                "items by max_queue_size"
            )
        future = fn.submit(stage.one(5))
        await stage.until(future.done)
        assert isinstance(future.exception(), batched.QueueTimeout)
        stage.let_through(100)
    assert stage.given == [[BUSY]]
    stats = fn.stats
    assert (stats.queue_size, stats.blocked, stats.cancelled) == (0, 0, 0)
    assert stats.timed_out == stats.calls - 1 >= 4


async def test_closing_runs_blocked_calls(stage: NumberStage) -> None:
    fn = stage.decorate(gated=True, max_queue_size=1)
    async with stage.busy() as callers:
        calls = [await callers.call(stage.one(number)) for number in range(4)]
        stage.let_through(100)
        await fn.aclose()
    assert [stage.values(callers.answers[call]) for call in calls] == [[0], [1], [2], [3]]


async def test_closing_with_cancel_ends_blocked_calls(stage: NumberStage) -> None:
    stage.skip_if_connected("calls that were sent run")
    fn = stage.decorate(gated=True, max_queue_size=1)
    async with stage.busy() as callers:
        calls = [await callers.call(stage.one(number)) for number in range(3)]
        assert (fn.stats.queue_size, fn.stats.blocked) == (1, 2)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: fn.aclose(cancel_futures=True))
            await stage.until(lambda: len(callers.answers) == 3)
            stage.let_through(100)
    assert stage.given == [[BUSY]]
    assert all(isinstance(callers.answers[call], batched.BatcherClosed) for call in calls)
    assert (fn.stats.cancelled, fn.stats.blocked) == (3, 0)


@pytest.mark.parametrize("flush", ["auto", "window"])
async def test_the_books_agree_whatever_becomes_of_the_calls(
    stage: NumberStage, flush: Any
) -> None:
    only_calls_that_can_be_cancelled(stage)

    def compute(numbers: list[int]) -> list[int]:
        if numbers == [13]:
            raise KeyError(13)
        return numbers

    fn = stage.decorate(compute, gated=True, batch_size=1, max_queue_size=3, flush=flush)
    async with stage.busy() as callers:
        await callers.call(stage.one(13))
        futures = [fn.submit(stage.one(number)) for number in range(6)]
        # at once, unless the queue is in another process
        await stage.until(lambda: fn.stats.calls == 8)
        for future in futures[1::2]:
            assert future.cancel()
        await stage.until(lambda: fn.stats.cancelled == 3)
        stage.let_through(100)
    await stage.until(lambda: all(future.done() for future in futures))
    await fn.aclose()
    with pytest.raises(batched.BatcherClosed):
        await stage.call(stage.one(1))
    answered = 1 + 3
    stats = fn.stats
    assert (stats.calls, stats.errors, stats.cancelled) == (answered + 1 + 3, 1, 3)
    assert stage.own_stats.rejected == 1
    assert stats.total_processed == answered + 1
