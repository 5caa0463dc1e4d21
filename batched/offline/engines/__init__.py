"""Engines: where the function of a step computes."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ..step import Step
from .cluster import Ray
from .engine import Engine, Worker
from .function import pickle_step
from .processes import ProcessWorker
from .ray import Actors, ActorWorker, join
from .threads import LocalWorker, LoopWorker

__all__ = ["Engine", "engine_for"]


def engine_for(
    step: Step, on_fatal: Callable[[BaseException], object], ray: Ray | None = None
) -> Engine:
    """Return the engine for a step.

    Coroutine functions always run on a loop of this process.

    Raises:
        TypeError: the function cannot be sent to a process.
        ValueError: this system cannot run the function in processes.
    """
    workers: list[Worker]
    count = step.workers or 1
    if step.is_coroutine:
        workers = [LoopWorker(step)] * count
    elif ray is not None:
        join(ray)
        actors = Actors(step)
        workers = [ActorWorker(step, ray, actors) for _ in range(count)]
    elif not step.processes:
        workers = [LocalWorker(step) for _ in range(count)]
    elif sys.platform == "win32":
        raise ValueError(f"step {step.name!r}: processes=True needs Linux or macOS")
    else:
        payload = pickle_step(step)
        workers = [ProcessWorker(step, payload) for _ in range(count)]
    return Engine(step, workers, on_fatal)
