"""Calls handed to a scheduler and batches taken from it, where every `now` is a literal number of
seconds.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from batched._core.policy import BatchPolicy
from batched._core.scheduler import Batch, Request, Scheduler


def call(size: int = 1, group: Hashable = "g") -> Request:
    return Request(list(range(size)), size, group, waker=None)


def scheduler(batch_size: int = 4, **settings: Any) -> Scheduler:
    return Scheduler(BatchPolicy(batch_size=batch_size, **settings))


def submitted(to: Scheduler, *requests: Request, now: float = 0.0) -> None:
    for request in requests:
        to.submit(request, now)


def taken(of: Scheduler, now: float = 0.0) -> Batch:
    batch = of.take(now)
    assert batch is not None
    return batch


def ran(of: Scheduler, now: float = 0.0) -> Batch:
    batch = taken(of, now)
    of.finished(batch, now)
    return batch


def all_ran(of: Scheduler, now: float = 0.0) -> list[Batch]:
    batches: list[Batch] = []
    while (batch := of.take(now)) is not None:
        of.finished(batch, now)
        batches.append(batch)
    return batches
