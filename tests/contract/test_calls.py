"""Results of calls, and the contents and order of batches."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

import batched
from stage import BOUND, Stage

pytestmark = pytest.mark.anyio


async def test_a_single_call_gets_its_own_result(stage: Stage) -> None:
    stage.decorate()
    assert await stage.call("a") == ("done", "a")
    assert stage.batches == [["a"]]


async def test_a_list_call_gets_a_list_in_its_order(stage: Stage) -> None:
    stage.decorate(batch_size=4)
    assert await stage.call(list(range(10))) == [("done", i) for i in range(10)]
    assert stage.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


async def test_an_empty_list_is_answered_without_running_anything(stage: Stage) -> None:
    stage.decorate()
    assert await stage.call([]) == []
    assert stage.batches == []


async def test_the_caller_may_change_its_list_after_the_call(stage: Stage) -> None:
    stage.decorate(gated=True)
    items = [1, 2, 3]
    async with stage.busy() as callers:
        number = await callers.call(items)
        items.clear()
        stage.let_through(2)
    assert callers.answers[number] == [("done", 1), ("done", 2), ("done", 3)]


async def test_a_window_lets_a_lone_call_go_after_its_timeout(stage: Stage) -> None:
    stage.decorate(batch_size=4, timeout_ms=1.0, flush="window")
    assert await stage.call("alone") == ("done", "alone")
    assert stage.fn.stats.flush_reasons == {"timeout": 1}


async def test_calls_with_different_arguments_never_share_a_batch(stage: Stage) -> None:
    stage.decorate(lambda items, tag="none": [(item, tag) for item in items], gated=True)
    async with stage.busy() as callers:
        for i in range(6):
            await callers.call(i, tag="even" if i % 2 == 0 else "odd")
        stage.let_through(3)
    assert stage.batches == [["busy"], [0, 2, 4], [1, 3, 5]]
    assert [callers.answers[i + 1] for i in range(6)] == [
        (i, "odd" if i % 2 else "even") for i in range(6)
    ]


async def test_a_batch_runs_only_once_a_worker_is_free(stage: Stage) -> None:
    stage.decorate(gated=True, batch_size=2)
    async with stage.callers() as callers:
        for i in range(7):
            await callers.call(i)
        await stage.running(1)
        assert stage.fn.stats.in_flight == len(stage.batches[0])
        assert stage.fn.stats.queue_size == 7 - len(stage.batches[0])
        stage.let_through(7)
    assert len(stage.batches) in (4, 5)  # the first may have left with one item


async def test_a_call_split_over_concurrent_batches_is_put_together_in_order(stage: Stage) -> None:
    stage.decorate(batch_size=2, max_concurrent_batches=4)
    for _ in range(20):
        assert await stage.call(list(range(11))) == [("done", i) for i in range(11)]


def test_threads_that_race_for_the_first_access_to_a_method_find_one_batcher() -> None:
    class Owner:
        @batched.dynamically
        def method(self, items: list[int]) -> list[int]:
            return items

    barrier = Barrier(4)

    def race(owner: Owner) -> int:
        barrier.wait(BOUND)
        return owner.method(1)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for owner in [Owner() for _ in range(50)]:
                assert [*pool.map(race, [owner] * 4)] == [1] * 4
                assert owner.method.stats.calls == 4
    finally:
        sys.setswitchinterval(interval)
