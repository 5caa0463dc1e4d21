"""Trials and limits of one step, with literal moments and an engine that only takes batches."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyarrow")

from batched import offline
from batched._core.request import Batch
from batched.offline.engines import Outcome
from batched.offline.run.stage import Stage
from batched.offline.run.verdicts import Row

pytestmark = pytest.mark.once


class Taking:
    """An engine that computes nothing."""

    slots = 1

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def start(self) -> None:
        pass

    def submit(self, batch: Batch, *, isolating: bool) -> None:
        self.batches.append(batch)

    def end(self, result: Any) -> Outcome:
        """Return the outcome of the oldest batch, with one result for all its rows."""
        batch = self.batches.pop(0)
        listed = not isinstance(result, Exception)
        results = [
            [result] * (stop - start) if request.listed and listed else result
            for request, start, stop in batch.slices
        ]
        return Outcome(batch, batch.slices, results, [1] * len(results), 1.0)


def stage_of(**settings: Any) -> tuple[Stage, Taking]:
    def same(items: list[Any], *_: Any) -> list[Any]:
        return items

    engine: Any = Taking()
    settings = {"batch_size": 4, **settings}
    return Stage(0, offline.Step(same, input="n", output="m", **settings), engine), engine


def rows(*values: Any) -> list[Row]:
    return [Row(number, (0,), {"n": value}, number) for number, value in enumerate(values)]


def items(batch: Batch) -> list[Any]:
    return [item for request, start, stop in batch.slices for item in request.items[start:stop]]


def test_a_step_in_doubt_gets_single_rows_from_all_that_wait_and_all_that_failed() -> None:
    stage, engine = stage_of(route=lambda n: n % 3)
    stage.enter(rows(*range(24)), 0.0)
    stage.dispatch(0.0, drain=False)
    sent = [items(batch) for batch in engine.batches]
    assert sent == [[0, 3, 6, 9], [12, 15, 18, 21]], "for each slot one batch runs and one waits"
    for now in (1.0, 2.0):
        stage.end(engine.end(ValueError("bad")), now)
    tried = []
    for now in map(float, range(3, 11)):
        stage.dispatch(now, drain=False)
        (batch,) = engine.batches
        tried += [request.items[0] for request, _, _ in batch.slices]
        stage.end(engine.end(ValueError("bad")), now)
    assert len(set(tried)) == 8
    assert {n % 3 for n in tried} == {0, 1, 2}
    stage.dispatch(11.0, drain=False)
    assert stage.end(engine.end(5), 12.0)[0].result == 5, "the row that succeeds keeps its result"
    stage.dispatch(12.0, drain=False)
    assert len(engine.batches) == 2, "the doubt has ended"


def test_a_step_without_a_row_to_try_waits_for_more() -> None:
    stage, engine = stage_of()
    stage.enter(rows(*range(5)), 0.0)
    stage.dispatch(0.0, drain=False)
    stage.end(engine.end(ValueError("bad")), 1.0)
    for now in map(float, range(2, 8)):
        stage.dispatch(now, drain=False)
        if engine.batches:
            stage.end(engine.end(ValueError("bad")), now)
    assert (stage.verdicts.pending, stage.take_dead()) == (5, [])
    stage.dispatch(8.0, drain=True)
    assert len(stage.take_dead()) == 5


def test_a_sample_that_cannot_be_prepared_fails_its_trial() -> None:
    stage, engine = stage_of(preprocess=lambda n: 1 // n)
    (stage.verdicts.sample,) = rows(0)
    stage.verdicts.doubt(1.0)
    stage.dispatch(1.0, drain=False)
    assert not engine.batches
    assert stage.verdicts.in_doubt
    assert stage.verdicts.next_moment() > 1.0
