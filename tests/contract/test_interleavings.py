"""Schedules of threads: every accepted call ends exactly once, with its own result.

`frontrun` decides after each bytecode which thread runs next. It schedules the callers, the worker
and the timer of the unmodified library. The clock is virtual.
"""

from __future__ import annotations

import asyncio
import queue
import selectors
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from typing import Any

import pytest

import batched
from batched._function import batched as functions
from batched._runtime import call_queue, thread, wakers
from stage import BOUND

frontrun: Any = pytest.importorskip("frontrun")

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.timeout(3600)]

SCHEDULES = 2_000
"""Orders of conflicting steps that are explored for each scenario."""


class Latch:
    """A lock that one thread closes twice and another one opens.

    A thread that locks a `threading.Lock` twice is a deadlock to `frontrun`.
    """

    def __init__(self) -> None:
        self._semaphore = threading.BoundedSemaphore(1)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._semaphore.acquire(blocking, None if timeout < 0 else timeout)

    def release(self) -> None:
        try:
            self._semaphore.release()
        except ValueError:
            raise RuntimeError("release unlocked lock") from None


class Job:
    """Stands in for a thread of the library: a thread of the scenario runs its target."""

    def __init__(self, jobs: queue.Queue[Job | None], act: Callable[[], object]) -> None:
        self._jobs = jobs
        self._act = act
        self._done = threading.Event()

    def start(self) -> None:
        self._jobs.put(self)

    def run(self) -> None:
        try:
            self._act()
        finally:
            self._done.set()

    def join(self) -> None:
        self._done.wait()


class Timer:
    """Stands in for the timer thread of the library: a thread of the scenario calls back."""

    def start(self) -> None: ...

    def call_at(self, when: float, method: Callable[[], object]) -> None:
        World.latest.appointments.put((when, method))


class Selector(selectors.SelectSelector):
    """Waits for other threads only, in a way that `frontrun` can schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.rung = threading.Event()

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            self.rung.wait(timeout)
        self.rung.clear()
        return []


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._rings = Selector()
        super().__init__(self._rings)

    def _write_to_self(self) -> None:
        self._rings.rung.set()


class World:
    """A batched function, calls of it, and the threads that run it."""

    latest: World

    def __init__(self, callers: int, **settings: Any) -> None:
        self.computed: list[str] = []  # items, as the function got them
        self.outcomes: dict[str, Any] = {}  # result or error of each call
        self.ended: list[str] = []  # items of futures, once for each time that they were done
        self.jobs: queue.Queue[Job | None] = queue.Queue()
        self.appointments: queue.Queue[tuple[float, Callable[[], object]] | None] = queue.Queue()
        self._callers = callers  # that have not left
        self._leaving = threading.Lock()
        World.latest = self

        def compute(items: list[str]) -> list[str]:
            self.computed += items
            return [f"result of {item}" for item in items]

        self.fn: Any = batched.dynamically(**settings)(compute)
        self.waiting: Future[str]  # a call that was made before

    def work(self) -> None:
        """Run the jobs for which the library starts threads."""
        while (job := self.jobs.get()) is not None:
            job.run()

    def tell_time(self) -> None:
        """Keep the appointments of the library."""
        while (appointment := self.appointments.get()) is not None:
            when, method = appointment
            time.sleep(max(when - time.perf_counter(), 0.0))
            method()

    def submit(self, item: str) -> Future[str]:
        future: Future[str] = self.fn.submit(item)
        future.add_done_callback(lambda _: self.ended.append(item))
        return future

    def note(self, item: str, answer: Callable[[], str]) -> None:
        try:
            self.outcomes[item] = answer()
        except (batched.BatcherClosed, batched.QueueTimeout, CancelledError) as error:
            self.outcomes[item] = error

    def leave(self) -> None:
        """Note that a caller is done. The last caller ends the threads."""
        with self._leaving:
            self._callers -= 1
            last = not self._callers
        if last:
            self.fn.shutdown(wait=False)
            self.jobs.put(None)
            self.appointments.put(None)

    def answered(self, *items: str) -> bool:
        """Return whether the calls of these items ended with their results."""
        return all(self.outcomes[item] == f"result of {item}" for item in items)

    def is_whole(self, *items: str) -> bool:
        """Return whether each call ended once, and was computed at most once.

        A computed call has its result; any other call has an error.
        """
        stats = self.fn.stats
        return (
            sorted(self.outcomes) == sorted(items)
            and all(
                self.computed.count(item) == (1 if self.answered(item) else 0)
                and self.ended.count(item) <= 1
                for item in items
            )
            and len(self.computed) == stats.total_processed
            and (stats.queue_size, stats.in_flight) == (0, 0)
        )


Act = Callable[[World], None]


def caller(item: str, answer: Callable[[World], str]) -> Act:
    def act(world: World) -> None:
        world.note(item, lambda: answer(world))
        world.leave()

    return act


def submits(item: str) -> Act:
    return caller(item, lambda world: world.submit(item).result())


def calls(item: str) -> Act:
    return caller(item, lambda world: str(world.fn(item)))


def awaits(item: str) -> Act:
    def answer(world: World) -> str:
        with asyncio.Runner(loop_factory=Loop) as runner:
            return str(runner.run(world.fn.acall(item)))

    return caller(item, answer)


def explore(
    set_up: Callable[[], World],
    acts: list[Act],
    promise: Callable[[World], bool],
    clock: str = "virtual",
) -> Any:
    """Explore the orders of conflicting steps, with at most two preemptions."""
    return frontrun.explore(
        setup=set_up,
        workers=[*acts, World.work],
        invariant=promise,
        clock=clock,
        max_executions=SCHEDULES,
        search="bit-reversal",
        detect_io=False,
        reproduce_on_failure=0,
        timeout_per_run=BOUND,
        deadlock_timeout=BOUND,
    )


@pytest.fixture(autouse=True)
def scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the threads and locks of the library under the control of `frontrun`."""
    monkeypatch.setenv("FRONTRUN_ACTIVE", "1")
    for module in (thread, wakers, functions):
        names = types.SimpleNamespace(
            Lock=Latch,
            Condition=lambda: threading.Condition(),
            Thread=threading.Thread,
            TIMEOUT_MAX=threading.TIMEOUT_MAX,
        )
        monkeypatch.setattr(module, "threading", names)
    monkeypatch.setattr(
        thread,
        "daemon_thread",
        lambda _, target, *args: Job(World.latest.jobs, lambda: target(*args)),
    )
    monkeypatch.setattr(call_queue, "timer", Timer())
    monkeypatch.setattr(call_queue, "daemon_thread", no_thread)  # the timer calls back itself


def no_thread(*_: object) -> threading.Thread:
    raise RuntimeError("can't start new thread")


def both_answered(world: World) -> bool:
    return world.is_whole("a", "b") and world.answered("a", "b")


@pytest.mark.parametrize(
    ("acts", "settings"),
    [
        ([submits("a"), submits("b")], {}),
        ([calls("a"), submits("b")], {"batch_size": 1, "max_queue_size": 1}),
        ([awaits("a"), awaits("b")], {}),
    ],
    ids=["two threads", "a full queue", "two event loops"],
)
def test_a_call_beside_a_call(acts: list[Act], settings: dict[str, Any]) -> None:
    explore(lambda: World(2, **settings), acts, both_answered).assert_holds()


def with_a_waiting_call() -> World:
    world = World(2)
    world.waiting = world.submit("waits")
    return world


def test_a_submit_beside_a_cancel() -> None:
    def cancels(world: World) -> None:
        cancelled = world.waiting.cancel()
        world.note("waits", world.waiting.result)
        assert cancelled == world.waiting.cancelled()
        world.leave()

    def promise(world: World) -> bool:
        return world.is_whole("a", "waits") and world.answered("a")

    explore(with_a_waiting_call, [submits("a"), cancels], promise).assert_holds()


@pytest.mark.parametrize("cancel", [False, True])
def test_a_submit_beside_a_shutdown(cancel: bool) -> None:
    def shuts_down(world: World) -> None:
        world.fn.shutdown(cancel_futures=cancel)
        assert world.waiting.done()
        world.note("waits", world.waiting.result)
        world.leave()

    def promise(world: World) -> bool:
        refused = isinstance(world.outcomes["a"], batched.BatcherClosed)
        return world.is_whole("a", "waits") and (
            cancel or (world.answered("waits") and refused != world.answered("a"))
        )

    explore(with_a_waiting_call, [submits("a"), shuts_down], promise).assert_holds()


def test_a_time_limit() -> None:
    def promise(world: World) -> bool:
        late = sum(isinstance(each, batched.QueueTimeout) for each in world.outcomes.values())
        return world.is_whole("a", "b") and world.fn.stats.timed_out == late

    acts = [submits("a"), calls("b"), World.tell_time]
    found = explore(lambda: World(2, queue_timeout_ms=1.0), acts, promise, clock="explored")
    found.assert_holds()


def test_without_its_lock_the_library_breaks_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unlocked(nullcontext[None]):
        def _is_owned(self) -> bool:
            return False

    monkeypatch.setattr(call_queue, "threading", types.SimpleNamespace(RLock=Unlocked))
    found = explore(lambda: World(2), [submits("a"), submits("b")], both_answered)
    assert not found.property_holds
