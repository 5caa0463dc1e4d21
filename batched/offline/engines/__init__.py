"""Engines: where the function of a step computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ..step import Step
from .cluster import Ray
from .engine import Engine, Worker
from .function import pickle_step
from .processes import ProcessWorker
from .ray import ActorPool
from .threads import LocalWorker

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
    count = step.workers or 1
    workers: Sequence[Worker]
    if step.is_coroutine:
        workers = [LocalWorker(step)]
    elif ray is not None:
        workers, count = [ActorPool(step, ray)], count * ray.max_in_flight
    elif not step.processes:
        workers = [LocalWorker(step) for _ in range(count)]
    elif sys.platform == "win32":
        raise ValueError(f"step {step.name!r}: processes=True needs Linux or macOS")
    else:
        payload = pickle_step(step)
        workers = [ProcessWorker(step, payload) for _ in range(count)]
    return Engine(step, workers, on_fatal, count)
