"""Ordinary episodes of a soak: callers of every kind at once, faults in their batches, and somebody
who closes and opens the batcher.
"""

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
"""Seconds that callers get, each of whose waits is bounded."""


def until(condition: Callable[[], bool], seconds: float = BOUND) -> bool:
    """Whether `condition` holds before the time is over."""
    deadline = time.monotonic() + seconds
    pause = 0.0001
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    return True


def workers(name: str) -> list[str]:
    """Names of the threads of the batcher `name` that have not ended."""
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(f"batched-{name}-")
    ]


class Crowd:
    """Threads that act at the same time, and that nobody waits for longer than `PATIENCE`."""

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
        """Whether all of them end in time; if not, that is a hang, and everybody's stack is
        printed.
        """
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
    """Whether `action` returns in time."""
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
        await no_tasks_are_left(subject)

    anyio.run(main, **LOOPS[loop])


async def no_tasks_are_left(subject: Subject) -> None:
    """Enters in the books the workers that stay on this loop although nothing waits for them."""
    with anyio.move_on_after(BOUND):
        while _tasks(subject.name):  # noqa: ASYNC110  # they ring no bell
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
    """Closes and opens the batcher of `subject` while others call it."""

    def __init__(self, subject: Subject, rng: random.Random) -> None:
        self._subject = subject
        self._rng = rng

    def close(self) -> bool:
        """Closes in one way or another; False if that hangs."""
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
    """Some hundred to some thousand calls by all kinds of callers."""
    subject = Subject(rng, name)
    with trouble_is_told(subject):
        hung = _called(subject, rng, calls)
        report = _ended(subject, rng, hung)
    del subject
    return report


def _called(subject: Subject, rng: random.Random, calls: int) -> bool:
    """Has `subject` called, and closes it now and then; returns whether anybody hangs."""
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
    """Ends the batcher in one way or another, and closes the books."""
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
        subject.faults.struck.clear()  # tracebacks hold frames, and these the batcher
        subject.faults.refusals.clear()
        gc.collect()
        if not until(lambda: not workers(name), 5.0):
            report.blame("wrong", f"a batcher that nobody holds keeps its threads: {workers(name)}")
    return report


def _is_recorded(subject: Subject) -> bool:
    """Whether the statistics and the observer have been told of the last batch, after its
    callers.
    """
    stats, observed = subject.fn.stats, subject.books.observed
    recorded = len(subject.faults.ran) - subject.books.most_again
    return stats.total_processed >= recorded and (
        observed is None or len(observed) >= stats.total_batches
    )


def concluded(subject: Subject) -> Report:
    """Shuts the batcher down and closes the books."""
    books = subject.books
    hung = not bounded(books, f"shutdown of {subject}", subject.fn.shutdown)
    if not hung and not until(lambda: not workers(subject.name)):
        books.blame("hung", f"threads {workers(subject.name)} of {subject}")
    return books.close(subject.fn.stats, list(books.open.values()) if hung else [])


@contextmanager
def trouble_is_told(subject: Subject) -> Iterator[None]:
    """Says which batcher it was if an episode itself fails."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"the episode of {subject} failed") from error


def seeded(seed: int, index: int) -> random.Random:
    """The random numbers of one episode, by which it can be run again alone."""
    return random.Random(f"{seed} {index}")
