"""`isolate_errors`: what fails is run again in halves until the items that fail stand alone. On every runtime."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import batched
from stage import Stage

pytestmark = pytest.mark.anyio


class BadItem(Exception):
    pass


def picky(items: list[Any]) -> list[Any]:
    bad = [item for item in items if isinstance(item, str)]
    if bad:
        raise BadItem(*bad)
    return [item * 2 for item in items]


async def together(stage: Stage, items: list[Any]) -> list[Any]:
    """What each of the calls, all of which wait before any of them runs, returned or raised."""
    before = len(stage.batches)
    async with stage.callers() as callers:
        await callers.call(0)
        await stage.running(before + 1)
        for item in items:
            await callers.call(item)
        stage.let_through(1000)
    del stage.batches[: before + 1]
    return [callers.answers[number] for number in range(1, len(items) + 1)]


async def test_one_bad_item_in_64_costs_13_calls_and_fails_alone(stage: Stage) -> None:
    fn = stage.decorate(picky, gated=True, batch_size=64, isolate_errors=True)
    answers = await together(stage, [*range(40), "bad", *range(41, 64)])
    assert len(stage.batches) == 13
    assert isinstance(answers[40], BadItem)
    assert (answers[40].args, answers[40].__cause__) == (("bad",), None), "it failed alone, and is told so"
    assert [answer for number, answer in enumerate(answers) if number != 40] == [2 * i for i in range(64) if i != 40]
    assert (fn.stats.errors, fn.stats.total_batches) == (1, 2)


@pytest.mark.parametrize("bad", [{0}, {7}, {0, 7}, {2, 3, 4}, set(range(8)), set()], ids=str)
async def test_whichever_items_are_bad_the_others_get_their_results(stage: Stage, bad: set[int]) -> None:
    stage.decorate(picky, gated=True, batch_size=8, isolate_errors=True)
    answers = await together(stage, [f"bad {i}" if i in bad else i for i in range(8)])
    for i, answer in enumerate(answers):
        assert isinstance(answer, BadItem) and answer.args == (f"bad {i}",) if i in bad else answer == 2 * i
    assert len(stage.batches) <= 2 * 8 - 1


async def test_a_list_call_fails_with_its_first_bad_item_and_others_do_not(stage: Stage) -> None:
    stage.decorate(picky, gated=True, batch_size=8, isolate_errors=True)
    answers = await together(stage, [1, [2, "first", "second", 3], 4])
    assert answers[0::2] == [2, 8]
    assert isinstance(answers[1], BadItem)
    assert answers[1].args == ("first",)
    assert ["second"] not in stage.batches, "nothing more is run for a call that has failed"


async def test_a_function_that_leaves_out_bad_items_is_found_out(stage: Stage) -> None:
    def filtering(items: list[Any]) -> list[Any]:
        return [item for item in items if item != "bad"]

    stage.decorate(filtering, gated=True, isolate_errors=True)
    answers = await together(stage, [1, 2, "bad", 3])
    assert [answers[0], answers[1], answers[3]] == [1, 2, 3]
    assert isinstance(answers[2], batched.BatchSizeMismatch)
    assert (answers[2].expected, answers[2].actual) == (1, 0)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
async def test_what_ends_a_program_is_not_tried_again(stage: Stage, error: BaseException) -> None:
    def ending(items: list[Any]) -> list[Any]:
        if "bad" in items:
            raise error
        return items

    stage.decorate(ending, gated=True, isolate_errors=True)
    answers = await together(stage, [1, "bad", 2])
    assert len(stage.batches) == 1
    assert all(isinstance(answer, batched.BatchFunctionError) and answer.__cause__ is error for answer in answers)


async def test_without_it_a_batch_fails_as_one(stage: Stage) -> None:
    stage.decorate(picky, gated=True)
    answers = await together(stage, [1, "bad", 2])
    assert len(stage.batches) == 1
    assert all(isinstance(answer, BadItem) for answer in answers)


async def test_a_call_that_is_cancelled_meanwhile_is_left_out_of_its_answer_alone(stage: Stage) -> None:
    if stage.kind == "threads":
        pytest.skip("a thread that waits in a plain call cannot be cancelled")
    stage.decorate(picky, gated=True, isolate_errors=True)
    async with stage.callers() as callers:
        await callers.call(0)
        await stage.running(1)
        async with anyio.create_task_group() as group:
            group.start_soon(stage.call, "bad")
            await stage.queued(1)
            await callers.call(1)
            await callers.call(2)
            stage.let_through(2)
            await stage.running(3)
            group.cancel_scope.cancel()
        stage.let_through(1000)
    assert callers.answers == {0: 0, 1: 2, 2: 4}
