"""Engines: where the function of a step computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from .base import Engine, Worker
from .processes import ProcessWorker
from .ray import ActorPool
from .spec import Outcome, Spec
from .threads import LocalWorker, LoopEngine

__all__ = ["Engine", "Outcome", "Spec", "engine_for"]


def engine_for(spec: Spec, report: Callable[[Outcome], None]) -> Engine:
    """Return the engine for a step; `report` is called on its threads, once for each batch.

    Coroutine functions always run on a loop of this process.

    Raises:
        TypeError: the function cannot be sent to a process.
        ValueError: this system cannot run the function in processes.
    """
    workers: Sequence[Worker]
    threads_each = 1
    if spec.is_coroutine:
        return LoopEngine(spec, report)
    if spec.ray is not None:
        workers = [ActorPool(spec, spec.ray)]
        threads_each = spec.workers * spec.ray.max_in_flight
    elif not spec.processes:
        workers = [LocalWorker(spec) for _ in range(spec.workers)]
    elif sys.platform == "win32":
        raise ValueError(f"step {spec.name!r}: processes=True needs Linux or macOS")
    else:
        payload = spec.pickled()
        workers = [ProcessWorker(spec, payload) for _ in range(spec.workers)]
    return Engine(report, workers, threads_each)
