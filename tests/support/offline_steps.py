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
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from batched._collate.arguments import Arguments, Binder
from batched._core.request import Batch, Request
from batched.offline import Step
from batched.offline.engines import Engine, Outcome, engine_for
from batched.offline.engines.cluster import Ray

NO_ARGUMENTS = Arguments((), {})
BINDER = Binder(lambda items, key: items, "fn", leading=1)

SOON = 30.0
"""Longest wait for an event that comes at once (s)."""


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


class Counted:
    """A batch function that doubles numbers, notes its calls, and fails for the rows in `bad`."""

    def __init__(
        self, bad: Collection[int] = (), error: Exception | None = None, most: int = 1000
    ) -> None:
        self.bad = set(bad)
        self.error = error or ValueError("bad row")
        self.most = most  # rows that memory has room for
        self.calls: list[list[int]] = []

    def __call__(self, items: list[int]) -> list[int]:
        self.calls.append(items)
        if len(items) > self.most:
            raise MemoryError
        if self.bad.intersection(items):
            raise self.error
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
        case "exit 0":
            os._exit(0)
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


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)
        self.lock = threading.Lock()


def raise_unpicklable(items: list[Any]) -> list[Any]:
    raise Unpicklable("one", "two") from KeyError("cause")


def step_of(func: Callable[..., Any], **settings: Any) -> Step:
    return Step(func, **{"input": "n", "output": "m", **settings})


def batch_of(rows: list[Any], arguments: Arguments = NO_ARGUMENTS) -> Batch:
    """Return a batch of one request a row, as a stage forms it."""
    slices = [(Request(row, 1, arguments), 0, 1) for row in rows]
    return Batch(slices, len(slices), "full", 0.0)


def routed(key: str, rows: list[Any]) -> Batch:
    """Return a batch of one routing key, which equal keys share as requests of a step do."""
    return batch_of(rows, BINDER.bind((key,), {}))


def close(engine: Engine, seconds: float = SOON) -> None:
    """Close `engine`; its running calls may take this time (s)."""
    engine.close(time.perf_counter() + seconds)


@contextmanager
def running(
    func: Callable[..., Any], ray: Ray | None = None, **settings: Any
) -> Iterator[tuple[Engine, SimpleQueue[Outcome]]]:
    """Start an engine, and yield it with the queue of its outcomes."""
    outcomes: SimpleQueue[Outcome] = SimpleQueue()
    engine = engine_for(step_of(func, **settings), outcomes.put, ray)
    engine.start()
    try:
        yield engine, outcomes
    finally:
        close(engine)


def outcome(func: Callable[..., Any], rows: list[Any], **settings: Any) -> Outcome:
    """Return the outcome of one batch of `rows`."""
    isolating = settings.pop("isolating", False)
    with running(func, **settings) as (engine, outcomes):
        engine.submit(batch_of(rows), isolating=isolating)
        return outcomes.get(timeout=SOON)


def results(done: Outcome) -> list[Any]:
    """Return the results of `done` in the order of its batch."""
    assert done.batch is not None
    found = {id(each[0]): result for each, result in zip(done.slices, done.results, strict=True)}
    return [found[id(each[0])] for each in done.batch.slices]


def ask(engine: Engine, outcomes: SimpleQueue[Outcome], *batches: Batch) -> list[Any]:
    """Return the results of batches that are submitted one after another."""
    found = []
    for batch in batches:
        engine.submit(batch)
        found += results(outcomes.get(timeout=SOON))
    return found


_known: set[threading.Thread] = set()


def note_threads() -> None:
    """Note threads that earlier tests have left."""
    _known.clear()
    _known.update(threading.enumerate())


def leftovers() -> list[str]:
    """Return threads of engines that have begun since, and processes that this one has started."""
    found = [each.name for each in set(threading.enumerate()) - _known]
    names = [name for name in found if name.startswith("batched-")]
    return names + [f"process {pid}" for pid in spawned_by(os.getpid())]


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
