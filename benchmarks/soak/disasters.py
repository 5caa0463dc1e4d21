"""Episodes with collected owners and with interrupts."""

from __future__ import annotations

import functools
import gc
import random
import signal
import threading
import weakref
from types import FrameType
from typing import Any

import batched
from soak.books import Report
from soak.callers import BOUND, ThreadCaller
from soak.episodes import Crowd, bounded, concluded, until, workers
from soak.subject import Subject


# as every episode
def owners_go(rng: random.Random, name: str, calls: int) -> Report:
    """Drop instances with a batched method while their calls wait.

    The calls get their answers, and then threads and instances go.
    """
    subject = Subject(rng, name, kind="threads", features=False, unpack=False)
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
                    answer = caller.called(call, way, submits=submits)
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
