"""`isolate_errors`: what fails is run again in halves until the items that fail stand alone. For
all four decorators on every runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import batched
from number_stage import NumberStage

pytestmark = pytest.mark.anyio

BAD = 100
"""Numbers from this one on are bad."""


class BadItem(Exception):
    pass


@pytest.fixture
def stage(numbers: NumberStage) -> NumberStage:
    return numbers


def picky(numbers: list[int]) -> list[int]:
    bad = [number for number in numbers if number >= BAD]
    if bad:
        raise BadItem(*bad)
    return [2 * number for number in numbers]


async def together(stage: NumberStage, calls: Sequence[int | list[int]]) -> list[Any]:
    """Return the result or the error of each call. All calls wait before one of them runs."""
    async with stage.busy() as callers:
        numbers = [
            await callers.call(stage.many(call) if isinstance(call, list) else stage.one(call))
            for call in calls
        ]
        stage.let_through(1000)
    return [callers.answers[number] for number in numbers]


@pytest.mark.once
async def test_one_bad_item_in_64_costs_13_calls_and_fails_alone(stage: NumberStage) -> None:
    fn = stage.decorate(picky, gated=True, batch_size=64, isolate_errors=True)
    answers = await together(stage, [BAD if number == 40 else number for number in range(64)])
    assert len(stage.given) == 1 + 13
    failed = answers.pop(40)
    assert isinstance(failed, BadItem)
    assert (failed.args, failed.__cause__) == ((BAD,), None), "it failed alone, and is told so"
    assert [stage.values(answer) for answer in answers] == [
        [2 * number] for number in range(64) if number != 40
    ]
    assert (fn.stats.errors, fn.stats.total_batches) == (1, 2)


@pytest.mark.once
@pytest.mark.parametrize("bad", [{0, 3, 4}, set(range(8))], ids=str)
async def test_good_items_get_their_results_whichever_items_are_bad(
    stage: NumberStage, bad: set[int]
) -> None:
    stage.decorate(picky, gated=True, batch_size=8, isolate_errors=True)
    answers = await together(stage, [BAD + i if i in bad else i for i in range(8)])
    for i, answer in enumerate(answers):
        if i in bad:
            assert isinstance(answer, BadItem)
            assert answer.args == (BAD + i,)
        else:
            assert stage.values(answer) == [2 * i]
    assert len(stage.given) <= 1 + 2 * 8 - 1


async def test_a_call_of_several_fails_with_its_first_bad_item_and_no_other_call_fails(
    stage: NumberStage,
) -> None:
    stage.decorate(picky, gated=True, batch_size=8, isolate_errors=True)
    answers = await together(stage, [1, [2, BAD + 1, BAD + 2, 3], 4])
    assert [stage.values(answer) for answer in answers[0::2]] == [[2], [8]]
    assert isinstance(answers[1], BadItem)
    assert answers[1].args == (BAD + 1,)
    assert [BAD + 2] not in stage.given, "nothing more is run for a call that has failed"


def test_a_record_counts_all_items_of_a_call_of_which_one_has_failed() -> None:
    records: list[batched.BatchRecord] = []
    fn = batched.dynamically(isolate_errors=True, on_batch=records.append)(picky)
    with fn, pytest.raises(BadItem):
        fn([1, 2, 3, BAD])
    assert [(record.outcome, record.failed, record.size, record.error) for record in records] == [
        ("failed", 4, 4, "BadItem")
    ]
