"""Ordinary episodes: callers of every kind, faults in batches, and shutdowns and reopenings."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from soak.books import Books, Report
from soak.callers import BOUND, ThreadCaller
from soak.subject import Subject
from soak.tasks import LOOPS, TaskCaller

PATIENCE = BOUND + 5
"""Longest time for callers, whose waits are all bounded (s)."""


def until(condition: Callable[[], bool], seconds: float = BOUND) -> bool:
    """Wait for `condition`. Return False if the time is over first."""
    deadline = time.monotonic() + seconds
    pause = 0.0001
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    return True


def workers(name: str) -> list[str]:
    """Return the names of the living threads of the batcher `name`."""
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(f"batched-{name}-")
    ]


class Crowd:
    """Threads that act at the same time, for at most `PATIENCE`."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._threads: list[threading.Thread] = []

    def start(self, action: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                action()
            except BaseException:
                self._books.blame("wrong", f"a caller ended with {traceback.format_exc()}")

        self._threads.append(threading.Thread(target=guarded, daemon=True))
        self._threads[-1].start()

    @property
    def busy(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self, what: str) -> bool:
        """Return whether all threads end in time. If not, print the stacks of all threads."""
        deadline = time.monotonic() + PATIENCE
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if not self.busy:
            return True
        self._books.blame("hung", what)
        print(f"hung: {what}", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        return False


def bounded(books: Books, what: str, action: Callable[[], object]) -> bool:
    """Return whether `action` returns in time."""
    crowd = Crowd(books)
    crowd.start(action)
    return crowd.join(what)


def thread_crew(subject: Subject, seed: int, fault_rate: float, calls: int) -> None:
    ThreadCaller(subject, random.Random(seed), fault_rate).run(calls)


def loop_crew(loop: str, subject: Subject, seed: int, fault_rate: float, calls: int) -> None:
    rng = random.Random(seed)
    tasks = rng.choice([1, 4, 16, 64])

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(tasks):
                group.start_soon(
                    TaskCaller(subject, random.Random(rng.random()), fault_rate).run,
                    max(1, calls // tasks),
                )
        await check_tasks(subject)

    anyio.run(main, **LOOPS[loop])


async def check_tasks(subject: Subject) -> None:
    """Enter in the books the worker tasks that stay on this loop."""
    with anyio.move_on_after(BOUND):
        while _tasks(subject.name):  # noqa: ASYNC110  # no event tells
            await anyio.sleep(0.0005)
        return
    subject.books.blame("hung", f"tasks {_tasks(subject.name)} of {subject}")


def _tasks(name: str) -> list[str]:
    try:
        names = [task.get_name() for task in asyncio.all_tasks()]
    except RuntimeError:
        root = sys.modules["trio"].lowlevel.current_root_task()
        names = [task.name for nursery in root.child_nurseries for task in nursery.child_tasks]
    return [each for each in names if each.startswith(f"batched-{name}")]


class Closer:
    """Thread that closes and opens the batcher of `subject` while callers call it."""

    def __init__(self, subject: Subject, rng: random.Random) -> None:
        self._subject = subject
        self._rng = rng

    def close(self) -> bool:
        """Close the batcher in a random way. Return False if the shutdown hangs."""
        subject, rng = self._subject, self._rng
        wait, cancel, twice = rng.random() < 0.6, rng.random() < 0.4, rng.random() < 0.2
        subject.books.turns += 1
        subject.books.cancels |= cancel
        kind = f"shutdown{' and wait' if wait else ''}{' and cancel' if cancel else ''}"
        subject.faults.injected.append(kind)
        shutdown = functools.partial(subject.fn.shutdown, wait=wait, cancel_futures=cancel)
        crowd = Crowd(subject.books)
        for _ in range(1 + twice):
            crowd.start(shutdown)
        if not crowd.join(f"{kind} of {subject}"):
            return False
        stats = subject.fn.stats
        if wait and (stats.queue_size or stats.in_flight):
            subject.books.blame("wrong", f"after a shutdown that waited: {stats!r} of {subject}")
        return True

    def reopen(self) -> None:
        self._subject.fn.__enter__()
        self._subject.books.turns += 1
        self._subject.faults.injected.append("opened again")


def ordinary(rng: random.Random, name: str, calls: int) -> Report:
    """Make some hundred to some thousand calls by all kinds of callers."""
    subject = Subject(rng, name)
    with named_in_errors(subject):
        hung = _called(subject, rng, calls)
        report = _ended(subject, rng, hung)
    del subject
    return report


def _called(subject: Subject, rng: random.Random, calls: int) -> bool:
    """Start callers, and close the batcher now and then. Return whether a caller hangs."""
    fault_rate = rng.choice([0.0, 0.005, 0.02, 0.02, 0.1])
    crews = rng.choice([1, 2, 2, 3])
    crowd = Crowd(subject.books)
    for _ in range(crews):
        common = subject, rng.getrandbits(32), fault_rate, calls // crews
        loop = rng.choice(list(LOOPS))
        if subject.coroutine or rng.random() < (0.3 if subject.kind == "threads" else 0.8):
            crowd.start(functools.partial(loop_crew, loop, *common))
        else:
            crowd.start(functools.partial(thread_crew, *common))
    closer = Closer(subject, rng)
    for _ in range(rng.choice([0, 0, 0, 1, 2, 4])):
        time.sleep(rng.random() * 0.03)
        if not crowd.busy:
            break
        if not closer.close():
            return True
        if rng.random() < 0.2:
            subject.over = True
            break
        time.sleep(rng.choice([0, 0, 0.002]))
        closer.reopen()
    return not crowd.join(str(subject))


def _ended(subject: Subject, rng: random.Random, hung: bool) -> Report:
    """End the batcher in a random way, and close the books."""
    books = subject.books
    dropped = not subject.over and rng.random() < 0.2
    if not hung and not subject.over and not dropped:
        hung = not Closer(subject, rng).close()
    if dropped:
        until(lambda: not (subject.fn.stats.in_flight or subject.fn.stats.queue_size), BOUND)
    elif not until(lambda: not workers(subject.name)):
        books.blame("hung", f"threads {workers(subject.name)} of {subject}")
    until(lambda: _is_recorded(subject), 5.0)
    report = books.close(subject.fn.stats, list(books.open.values()) if hung else [])
    if dropped:
        report.faults["owner collected"] += 1
        name = subject.name
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
    recorded = len(subject.faults.ran) - subject.books.most_again
    return stats.total_processed >= recorded and (
        observed is None or len(observed) >= stats.total_batches
    )


def concluded(subject: Subject) -> Report:
    """Shut the batcher down, and close the books."""
    books = subject.books
    hung = not bounded(books, f"shutdown of {subject}", subject.fn.shutdown)
    if not hung and not until(lambda: not workers(subject.name)):
        books.blame("hung", f"threads {workers(subject.name)} of {subject}")
    return books.close(subject.fn.stats, list(books.open.values()) if hung else [])


@contextmanager
def named_in_errors(subject: Subject) -> Iterator[None]:
    """Name the batcher in the error if an episode itself fails."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"the episode of {subject} failed") from error


def seeded(seed: int, index: int) -> random.Random:
    """Return the random numbers of one episode, which can so run again alone."""
    return random.Random(f"{seed} {index}")
