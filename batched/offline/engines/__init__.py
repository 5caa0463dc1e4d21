"""Engines: where the function of a step computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ..step import Step
from .cluster import Ray
from .engine import Engine, Outcome, Worker
from .function import pickle_step
from .processes import ProcessWorker
from .ray import ActorPool
from .threads import LocalWorker, LoopEngine

__all__ = ["Engine", "Outcome", "engine_for"]


def engine_for(step: Step, report: Callable[[Outcome], None], ray: Ray | None = None) -> Engine:
    """Return the engine for a step; `report` is called on its threads, once for each batch.

    Coroutine functions always run on a loop of this process.

    Raises:
        TypeError: the function cannot be sent to a process.
        ValueError: this system cannot run the function in processes.
    """
    if step.is_coroutine:
        return LoopEngine(step, report)
    count = step.workers or 1
    if ray is not None:
        return Engine(report, [ActorPool(step, ray)], count * ray.max_in_flight)
    workers: Sequence[Worker]
    if not step.processes:
        workers = [LocalWorker(step) for _ in range(count)]
    elif sys.platform == "win32":
        raise ValueError(f"step {step.name!r}: processes=True needs Linux or macOS")
    else:
        payload = pickle_step(step)
        workers = [ProcessWorker(step, payload) for _ in range(count)]
    return Engine(report, workers)
