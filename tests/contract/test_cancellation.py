"""Calls of callers that go away are not computed. No other caller notices."""

from __future__ import annotations

import concurrent.futures

import anyio
import pytest

from stage import BOUND, Stage

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def only_calls_that_can_be_cancelled(stage: Stage) -> None:
    if stage.calls_from_threads:
        pytest.skip("a thread that waits in a plain call cannot be cancelled")


async def test_the_rest_of_a_cancelled_list_call_is_never_computed(stage: Stage) -> None:
    stage.decorate(gated=True, batch_size=2)
    async with anyio.create_task_group() as group:
        group.start_soon(stage.call, list(range(10)))
        await stage.running(1)
        group.cancel_scope.cancel()
    await stage.queued(0)
    stage.let_through(2)
    assert await stage.call("next") == ("done", "next")
    assert stage.batches == [[0, 1], ["next"]]


async def test_cancelling_one_call_of_a_running_batch_leaves_the_rest_untouched(
    stage: Stage,
) -> None:
    stage.decorate(gated=True)
    async with stage.busy() as callers:
        async with anyio.create_task_group() as group:
            await callers.call(1)
            group.start_soon(stage.call, 2)
            await stage.queued(2)
            await callers.call(3)
            stage.let_through()
            await stage.running(2)
            group.cancel_scope.cancel()
        stage.let_through()
    assert stage.batches == [["busy"], [1, 2, 3]]
    assert [callers.answers[number] for number in (1, 2)] == [("done", 1), ("done", 3)]


async def test_a_cancelled_future_is_never_computed(stage: Stage) -> None:
    stage.skip_if_connected("a client does not know whether a call that was sent runs")
    fn = stage.decorate(gated=True)
    first = fn.submit("busy")
    await stage.running(1)
    futures = [fn.submit(i) for i in range(3)]
    assert futures[1].cancel()
    assert futures[1].cancelled()
    assert futures[1].cancel(), "a cancelled future stays cancelled"
    assert not first.cancel(), "the batch runs already"
    assert first.running()
    stage.let_through(2)
    await stage.until(lambda: all(future.done() for future in [first, *futures]))
    assert stage.batches == [["busy"], [0, 2]]
    results = [future.result() for future in (first, futures[0], futures[2])]
    assert results == [("done", item) for item in ("busy", 0, 2)]
    done, not_done = concurrent.futures.wait(futures, timeout=BOUND)
    assert (len(done), len(not_done)) == (3, 0)
    with pytest.raises(concurrent.futures.CancelledError):
        futures[1].result()
    assert not first.running()
