"""Closed-loop callers: each item is called once, and no call begins after the end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("numpy")

import batched
from batched._commands.load import make_calls

FULL: dict[str, Any] = {"batch_size": 4, "flush": "window", "timeout_ms": 40_000}


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


async def double_one(item: int) -> int:
    return 2 * item


@pytest.mark.parametrize(
    ("make", "mean_batch"),
    [
        (lambda: lambda item: 2 * item, 1),
        (lambda: double_one, 1),
        (lambda: batched.dynamically(**FULL)(double), 4),
        (lambda: batched.aio.dynamically(**FULL)(double), 4),
    ],
    ids=["threads", "coroutines", "batched threads", "batched coroutines"],
)
def test_each_item_is_called_once_and_its_answer_is_handed_on(
    make: Callable[[], Any], mean_batch: float
) -> None:
    answers: dict[int, int] = {}
    call = make()
    calls = asyncio.run(make_calls(call, iter(range(40)), 4, answered=answers.__setitem__))
    assert answers == {item: 2 * item for item in range(40)}
    assert (calls.callers, len(calls.latencies), calls.mean_batch) == (4, 40, mean_batch)
    assert calls.seconds > 0
    assert calls.rate == 40 / calls.seconds
    assert calls.percentile(50) <= calls.percentile(99) <= max(calls.latencies)
    if mean_batch > 1:
        call.shutdown()


def test_no_call_begins_after_the_end() -> None:
    def call(item: int) -> None:
        raise AssertionError

    endless = itertools.count()
    calls = asyncio.run(make_calls(call, endless, 2, until=time.perf_counter()))
    assert calls.latencies == []
