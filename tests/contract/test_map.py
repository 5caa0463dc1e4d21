"""`fn.map`: in order, lazily, bounded, and closed without a trace."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import anyio
import anyio.to_thread
import pytest

import batched
from stage import BOUND, Stage

pytestmark = pytest.mark.anyio

SYNC = ("threads", "acall", "connect")


async def iterated(stage: Stage, items: Any, **options: Any) -> AsyncGenerator[Any]:
    """Yield the results of `map`. A thread asks a plain iterator for them."""
    results = stage.fn.map(items, **options)
    if stage.kind not in SYNC:
        async with aclosing(results):
            async for result in results:
                yield result
        return
    end = object()
    try:
        while (result := await anyio.to_thread.run_sync(next, results, end)) is not end:
            yield result
    finally:
        results.close()


async def collect(stage: Stage, items: Any, **options: Any) -> list[Any]:
    return [result async for result in iterated(stage, items, **options)]


async def test_results_come_in_order(stage: Stage) -> None:
    stage.decorate(batch_size=4)
    assert await collect(stage, range(50)) == [("done", i) for i in range(50)]
    assert await collect(stage, []) == []


async def test_items_are_taken_only_a_bounded_way_ahead(stage: Stage) -> None:
    stage.decorate(batch_size=4)
    taken = 0

    def source() -> Iterator[int]:
        nonlocal taken
        for i in range(100):
            taken += 1
            yield i

    seen = 0
    async for _ in iterated(stage, source(), buffersize=7):
        seen += 1
        assert taken <= seen + 7
    assert seen == taken == 100


def test_a_result_that_is_ready_is_yielded_before_further_items_are_taken() -> None:
    answered = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        assert answered.wait(BOUND)
        yield 1
        pytest.fail("an item was taken too early")

    with batched.dynamically(on_batch=lambda _: answered.set())(lambda items: items) as fn:
        assert next(fn.map(source())) == 0


async def test_nothing_is_taken_before_the_first_result_is_asked_for(stage: Stage) -> None:
    stage.decorate()
    results = stage.fn.map(iter(pytest.fail, None))
    if stage.kind in SYNC:
        results.close()
    else:
        await results.aclose()
    assert stage.fn.stats.calls == 0


async def test_a_failed_item_raises_or_stands_in_its_place(stage: Stage) -> None:
    stage.decorate(
        lambda items: [ValueError(i) if i == 2 else i for i in items],
        length=lambda item: 1 if item != 3 else 1 / 0,
    )
    with pytest.raises(ValueError, match="2"):
        await collect(stage, range(5))
    results = await collect(stage, range(5), return_exceptions=True)
    kinds = [r if isinstance(r, int) else type(r) for r in results]
    assert kinds == [0, 1, ValueError, ZeroDivisionError, 4]


async def test_an_error_of_the_source_comes_after_the_results_before_it(stage: Stage) -> None:
    stage.decorate()

    def source() -> Iterator[int]:
        yield from range(3)
        raise LookupError("no more")

    seen: list[Any] = []
    with pytest.raises(LookupError, match="no more"):
        async for result in iterated(stage, source()):
            seen.append(result)
    assert seen == [("done", 0), ("done", 1), ("done", 2)]


async def test_closing_it_cancels_waiting_items(stage: Stage) -> None:
    fn = stage.decorate(gated=True, batch_size=2)
    async with aclosing(iterated(stage, range(100), buffersize=10)) as results:
        stage.let_through(1)
        first = await anext(results)
    assert first == ("done", 0)
    await stage.until(lambda: fn.stats.queue_size == 0)
    stage.let_through(1)
    await stage.until(lambda: fn.stats.in_flight == 0)
    assert sum(map(len, stage.batches)) <= 4


async def test_a_result_that_is_late_is_a_timeout(stage: Stage) -> None:
    stage.decorate(gated=True)
    with pytest.raises(TimeoutError, match="timeout.*seconds.*for all results together"):
        await collect(stage, [1], timeout=0.01)
    with pytest.raises(TimeoutError):
        await collect(stage, [1], timeout=0.01, return_exceptions=True)
    await stage.until(lambda: stage.fn.stats.queue_size == 0)


async def test_it_never_overfills_the_queue(stage: Stage) -> None:
    stage.skip_if_connected("a client does not know the queue of the process")
    stage.decorate(max_queue_size=3, on_full="raise")
    assert await collect(stage, range(50), buffersize=20) == [("done", i) for i in range(50)]


async def test_the_source_may_be_asynchronous(stage: Stage) -> None:
    if stage.kind in SYNC:
        pytest.skip("a plain iterator cannot await")

    async def source() -> AsyncIterator[int]:
        for i in range(20):
            await anyio.lowlevel.checkpoint()
            yield i

    stage.decorate(batch_size=4)
    assert await collect(stage, source()) == [("done", i) for i in range(20)]
