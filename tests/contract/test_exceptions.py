"""A failed batch: each caller sees what it would see if it had called alone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import traceback
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import batched
from odd_errors import RAISING, keyword_only, uncopyable
from stage import BOUND, Gate, Stage

Raise = Callable[[], None]

MANY = 64
"""Callers in one batch."""

pytestmark = pytest.mark.anyio


def failing(raises: Raise) -> Callable[[list[Any]], list[Any]]:
    def compute(items: list[Any]) -> list[Any]:
        if "busy" not in items:
            raises()
        return items

    return compute


async def seen(call: Callable[[], Any], number: int) -> str:
    """Return all that the caller with that number sees of the error of its call."""
    try:
        await call()
    except Exception as error:
        own = [
            frame.f_locals["number"]
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_code is seen.__code__
        ]
        assert own == [number], "frames, and locals, of others"
        return "".join(traceback.format_exception(error))
    raise AssertionError("it did not fail")


@pytest.mark.parametrize("raises", RAISING)
async def test_a_caller_in_company_sees_what_a_lone_one_sees(stage: Stage, raises: Raise) -> None:
    if raises is uncopyable and stage.calls_from_threads:
        pytest.skip("threads that raise one object at the same moment see frames of each other")
    stage.decorate(failing(raises), gated=True)
    texts: dict[int, str] = {}

    async def one(number: int) -> None:
        texts[number] = await seen(lambda: stage.call("bad"), number)

    stage.let_through()
    await one(0)
    async with stage.callers() as callers:
        await callers.call("busy")
        await stage.running(2)
        async with anyio.create_task_group() as group:
            for number in range(1, 5):
                group.start_soon(one, number)
            await stage.queued(4)
            stage.let_through(2)
    assert len(stage.batches) == 3
    assert list(texts.values()) == [texts[0]] * 5


@pytest.mark.parametrize("raises", RAISING)
@pytest.mark.parametrize("coroutine", [True, False])
def test_errors_of_many_coroutines_are_no_longer_than_those_of_lone_ones(
    raises: Raise, coroutine: bool
) -> None:
    plain = failing(raises)

    async def awaited(items: list[Any]) -> list[Any]:
        return plain(items)

    fn: Any = batched.aio.dynamically(batch_size=MANY)(awaited if coroutine else plain)

    async def call() -> None:
        await fn("bad")

    async def main() -> None:
        async with asyncio.timeout(BOUND):
            alone = [await seen(call, number) for number in range(4)]
            many = await asyncio.gather(*(seen(call, number) for number in range(MANY)))
            assert many == [alone[0]] * MANY
            assert alone == [alone[0]] * 4
            assert fn.stats.total_batches < MANY, "they shared batches"
            await fn.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("raises", [each for each in RAISING if each is not uncopyable])
async def test_a_change_of_an_exception_by_one_caller_reaches_no_other_caller(
    stage: Stage, raises: Raise
) -> None:
    stage.decorate(failing(raises), gated=True)
    async with stage.callers() as callers:
        await callers.call("busy")
        await stage.running(1)
        for _ in range(3):
            await callers.call("bad")
        stage.let_through(2)
    first, *others = [callers.answers[number] for number in (1, 2, 3)]
    before = [(vars(other).copy(), traceback.format_exception(other)) for other in others]
    first.add_note("mine")
    first.mine = True
    first.__cause__ = ValueError("mine")
    for part in getattr(first, "exceptions", ()):
        part.add_note("mine")
    assert [(vars(other), traceback.format_exception(other)) for other in others] == before


@pytest.mark.parametrize("raises", [keyword_only, uncopyable])
def test_futures_of_one_batch_raise_no_frames_of_each_other(raises: Raise) -> None:
    gate = Gate()
    fn: Any = batched.dynamically(lambda items: failing(raises)(gate(items)))
    fn.submit("busy")
    assert gate.entered.wait(BOUND)
    futures = [fn.submit("bad") for _ in range(4)]
    gate.opened.set()
    concurrent.futures.wait(futures, timeout=BOUND)  # the worker touches the error no more

    def result(number: int) -> str:
        try:
            futures[number].result(BOUND)
        except Exception as error:
            return "".join(traceback.format_exception(error))
        raise AssertionError("it did not fail")

    texts = [result(number) for number in range(4)]
    assert texts == [texts[0]] * 4
    if raises is uncopyable:  # the others are as futures are: each raise adds to them
        assert result(0) == texts[0]
    fn.shutdown()


def test_an_error_that_is_returned_again_and_again_does_not_grow() -> None:
    constant = KeyError("no such item")

    def work(items: list[Any]) -> list[Any]:
        return [constant for _ in items]

    fn: Any = batched.dynamically(work)

    async def call() -> None:
        await fn.acall("bad")

    async def main() -> None:
        texts = [await seen(call, number) for number in range(3)]
        assert texts == [texts[0]] * 3

    asyncio.run(main())
    fn.shutdown()
