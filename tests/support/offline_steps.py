"""Batch functions that fail in every way, in a module that a process can import, and engines for
tests.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from batched.offline import Step
from batched.offline.engines import engine_for
from batched.offline.engines.cluster import Ray
from batched.offline.engines.engine import SEARCHED, GivenUp, WorkerClosed

SOON = 30.0
"""Longest wait for an event that comes at once (s)."""


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


class Counted:
    """A batch function that doubles numbers, notes its calls, and fails for the rows in `bad`."""

    def __init__(
        self, bad: Collection[int] = (), error: type[Exception] = ValueError, most: int = 1000
    ) -> None:
        self.bad, self.error = set(bad), error
        self.most = most  # rows that memory has room for
        self.calls: list[list[int]] = []

    def __call__(self, items: list[int]) -> list[int]:
        self.calls.append(items)
        if len(items) > self.most:
            raise MemoryError
        if self.bad.intersection(items):
            raise self.error("bad row")
        return double(items)

    @property
    def sizes(self) -> list[int]:
        return list(map(len, self.calls))


def fail(fault: object) -> None:
    """Fail in the way that `fault` names; do nothing for any other value."""
    match fault:
        case "hang":
            time.sleep(1e6)
        case "hold the GIL":
            ctypes.PyDLL(None).sleep(10**6)  # a PyDLL keeps the GIL
        case "segfault":
            ctypes.string_at(0)
        case "exit 1":
            os._exit(1)
        case "sys.exit":
            sys.exit(0)
        case "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("bad row")


def faulty(items: list[Any]) -> list[Any]:
    for item in items:
        fail(item)
    return items


class Process:
    """A class that returns the id of its process, and can fail there."""

    def __init__(self, *faults: str) -> None:
        for fault in faults:
            fail(fault)
        self.pid = os.getpid()

    def __call__(self, items: list[Any]) -> list[int]:
        faulty(items)
        return [self.pid] * len(items)


def step_of(func: Callable[..., Any], **settings: Any) -> Step:
    return Step(func, **{"input": "n", "output": "m", **settings})


@dataclass
class Outcome:
    """Results or errors of rows that were submitted together, or the error of a worker."""

    results: list[Any]
    fatal: BaseException | None = None


class Submitter:
    """An engine that computes rows which are submitted together as soon as a worker is free.

    Rows that were not computed are not reported.
    """

    def __init__(self, step: Step, ray: Ray | None = None) -> None:
        self.outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self.engine = engine_for(step, lambda error: self.outcomes.put(Outcome([], error)), ray)
        self.engine.hold(holds=False)

    def submit(self, rows: list[Any], *args: Any, isolating: bool = False) -> None:
        found: dict[int, Any] = {}
        lock = threading.Lock()

        def ended(places: list[int], outcomes: list[Any]) -> None:
            with lock:
                for place, each in zip(places, outcomes, strict=True):
                    found[place] = each.error if isinstance(each, GivenUp) else each
                results = [found[place] for place in sorted(found)]
                if len(found) == len(rows) and WorkerClosed not in map(type, results):
                    self.outcomes.put(Outcome(results))

        self.engine.paused = False
        self.engine.submit([*rows], ended, args, SEARCHED if isolating else None)


@contextmanager
def running(
    func: Callable[..., Any], ray: Ray | None = None, **settings: Any
) -> Iterator[tuple[Submitter, SimpleQueue[Outcome]]]:
    """Start an engine, and yield it with the queue of its outcomes."""
    submitter = Submitter(step_of(func, **{"batch_size": 1024, **settings}), ray)
    try:
        yield submitter, submitter.outcomes
    finally:
        submitter.engine.close()


def outcome(func: Callable[..., Any], rows: list[Any], **settings: Any) -> Outcome:
    isolating = settings.pop("isolating", False)
    with running(func, **settings) as (submitter, outcomes):
        submitter.submit(rows, isolating=isolating)
        return outcomes.get(timeout=SOON)


def ask(submitter: Submitter, *batches: list[Any]) -> list[Any]:
    found = []
    for rows in batches:
        submitter.submit(rows)
        found += submitter.outcomes.get(timeout=SOON).results
    return found


def spawned_by(driver: int) -> list[int]:
    """Return the processes of workers whose parent is `driver`, from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if parent == driver and b"engines.serving" in command:
            found.append(int(path.name))
    return found
