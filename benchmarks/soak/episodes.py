"""Episodes of a soak: callers of every kind, faults in batches, and ends of all that may end."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import logging
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from soak.books import Books, Report
from soak.callers import BOUND, TaskCaller, ThreadCaller
from soak.faults import BATCH_KINDS, CALLBACK, FULL, HOOK, LATE, LENGTH, RETURNED
from soak.subject import Subject

LOOPS: tuple[dict[str, Any], ...] = (
    {"backend": "asyncio", "backend_options": {"use_uvloop": False}},
    {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    {"backend": "trio"},
)
"""Arguments of `anyio.run` for each loop."""
PATIENCE = BOUND + 5
"""Longest time for callers: all their waits are bounded (s)."""


def until(condition: Callable[[], bool], seconds: float = BOUND) -> bool:
    """Wait for `condition`. Return False if the time is over first."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def workers(name: str) -> list[str]:
    """Return the names of the living threads of the batcher `name`."""
    return [each.name for each in threading.enumerate() if each.name.startswith(f"batched-{name}-")]


class Crowd:
    """Threads that act at the same time, for at most `PATIENCE`."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._threads: list[threading.Thread] = []

    def start(self, action: Callable[..., object], *args: Any, **settings: Any) -> None:
        def guarded() -> None:
            try:
                action(*args, **settings)
            except BaseException:
                self._books.blame("wrong", f"a caller ended with {traceback.format_exc()}")

        self._threads.append(threading.Thread(target=guarded, daemon=True))
        self._threads[-1].start()

    @property
    def busy(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self, what: str) -> bool:
        """Return whether all threads end in time. If not, print the stacks of all threads."""
        if until(lambda: not self.busy, PATIENCE):
            return True
        self._books.blame("hung", what)
        faulthandler.dump_traceback(all_threads=True)
        return False


def start_callers(crowd: Crowd, subject: Subject, rng: random.Random, calls: int) -> None:
    """Start a thread that calls, or a loop with tasks that call."""
    rate = rng.choice([0.0, 0.005, 0.02, 0.02, 0.1])
    if not subject.coroutine and rng.random() < (0.7 if subject.kind == "threads" else 0.2):
        crowd.start(ThreadCaller(subject, random.Random(rng.random()), rate).run, calls)
        return
    tasks = rng.choice([1, 4, 16, 64])
    callers = [TaskCaller(subject, random.Random(rng.random()), rate) for _ in range(tasks)]

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(caller.run, calls)
        with anyio.move_on_after(BOUND):
            while _tasks(subject.name):  # noqa: ASYNC110  # no event tells
                await anyio.sleep(0.001)
            return
        subject.books.blame("hung", f"tasks {_tasks(subject.name)} of {subject}")

    crowd.start(anyio.run, main, **rng.choice(LOOPS))


def _tasks(name: str) -> list[str]:
    """Return the worker tasks on this loop."""
    try:
        names = [task.get_name() for task in asyncio.all_tasks()]
    except RuntimeError:
        root = sys.modules["trio"].lowlevel.current_root_task()
        names = [task.name for nursery in root.child_nurseries for task in nursery.child_tasks]
    return [each for each in names if each.startswith(f"batched-{name}")]


def shut_down(subject: Subject, rng: random.Random) -> bool:
    """Close the batcher in a random way. Return False if that hangs."""
    wait, cancel = rng.random() < 0.6, rng.random() < 0.4
    subject.books.turns += 1
    subject.books.cancels |= cancel
    kind = f"shutdown{' and wait' if wait else ''}{' and cancel' if cancel else ''}"
    subject.faults.injected.append(kind)
    crowd = Crowd(subject.books)
    for _ in range(rng.choice([1, 1, 1, 2])):
        crowd.start(subject.fn.shutdown, wait=wait, cancel_futures=cancel)
    if not crowd.join(f"{kind} of {subject}"):
        return False
    stats = subject.fn.stats
    if wait and (stats.queue_size or stats.in_flight):
        subject.books.blame("wrong", f"after a shutdown that waited: {stats!r} of {subject}")
    return True


def episode(rng: random.Random, name: str, calls: int) -> Report:
    """Call by callers of all kinds, while the batcher is closed and opened now and then."""
    subject = Subject(rng, name)
    crowd = Crowd(subject.books)
    for _ in range(rng.choice([1, 2, 2, 3])):
        start_callers(crowd, subject, rng, calls)
    for _ in range(rng.choice([0, 0, 0, 1, 2, 4])):
        time.sleep(rng.random() * 0.03)
        if not (crowd.busy and shut_down(subject, rng)):
            break
        if rng.random() < 0.2:
            subject.over = True
            break
        subject.fn.__enter__()
        subject.books.turns += 1
        subject.faults.injected.append("opened again")
    hung = not crowd.join(str(subject))
    return conclude(subject, hung, drop=not subject.over and rng.random() < 0.2)


def conclude(subject: Subject, hung: bool, *, drop: bool = False) -> Report:
    """Shut the batcher down or, with `drop`, leave it to the garbage collector. Close the books."""
    books, name = subject.books, subject.name
    if not drop:
        subject.fn.shutdown(wait=not hung)
        if not until(lambda: not workers(name)):
            books.blame("hung", f"threads {workers(name)} of {subject}")
    until(functools.partial(_is_recorded, subject), 5.0)
    report = books.close(subject.fn.stats, list(books.open.values()) if hung else [])
    if drop:
        report.faults["dropped"] += 1
        subject.fn = None
        subject.faults.struck.clear()  # tracebacks hold frames, and frames the batcher
        subject.faults.refusals.clear()
        gc.collect()
        if not until(lambda: not workers(name), 5.0):
            report.blame("wrong", f"a dropped batcher keeps its threads: {workers(name)}")
    return report


def _is_recorded(subject: Subject) -> bool:
    """Return whether the statistics and the observer have the last batch."""
    stats, observed = subject.fn.stats, subject.books.observed
    ran = len(subject.faults.ran) - subject.books.most_again
    seen = observed is None or len(observed) >= stats.total_batches
    return seen and not stats.in_flight and stats.total_processed >= ran


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the log and the warnings of injected faults."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        try:
            yield
        finally:
            logging.disable(disabled)


KINDS = (
    *(*BATCH_KINDS, RETURNED, LENGTH, CALLBACK, HOOK, FULL, LATE),
    *("source of map raised", "timeout of a caller", "cancelled tasks", "opened again", "dropped"),
    *("shutdown", "shutdown and wait", "shutdown and cancel", "shutdown and wait and cancel"),
)
"""Every kind of fault."""
