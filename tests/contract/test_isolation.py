"""`isolate_errors`: what fails is run again in halves until the items that fail stand alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stage import Stage

pytestmark = pytest.mark.anyio

BAD = 100
"""Numbers from this one on are bad."""


class BadItem(Exception):
    pass


def picky(numbers: list[int]) -> list[int]:
    bad = [number for number in numbers if number >= BAD]
    if bad:
        raise BadItem(*bad)
    return [2 * number for number in numbers]


async def together(stage: Stage, calls: Sequence[int | list[int]]) -> list[Any]:
    """Return the result or the error of each call. All calls wait before one of them runs."""
    async with stage.busy(0) as callers:
        numbers = [await callers.call(call) for call in calls]
        stage.let_through(1000)
    return [callers.answers[number] for number in numbers]


@pytest.mark.once
async def test_one_bad_item_in_64_costs_13_calls_and_fails_alone(stage: Stage) -> None:
    fn = stage.decorate(picky, gated=True, batch_size=64, isolate_errors=True)
    answers = await together(stage, [BAD if number == 40 else number for number in range(64)])
    assert len(stage.batches) == 1 + 13
    failed = answers.pop(40)
    assert isinstance(failed, BadItem)
    assert (failed.args, failed.__cause__) == ((BAD,), None), "it failed alone, and is told so"
    assert answers == [2 * number for number in range(64) if number != 40]
    assert (fn.stats.errors, fn.stats.total_batches) == (1, 2)


@pytest.mark.once
@pytest.mark.parametrize("bad", [{0, 3, 4}, set(range(8))], ids=str)
async def test_good_items_get_their_results_whichever_items_are_bad(
    stage: Stage, bad: set[int]
) -> None:
    stage.decorate(picky, gated=True, batch_size=8, isolate_errors=True)
    answers = await together(stage, [BAD + i if i in bad else i for i in range(8)])
    for i, answer in enumerate(answers):
        if i in bad:
            assert isinstance(answer, BadItem)
            assert answer.args == (BAD + i,)
        else:
            assert answer == 2 * i
    assert len(stage.batches) <= 1 + 2 * 8 - 1


async def test_a_call_of_several_fails_with_its_first_bad_item_and_no_other_call_fails(
    stage: Stage,
) -> None:
    stage.decorate(picky, gated=True, batch_size=8, isolate_errors=True)
    first, bad, last = await together(stage, [1, [2, BAD + 1, BAD + 2, 3], 4])
    assert (first, last) == (2, 8)
    assert isinstance(bad, BadItem)
    assert bad.args == (BAD + 1,)
    assert [BAD + 2] not in stage.batches, "nothing more is run for a call that has failed"
