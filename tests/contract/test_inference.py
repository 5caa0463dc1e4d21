"""Calls of features on every runtime: they share batches as items do, and each gets what is its
own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy
import pytest

import batched
from batched.errors import CollationError
from feature_stage import DECOY, FeatureStage, decoy
from stage import Scenario

pytestmark = pytest.mark.anyio


@pytest.fixture
async def stage(scenario: Scenario, anyio_backend: object) -> AsyncIterator[FeatureStage]:
    stage = FeatureStage(scenario)
    yield stage
    await stage.close()


def tokens(first: int, width: int = 1, rows: int = 1) -> dict[str, Any]:
    """Rows of tokens, the first of which are numbered."""
    ids = numpy.full((rows, width), 100)
    ids[:, 0] = range(first, first + rows)
    return {"ids": ids}


def hidden(features: dict[str, Any], scale: int = 1) -> Any:
    return {
        "hidden": features["ids"][:, :, None] * numpy.ones(13, int) * scale,
        "first": features["ids"][:, 0] * scale,
    }


def first_of(stage: FeatureStage) -> list[list[int]]:
    """The first token of each row in each batch."""
    return [features["ids"][:, 0].tolist() for features in stage.seen]


async def test_a_call_gets_its_own_rows(stage: FeatureStage) -> None:
    stage.decorate(hidden)
    result = await stage.call(tokens(5, width=2, rows=3))
    assert result["first"].tolist() == [5, 6, 7]
    assert result["hidden"].shape == (3, 2, 13)


async def test_calls_made_while_the_worker_is_busy_run_together_in_their_order(
    stage: FeatureStage,
) -> None:
    stage.decorate(hidden)
    async with stage.callers() as callers:
        await callers.call(decoy())
        await stage.running(1)
        numbers = [
            await callers.call(tokens(10 * width, width=width, rows=2)) for width in (1, 3, 2, 4)
        ]
        stage.let_through(1)
    assert first_of(stage)[0] == [10, 11, 30, 31, 20, 21, 40, 41]
    assert stage.seen[0]["ids"].shape == (8, 4)
    for number, width in zip(numbers, (1, 3, 2, 4), strict=True):
        assert callers.answers[number]["first"].tolist() == [10 * width, 10 * width + 1]
        assert callers.answers[number]["hidden"].shape == (2, width, 13)
    # it cannot be split, so the shortest rows run first, and what they show is enough
    assert [features["ids"].shape for features in stage.seen] == [(8, 4), (2, 1), (6, 4)]


async def test_a_call_larger_than_a_batch_is_put_together_in_its_order(stage: FeatureStage) -> None:
    stage.decorate(hidden, batch_size=4)
    async with stage.callers() as callers:
        await callers.call(decoy())
        await stage.running(1)
        large = await callers.call(tokens(0, width=3, rows=11))
        small = await callers.call(tokens(50, width=2))
        stage.let_through(1)
    assert callers.answers[large]["first"].tolist() == list(range(11))
    assert callers.answers[large]["hidden"].shape == (11, 3, 13)
    assert callers.answers[small]["hidden"].tolist() == [[[50] * 13, [100] * 13]]


async def test_calls_with_different_arguments_never_share_a_batch(stage: FeatureStage) -> None:
    stage.decorate(hidden)
    async with stage.callers() as callers:
        await callers.call(decoy())
        await stage.running(1)
        numbers = [await callers.call(tokens(i), scale=1 + i % 2) for i in range(6)]
        stage.let_through(1)
    assert sorted(first_of(stage)) == [[0, 2, 4], [1, 3, 5]]
    assert [callers.answers[number]["first"].tolist() for number in numbers] == [
        [i * (1 + i % 2)] for i in range(6)
    ]


async def test_features_that_make_no_batch_are_refused_to_their_caller_alone(
    stage: FeatureStage,
) -> None:
    stage.decorate(hidden)
    async with stage.callers() as callers:
        await callers.call(decoy())
        await stage.running(1)
        good = [await callers.call(tokens(1))]
        bad = await callers.call({"ids": numpy.zeros((2, 1)), "mask": numpy.zeros((3, 1))})
        good.append(await callers.call(tokens(2)))
        stage.let_through(1)
    assert isinstance(callers.answers[bad], CollationError)
    assert [callers.answers[number]["first"].tolist() for number in good] == [[1], [2]]
    assert first_of(stage) == [[1, 2]]


async def test_a_failure_reaches_all_callers_of_its_batch_and_no_other(stage: FeatureStage) -> None:
    def compute(features: dict[str, Any]) -> Any:
        if (features["ids"] == 13).any():
            raise KeyError("unlucky")
        return hidden(features)

    stage.decorate(compute)
    async with stage.callers() as callers:
        await callers.call(decoy())
        await stage.running(1)
        failed = [await callers.call(tokens(i)) for i in (12, 13)]
        other = await callers.call({"ids": numpy.zeros((1, 1), numpy.int32)})
        stage.let_through(1)
    assert [type(callers.answers[number]) for number in failed] == [KeyError, KeyError]
    assert callers.answers[other]["first"].tolist() == [0]
    assert (await stage.call(tokens(1)))["first"].tolist() == [1]


async def test_what_runs_out_of_memory_is_served_in_parts(stage: FeatureStage) -> None:
    def compute(features: dict[str, Any]) -> Any:
        if len(features["ids"]) > 3:
            raise MemoryError
        return hidden(features)

    stage.decorate(compute)
    async with stage.callers() as callers:
        await callers.call(decoy())
        await stage.running(1)
        numbers = [
            await callers.call(tokens(10 * width, width=width, rows=2)) for width in (1, 2, 3)
        ]
        stage.let_through(1)
    for number, width in zip(numbers, (1, 2, 3), strict=True):
        assert callers.answers[number]["first"].tolist() == [10 * width, 10 * width + 1]
        assert callers.answers[number]["hidden"].shape == (2, width, 13)
    assert stage.fn.stats.errors == 0
    assert stage.fn.stats.memory_errors > 0


async def test_features_reach_a_function_by_keyword_if_it_wants_them_so(
    stage: FeatureStage,
) -> None:
    stage.decorate(hidden, spread_kwargs=True)
    async with stage.callers() as callers:
        await callers.call(decoy())
        await stage.running(1)
        numbers = [await callers.call(tokens(i)) for i in range(3)]
        stage.let_through(1)
    assert first_of(stage) == [[0, 1, 2]]
    assert [callers.answers[number]["first"].tolist() for number in numbers] == [[0], [1], [2]]
    assert (await stage.fn.acall(ids=tokens(4)["ids"]))["first"].tolist() == [4]


async def test_closing_finishes_what_was_accepted_and_refuses_what_comes_later(
    stage: FeatureStage,
) -> None:
    fn = stage.decorate(hidden, batch_size=2)
    async with stage.callers() as callers:
        await callers.call(decoy())
        await stage.running(1)
        numbers = [await callers.call(tokens(i, width=1 + i % 3)) for i in range(5)]
        async with anyio.create_task_group() as group:
            group.start_soon(fn.aclose)
            stage.let_through(1)
    assert [callers.answers[number]["first"].tolist() for number in numbers] == [
        [i] for i in range(5)
    ]
    with pytest.raises(batched.BatcherClosed):
        await stage.call(tokens(1))
    assert list(callers.answers[0]) == [DECOY]
