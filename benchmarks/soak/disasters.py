"""Episodes with cancelled calls in the queue, collected owners, and interrupts."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import random
import signal
import threading
import weakref
from types import FrameType
from typing import Any

import anyio

import batched
from soak.books import Call, Report
from soak.callers import BOUND, Caller, ThreadCaller
from soak.episodes import Crowd, bounded, concluded, until, workers
from soak.subject import KINDS, Subject
from soak.tasks import LOOPS


# as every episode
def cancelled_while_held(rng: random.Random, name: str, calls: int) -> Report:
    """Cancel calls in the queue. None of them may run, and all remaining calls must."""
    subject = Subject(
        rng,
        name,
        kind=rng.choice(KINDS),
        limited=False,
        max_concurrent_batches=1,
        flush="eager",
        prefetch=0,
    )
    caller = _Held(subject, rng)
    if subject.coroutine or rng.random() < 0.5:
        bounded(
            subject.books,
            str(subject),
            functools.partial(anyio.run, caller.run_tasks, **LOOPS[rng.choice(list(LOOPS))]),
        )
    else:
        bounded(subject.books, str(subject), caller.run_threads)
    return concluded(subject)


class _Held(Caller):
    """Make calls wait behind a held batch, and cancel some of them."""

    def __init__(self, subject: Subject, rng: random.Random) -> None:
        super().__init__(subject, rng, 0.0)
        self.first = self.books.begin(length=1)
        subject.held.add(self.first.items.start)

    def run_threads(self) -> None:
        busy = self.submit(self.first)
        self._check(self.subject.entered.wait(BOUND), "the first batch did not begin")
        pending = [
            (call, self.submit(call))
            for call in [self.new(tagged=False) for _ in range(self.rng.randint(1, 100))]
        ]
        kept = []
        for call, future in pending:
            if self.rng.random() < 0.5:
                self.faults.injected.append("cancelled future that waited")
                self._check(self.cancel(call, future), f"{call} waits and cannot be cancelled")
            else:
                kept.append((call, future))
        self._check(
            self.subject.fn.stats.queue_size == sum(call.size for call, _ in kept),
            "what was cancelled still waits",
        )
        self.subject.gate.set()
        for call, future in [(self.first, busy), *kept]:
            concurrent.futures.wait([future], BOUND)
            self.enter(call, future)

    async def run_tasks(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._await, self.first, anyio.CancelScope())
            while not self.subject.entered.is_set():  # noqa: ASYNC110  # set by any thread
                await anyio.sleep(0.0005)
            scopes: list[tuple[Call, anyio.CancelScope]] = []
            for _ in range(self.rng.randint(1, 100)):
                scopes.append((self.new(tagged=False), anyio.CancelScope()))
                group.start_soon(self._await, *scopes[-1])
            waiting = sum(call.size for call, _ in scopes)
            while self.subject.fn.stats.queue_size < waiting:  # noqa: ASYNC110  # no event tells
                await anyio.sleep(0.0005)
            for call, scope in scopes:
                if self.rng.random() < 0.5:
                    self.faults.injected.append("cancelled task that waited")
                    self.books.gone += call.items
                    waiting -= call.size
                    scope.cancel()
            while self.subject.fn.stats.queue_size > waiting:  # noqa: ASYNC110  # no event tells
                await anyio.sleep(0.0005)
            self.subject.gate.set()

    async def _await(self, call: Call, scope: anyio.CancelScope) -> None:
        fn = self.subject.fn
        with scope:
            try:
                answer = await self.called(call, fn.acall if self.subject.kind == "threads" else fn)
            except anyio.get_cancelled_exc_class():
                self.books.abandoned(call)
                raise
            except BaseException as error:
                self.failed(call, error)
            else:
                self.answered(call, answer)

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.books.blame("wrong", f"{otherwise}: {self.subject}")


# as every episode
def owners_go(rng: random.Random, name: str, calls: int) -> Report:
    """Drop instances with a batched method while their calls wait.

    The calls get their answers, and then threads and instances go.
    """
    subject = Subject(rng, name, kind="threads", features=False)
    compute = subject.fn.__wrapped__
    settings = {**subject.settings, "max_concurrent_batches": 1}

    class Owner:
        def compute_here(self, items: list[int], tag: Any = 0) -> Any:
            return compute(items, tag)

        method = batched.dynamically(name=name, **settings)(compute_here)

    caller = ThreadCaller(subject, rng, rng.choice([0.0, 0.05]))
    subject.books.exact = False
    subject.kinds = [kind for kind in subject.kinds if not kind.startswith("function")]
    refs = []
    for _ in range(10):
        owner = Owner()
        refs.append(weakref.ref(owner))
        subject.fn = owner.method
        pending = caller.submit_all(rng.randint(0, 30))
        if rng.random() < 0.5:
            caller.single()
        subject.fn = None
        del owner
        if rng.random() < 0.5:
            gc.collect()
        caller.faults.injected.append("owner collected")
        caller._collect(pending)
        del pending
    report = subject.books.close(None, [])
    subject.faults.struck.clear()  # tracebacks hold frames, and frames the owner
    subject.faults.refusals.clear()
    gc.collect()
    if not until(lambda: not workers(name) and not any(ref() for ref in refs), 5.0):
        report.blame(
            "wrong",
            f"dropped owners stay: {workers(name)}, {sum(ref() is not None for ref in refs)} of 10",
        )
    return report


class Interrupted(KeyboardInterrupt):
    """Exception of the signal handler of this soak."""


# as every episode
def interrupts(rng: random.Random, name: str, calls: int) -> Report:
    """Interrupt calls of the main thread by signals at any point, while threads make calls."""
    subject = Subject(rng, name, kind="threads")
    subject.books.exact = False
    # one that breaks in on a call that is being queued ends all that wait, which is as documented
    subject.books.turns = 1
    if threading.current_thread() is not threading.main_thread():
        return concluded(subject)
    main = threading.get_ident()
    crowd = Crowd(subject.books)
    crowd.start(functools.partial(ThreadCaller(subject, random.Random(rng.random()), 0.0).run, 100))
    caller = ThreadCaller(subject, rng, 0.0)
    done = threading.Event()
    armed = False

    def handler(_: int, __: FrameType | None) -> None:
        nonlocal armed
        if armed:
            armed = False
            caller.faults.injected.append("interrupt")
            raise Interrupted

    def send() -> None:
        beat = random.Random(rng.random())
        while not done.wait(beat.random() * 0.004):
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    crowd.start(send)
    try:
        for _ in range(60):
            submits = rng.random() < 0.5
            call = caller.new(listed=not submits and rng.random() < 0.5)
            way = (
                (lambda *args, **more: subject.fn.submit(*args, **more).result(BOUND))
                if submits
                else subject.fn
            )
            try:
                armed = True
                try:
                    answer = caller.called(call, way)
                finally:
                    armed = False
            except Interrupted:
                subject.books.abandoned(call)
            except BaseException as error:
                caller.failed(call, error)
            else:
                caller.answered(call, answer)
    finally:
        done.set()
        crowd.join(f"callers during interrupts of {subject}")
        signal.signal(signal.SIGUSR1, before)
    subject.books.turns = 2
    for _ in range(3):
        bounded(subject.books, f"a call after interrupts of {subject}", caller.single)
    return concluded(subject)
