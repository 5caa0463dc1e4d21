"""Episodes of a soak about processes: forks, and interpreters that exit."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import os
import random
import signal
import subprocess
import sys

from batched.errors import QueueTimeout
from soak.books import Report
from soak.callers import BOUND, Caller, ThreadCaller
from soak.episodes import Crowd, concluded, until
from soak.subject import Subject

CHILD_BOUND = 10.0
"""Longest time of a child process (s)."""


def forks(rng: random.Random, name: str, calls: int) -> Report:  # as every episode
    """Fork while threads call. The child begins anew and serves; the parent goes on."""
    # a child would wait for ever for the parent's thread
    faulthandler.cancel_dump_traceback_later()
    subject = Subject(rng, name)
    caller = ThreadCaller(subject, rng, 0.0)
    crowd = Crowd(subject.books)
    for _ in range(0 if subject.coroutine else rng.choice([0, 1, 3])):
        crowd.start(
            functools.partial(ThreadCaller(subject, random.Random(rng.random()), 0.02).run, 60)
        )
    for _ in range(3):
        pending = []
        if not subject.coroutine:
            pending = caller.submit_all(rng.randint(0, 30))
        pid = os.fork()
        if not pid:
            _child(caller)
        caller.faults.injected.append("fork")
        _wait_for_child(caller, pid)
        caller._collect(pending)
    crowd.join(f"callers during forks of {subject}")
    return concluded(subject)


def _child(caller: Caller) -> None:
    """Check calls in the child, without locks of the parent's threads. End the process."""
    faulthandler.dump_traceback_later(CHILD_BOUND / 2, exit=True)
    subject, code = caller.subject, 10
    try:
        for _ in range(3):
            call = caller.books.begin(tag=1, length=2)
            try:
                if call.number % 2 or subject.coroutine:
                    answer = asyncio.run(caller.called(call, subject.fn.acall))
                else:
                    answer = caller.called(call, subject.fn.submit, submits=True).result(
                        CHILD_BOUND
                    )
            except QueueTimeout:
                if not subject.books.queue_timeout < 1:
                    os._exit(13)
            else:
                if not subject.is_right(call, answer):
                    os._exit(12)
        subject.fn.shutdown()
        code = 0
    except BaseException as error:
        os.write(2, f"in a forked child: {error!r:.300}\n".encode())
    finally:
        os._exit(code)


def _wait_for_child(caller: Caller, pid: int) -> None:
    code: list[int] = []

    def is_over() -> bool:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code.append(os.waitstatus_to_exitcode(status))
        return bool(ended)

    if not until(is_over, CHILD_BOUND):
        caller.books.blame("hung", f"a forked child of {caller.subject}")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    elif code[0]:
        caller.books.blame(
            "hung" if code[0] == 1 else "wrong",
            f"a forked child of {caller.subject} ended with {code[0]}",
        )


EXITING = """
import os, sys, threading, time
import batched
count, slow = int(sys.argv[1]), float(sys.argv[2])
@batched.dynamically(**{settings})
def fn(items):
    time.sleep(slow)
    os.write(1, "".join(f"{{item}}\\n" for item in items).encode())
    return items
for item in range(count):
    fn.submit(item)
"""


def exits(rng: random.Random, name: str, calls: int) -> Report:  # as every episode
    """End interpreters with waiting calls. Accepted calls run once, and the process ends."""
    report = Report()
    count = rng.randint(1, 50)
    settings = {
        "batch_size": rng.choice([1, 3, 32]),
        "flush": rng.choice(["eager", "window"]),
        "timeout_ms": rng.choice([0.0, 1e9]),
        "max_concurrent_batches": rng.choice([1, 3]),
    }
    what = f"exit with {count} calls of {settings}"
    report.faults["interpreter exit"] += 1
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-W",
                "error",
                "-c",
                EXITING.format(settings=settings),
                str(count),
                str(rng.choice([0, 0.001])),
            ],
            capture_output=True,
            text=True,
            timeout=BOUND,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    except subprocess.TimeoutExpired:
        report.blame("hung", what)
        return report
    printed = sorted(map(int, done.stdout.split()))
    report.accepted = count
    report.outcomes["answered"] += count
    if done.returncode or done.stderr:
        report.blame("wrong", f"{what}: {done.returncode}, {done.stderr[-500:]}")
    if missing := set(range(count)) - set(printed):
        report.blame("lost", f"{what}: {sorted(missing)}")
    if len(printed) > len(set(printed)):
        report.blame("duplicated", f"{what}: {printed}")
    return report
