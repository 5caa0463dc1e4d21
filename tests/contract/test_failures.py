"""A failure reaches its callers unchanged, and no other caller."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import batched
from stage import Stage

pytestmark = pytest.mark.anyio


class Refused(Exception):
    """An error of the user's own."""


def failing(error: BaseException) -> Any:
    def compute(items: list[Any]) -> list[Any]:
        if "bad" in items:
            raise error
        return items

    return compute


async def test_a_lone_caller_gets_an_exception_of_its_own(stage: Stage) -> None:
    """The function keeps the one that it raised, and may raise it again."""
    error = Refused("no")
    stage.decorate(failing(error))
    for _ in range(2):
        with pytest.raises(Refused) as raised:
            await stage.call("bad")
        assert raised.value is not error
        assert raised.value.args == error.args
        raised.value.add_note("seen by one caller only")
        assert not hasattr(error, "__notes__")
    assert await stage.call("good") == "good"


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        asyncio.CancelledError(),
        StopIteration(1),
        StopAsyncIteration(),
        BaseException("odd"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_exceptions_that_must_not_reach_a_caller_are_wrapped_and_the_next_call_is_served(
    stage: Stage, error: BaseException
) -> None:
    stage.decorate(failing(error))
    with pytest.raises(batched.BatchFunctionError) as raised:
        await stage.call("bad")
    cause = raised.value.__cause__
    assert cause is not None
    assert (type(cause), cause.args) == (type(error), error.args)
    assert await stage.call("good") == "good"


async def test_an_exception_in_an_items_place_fails_that_item_alone(stage: Stage) -> None:
    stage.decorate(
        lambda items: [Refused(item) if item == "bad" else item for item in items], gated=True
    )
    async with stage.callers() as callers:
        await callers.call("busy")
        await stage.running(1)
        for item in ("good", "bad", ["also", "good"], ["one", "bad", "among"]):
            await callers.call(item)
        stage.let_through(2)
    assert len(stage.batches) == 2
    assert callers.answers[1] == "good"
    assert isinstance(callers.answers[2], Refused)
    assert callers.answers[3] == ["also", "good"]
    assert isinstance(callers.answers[4], Refused)


@pytest.mark.parametrize("batch_size", [2, 4])
async def test_a_list_of_which_several_parts_fail_is_one_failed_call(
    stage: Stage, batch_size: int
) -> None:
    stage.decorate(
        failing(Refused("no")),
        gated=True,
        batch_size=batch_size,
        isolate_errors=True,
        max_concurrent_batches=2,
    )
    async with stage.callers() as callers:
        await callers.call(["good", "bad", "good", "bad"])
        await stage.running(4 // batch_size)
        stage.let_through(10)
    assert isinstance(callers.answers[0], Refused)
    await stage.until(lambda: stage.fn.stats.in_flight == 0)
    assert stage.fn.stats.errors == 1


async def test_a_call_whose_first_part_failed_is_not_computed_further(stage: Stage) -> None:
    stage.decorate(failing(Refused("no")), batch_size=2)
    with pytest.raises(Refused):
        await stage.call(["bad", 1, 2, 3, 4, 5])
    assert stage.batches == [["bad", 1]]
    assert stage.fn.stats.queue_size == 0


@pytest.mark.parametrize(
    "output",
    [None, 3, "ab", {0: "a", 1: "b"}, {1, 2}, iter([1, 2])],
    ids=lambda output: type(output).__name__,
)
async def test_an_output_that_holds_no_results_is_an_error_that_names_it(
    stage: Stage, output: Any
) -> None:
    stage.decorate(lambda items: output)
    with pytest.raises(batched.BatchFunctionError, match=type(output).__name__):
        await stage.call([1, 2])
