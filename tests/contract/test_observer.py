"""`on_batch`: a record of every batch, and no harm to anybody. On every runtime."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from batched import BatchRecord
from stage import BOUND, Stage

pytestmark = pytest.mark.anyio


async def test_every_batch_is_told_of(stage: Stage) -> None:
    records: list[BatchRecord] = []
    stage.decorate(gated=True, batch_size=4, on_batch=records.append, name="it")
    async with stage.busy() as callers:
        await callers.call("a")
        await callers.call(["b", "c", "d", "e", "f"])
        stage.let_through(100)
    await stage.shut_down()
    assert [
        (record.size, record.calls, record.flush_reason, record.attempts) for record in records
    ] == [(1, 1, "eager", 1), (4, 2, "full", 1), (2, 1, records[2].flush_reason, 1)]
    assert {
        (record.name, record.outcome, record.failed, record.error, record.tokens)
        for record in records
    } == {("it", "ok", 0, None, 0)}
    assert all(record.oldest_wait >= 0 and record.processing_time >= 0 for record in records)


async def test_a_record_tells_of_padding(stage: Stage) -> None:
    records: list[BatchRecord] = []
    stage.decorate(length=len, on_batch=records.append)
    await stage.call(["a", "bcd"])
    await stage.shut_down()
    assert [(record.tokens, record.padding_waste) for record in records] == [(6, 2 / 6)]


async def test_a_record_tells_of_failures(stage: Stage) -> None:
    def compute(items: list[Any]) -> list[Any]:
        if "raise" in items:
            raise KeyError("raise")
        return [ValueError(item) if item == "bad" else item for item in items]

    records: list[BatchRecord] = []
    stage.decorate(compute, gated=True, isolate_errors=True, on_batch=records.append)
    async with stage.busy() as callers:
        for item in ("good", "bad", "raise"):
            await callers.call(item)
        stage.let_through(100)
    with pytest.raises(KeyError):
        await stage.call(["good", "raise"])
    await stage.shut_down()
    assert [(record.size, record.outcome, record.failed, record.error) for record in records] == [
        (1, "ok", 0, None),
        (3, "partial", 2, "ValueError"),
        (2, "failed", 2, "KeyError"),
    ]
    assert [record.attempts for record in records] == [1, 3, 3]


@pytest.mark.parametrize("error", [KeyError("broken"), SystemExit(1)], ids=repr)
async def test_an_observer_that_raises_is_logged_once_and_harms_nobody(
    stage: Stage, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []

    def broken(record: BatchRecord) -> None:
        seen.append(record.size)
        raise error

    stage.decorate(on_batch=broken, name="it")
    with caplog.at_level(logging.ERROR, "batched"):
        assert [await stage.call(i) for i in range(3)] == [("done", i) for i in range(3)]
        await stage.shut_down()
        await stage.until(lambda: seen == [1, 1, 1])
    assert [record.getMessage() for record in caplog.records] == [
        "on_batch of it raised; further failures of it are not logged"
    ]


async def test_callers_are_answered_before_the_observer_is_called(stage: Stage) -> None:
    if stage.kind == "aio-coroutine":
        pytest.skip("callers on the loop that runs the observer go on when it returns")
    answered = threading.Event()
    in_time: list[bool] = []
    stage.decorate(on_batch=lambda _: in_time.append(answered.wait(BOUND)))
    assert await stage.call(1) == ("done", 1)
    answered.set()
    await stage.shut_down()
    assert in_time == [True]
