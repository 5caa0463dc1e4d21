"""Errors of collators, as the callers of a batch get them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import batched
from batched._collate.arguments import Arguments
from batched._collate.collator import Call
from batched._collate.items import ItemCollator
from batched._core.policy import BatchPolicy
from batched._core.scheduler import Batch, Request, Scheduler, Slice
from batched._execution.execution import Execution
from batched._runtime.settling import complete, settle


class Parts(ItemCollator):
    """A collator that fails in one step."""

    def __init__(self, failing: str = "") -> None:
        super().__init__("fn")
        self.failing = failing

    def collate(self, slices: list[Slice], _: Batch) -> Call:
        return (
            (
                self._do(
                    "collate",
                    [item for request, start, stop in slices for item in request.items[start:stop]],
                ),
            ),
            {},
            None,
        )

    def split(self, output: Any, slices: list[Slice], _: None) -> Sequence[Any]:
        return self._do("split", [output[: stop - start] for _, start, stop in slices])

    def join(self, request: Request, parts: list[Any]) -> Any:
        return self._do("join", parts)

    def _do(self, step: str, outcome: list[Any]) -> list[Any]:
        if step == self.failing:
            raise SystemExit(f"{step} failed")
        return outcome


NO_ARGUMENTS = Arguments((), {})


async def returned(items: Any) -> Any:
    return items


@pytest.mark.parametrize("coroutine", [False, True])
@pytest.mark.parametrize("step", ["collate", "split", "join"])
def test_an_error_of_the_collator_reaches_the_callers_of_its_batch(
    step: str, coroutine: bool
) -> None:
    collator = Parts(step)
    execution = Execution(returned if coroutine else (lambda items: items), collator)
    scheduler = Scheduler(BatchPolicy(batch_size=3))  # the calls are split
    requests = [Request([i] * 4, 4, NO_ARGUMENTS, waker=object()) for i in range(2)]
    for request in requests:
        scheduler.submit(request, 0.0)
    ended: list[Request] = []
    while (batch := scheduler.take(0.0)) is not None:
        outcomes = asyncio.run(execution.run_async(batch)) if coroutine else execution.run(batch)
        scheduler.finished(batch, 1.0)
        ended += settle(scheduler, outcomes)[1]
    assert complete(ended, collator.join, "fn") == 2
    for request in requests:
        assert isinstance(request.error, batched.BatchFunctionError)
        assert isinstance(request.error.__cause__, SystemExit)
