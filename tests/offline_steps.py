"""Batch functions that fail in every way, in a module that a process can import, and what tests of
workers need around them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from batched._collate.arguments import Arguments
from batched._collate.items import ItemCollator
from batched._core.request import Batch, Request
from batched.offline._batch_run import Done, WorkerSpec
from batched.offline._worker import Workers, workers_of

NO_ARGUMENTS = Arguments((), {})

SOON = 30.0
"""Longest wait for what is to happen at once (s)."""


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def fail(fault: object) -> None:
    """Fails in the way that `fault` names; what is no fault is left alone."""
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
    """A class that tells which process it was built in, and can fail in it."""

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
    raise Unpicklable("one", "two")


def spec(func: Callable[..., Any], **settings: Any) -> WorkerSpec:
    name = getattr(func, "__name__", "fn")
    return WorkerSpec(0, name, func, ItemCollator(name), **settings)


def batch_of(rows: list[Any]) -> Batch:
    """A batch of one request a row, as the coordinator forms it."""
    slices = [(Request(row, 1, NO_ARGUMENTS), 0, 1) for row in rows]
    return Batch(slices, len(slices), "full", 0.0)


@contextmanager
def running(
    func: Callable[..., Any], **settings: Any
) -> Iterator[tuple[Workers, SimpleQueue[Done]]]:
    """Workers, and the queue for what becomes of their batches."""
    outbox: SimpleQueue[Done] = SimpleQueue()
    workers = workers_of(spec(func, **settings), outbox)
    workers.start()
    try:
        yield workers, outbox
    finally:
        workers.close(SOON)


def outcome(func: Callable[..., Any], rows: list[Any], **settings: Any) -> Done:
    """What became of one batch of `rows`."""
    thoroughly = settings.pop("thoroughly", False)
    with running(func, **settings) as (workers, outbox):
        workers.submit(batch_of(rows), thoroughly=thoroughly)
        return outbox.get(timeout=SOON)


def results(done: Done) -> list[Any]:
    """The results of `done` in the order of its batch."""
    assert done.batch is not None
    found = {id(each[0]): result for each, result in zip(done.slices, done.results, strict=True)}
    return [found[id(each[0])] for each in done.batch.slices]


_others: set[threading.Thread] = set()


def note_threads() -> None:
    """Notes threads that other tests have left, and may."""
    _others.clear()
    _others.update(threading.enumerate())


def leftovers() -> list[str]:
    """Threads of workers that have begun since, and processes that this one has spawned for
    them.
    """
    found = [each.name for each in set(threading.enumerate()) - _others]
    names = [name for name in found if name.startswith("batched-")]
    return names + [f"process {pid}" for pid in spawned_by(os.getpid())]


def spawned_by(driver: int) -> list[int]:
    """Processes of `multiprocessing` whose parent is `driver`, from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if parent == driver and b"spawn_main" in command:
            found.append(int(path.name))
    return found
