"""Closing: accepted calls end, later calls are refused, and the batcher can be opened again."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import anyio
import pytest

import batched
from stage import BOUND, Stage

pytestmark = pytest.mark.anyio


async def test_closing_finishes_what_was_accepted(stage: Stage) -> None:
    fn = stage.decorate(gated=True, batch_size=2, max_queue_size=2)
    async with stage.callers() as callers:
        for i in range(5):
            await callers.call(i)
        await stage.running(1)
        async with anyio.create_task_group() as group:
            group.start_soon(fn.aclose)
            stage.let_through(5)
    assert callers.answers == {i: ("done", i) for i in range(5)}


async def test_closing_runs_held_calls(stage: Stage) -> None:
    stage.skip_if_connected("the queue of the process stays open for its other clients")
    fn = stage.decorate(flush="window", timeout_ms=1e9)
    async with stage.callers() as callers:
        await callers.call("held")
        with anyio.fail_after(BOUND):
            await fn.aclose()
    assert callers.answers == {0: ("done", "held")}
    assert fn.stats.flush_reasons == {"drain": 1}


async def test_calls_after_closing_are_refused(stage: Stage) -> None:
    fn = stage.decorate()
    await stage.call("before")
    await fn.aclose()
    await fn.aclose()
    for _ in range(2):
        with pytest.raises(batched.BatcherClosed, match="shut down"):
            await stage.call("after")
    with pytest.raises(batched.BatcherClosed):
        fn.submit("after")
    counts = stage.own_stats
    assert (counts.calls, counts.rejected, counts.cancelled) == (1, 3, 0)


async def test_closing_with_cancel_ends_what_waits_and_finishes_what_runs(stage: Stage) -> None:
    stage.skip_if_connected("calls that were sent run")
    fn = stage.decorate(gated=True, max_queue_size=1)
    async with stage.callers() as callers:
        await callers.call("runs")
        await stage.running(1)
        await callers.call("waits")
        await callers.call(["waits", "too"])
        future = fn.submit("waits as well")
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: fn.aclose(cancel_futures=True))
            await stage.until(lambda: len(callers.answers) == 2)
            stage.let_through(1)
    assert callers.answers[0] == ("done", "runs")
    for number in (1, 2):
        assert isinstance(callers.answers[number], batched.BatcherClosed)
    assert future.cancelled()
    assert concurrent.futures.wait([future], timeout=0).done
    assert (fn.stats.cancelled, fn.stats.blocked) == (3, 0)
    assert stage.batches == [["runs"]]


async def test_entering_opens_a_closed_batcher_again(stage: Stage) -> None:
    fn = stage.decorate()
    for _ in range(3):
        async with fn as opened:
            assert opened is fn
            assert await stage.call("in") == ("done", "in")
        with pytest.raises(batched.BatcherClosed):
            await stage.call("out")


async def test_the_function_may_close_its_own_batcher(stage: Stage) -> None:
    stage.skip_if_connected("a model process refuses to connect to itself")

    def compute(items: list[Any]) -> list[Any]:
        stage.fn.shutdown(wait=True)
        return items

    stage.decorate(compute)
    assert await stage.call("last") == "last"
    with pytest.raises(batched.BatcherClosed):
        await stage.call("after")


async def test_many_may_close_at_once_while_calls_arrive(stage: Stage) -> None:
    fn = stage.decorate(batch_size=4)
    async with stage.callers() as callers:
        for i in range(20):
            await callers.call(i)
            if i == 10:
                async with anyio.create_task_group() as group:
                    for _ in range(4):
                        group.start_soon(fn.aclose)
    for number, answer in callers.answers.items():
        assert (
            answer == ("done", number)
            if number <= 10
            else isinstance(answer, batched.BatcherClosed)
        )
    assert len(callers.answers) == 20
