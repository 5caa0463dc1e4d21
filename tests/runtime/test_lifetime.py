"""From the first call to the end of the process: threads, garbage, forks, exits, signals."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import pytest

import batched
from stage import BOUND, python, refuse_thread, wait_until

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def workers(name: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(f"batched-{name}-")]


def test_no_thread_is_started_before_the_first_call() -> None:
    fn: Any = batched.dynamically(name="lazy", max_concurrent_batches=8)(lambda items: items)
    assert workers("lazy") == []
    for i in range(50):
        assert fn(i) == i
        wait_until(lambda: fn._batcher.runtime._parked)  # the worker has answered and waits again
    (worker,) = workers("lazy")
    assert worker.daemon
    fn.shutdown()
    with pytest.raises(batched.BatcherClosed):
        fn(2)
    assert workers("lazy") == [], "a refused call starts none"


def test_a_dropped_batcher_finishes_what_it_accepted_and_ends_its_thread() -> None:
    gate = threading.Event()
    done: list[int] = []

    def slow(items: list[int]) -> list[int]:
        assert gate.wait(BOUND)
        done.extend(items)
        return items

    fn, function = batched.dynamically(name="dropped", batch_size=1)(slow), weakref.ref(slow)
    for i in range(3):
        fn.submit(i)
    del fn, slow
    gc.collect()
    gate.set()
    wait_until(lambda: workers("dropped") == [] and function() is None)
    assert done == [0, 1, 2]


def test_results_of_a_batch_are_not_kept_by_an_idle_worker() -> None:
    fn: Any = batched.dynamically(lambda items: [threading.Event() for _ in items])
    kept = weakref.ref(fn(1))
    wait_until(lambda: kept() is None)


def test_a_held_call_is_answered_although_nobody_holds_the_batcher() -> None:
    future = batched.dynamically(flush="window", timeout_ms=20.0)(lambda items: items).submit(7)
    gc.collect()
    assert future.result(BOUND) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="counts context switches in /proc")
def test_idle_workers_do_not_wake_up() -> None:
    fn: Any = batched.dynamically(name="still", max_concurrent_batches=4)(lambda items: items)
    assert fn([1, 2, 3]) == [1, 2, 3]
    (worker,) = workers("still")

    def switches() -> list[str]:
        with open(f"/proc/self/task/{worker.native_id}/status") as status:
            return [line for line in status if line.startswith("voluntary_ctxt_switches")]

    seen = [switches()]
    for _ in range(50):  # one quiet stretch in which nothing that polls could keep still
        threading.Event().wait(0.2)
        seen.append(switches())
        if seen[-1] == seen[-2]:
            return
    raise AssertionError(f"it went on waking up: {seen}")


def test_where_no_thread_can_be_started_the_caller_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fn: Any = batched.dynamically(name="threadless")(lambda items: items)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        for items in (1, [1, 2]):
            with pytest.raises(batched.BatcherClosed, match="can't start new thread"):
                fn(items)
    assert fn(3) == 3


def test_interpreter_exit_finishes_what_was_accepted() -> None:
    done = python(
        """
        import threading
        import batched
        from batched._runtime import observer

        entered = threading.Event()
        observer.share = lambda last=False: print("gauges are shared") if last else None

        @batched.dynamically
        def inner(items):
            return [item + 1 for item in items]

        @batched.dynamically(batch_size=1)
        def outer(items):
            entered.wait(0.1)
            try:
                inner.submit(1)
            except batched.BatcherClosed:
                print("refused", flush=True)
            return inner(items)

        def again(future):
            print(future.result(), flush=True)
            try:
                outer.submit(1)  # without end, if it were taken
            except batched.BatcherClosed:
                print("refused", flush=True)

        inner(0)
        for item in range(2):
            outer.submit(item).add_done_callback(again)
        """
    )
    printed = ["refused", "1", "refused", "refused", "2", "refused", "gauges are shared"]
    assert done.stdout.splitlines() == printed, done.stderr


def test_an_interrupt_at_exit_abandons_what_is_left() -> None:
    program = """
        import batched, threading
        @batched.dynamically
        def fn(items):
            print("running", flush=True)
            threading.Event().wait()
        fn.submit(1)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    while process.poll() is None:  # the interpreter may not have come to its exit yet
        process.send_signal(signal.SIGINT)
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    process.communicate(timeout=BOUND)


@needs_fork
@pytest.mark.parametrize("decorator", ["batched.dynamically", "batched.aio.dynamically"])
def test_after_a_fork_parent_and_child_serve_calls(decorator: str) -> None:
    done = python(
        f"""
        import asyncio, os, threading, warnings
        # forking beside threads is what this is about
        warnings.simplefilter("ignore", DeprecationWarning)
        import batched
        gate, entered = threading.Event(), threading.Event()
        def function(items):
            if items == ["slow"]:
                entered.set()
                assert gate.wait(10)
            if items == ["fork"]:
                if not (child := os.fork()):  # which is no part of the run
                    os._exit(fn.submit("child").result() != "childchild")
                return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
            return [item * 2 for item in items]
        fn = {decorator}(function)
        assert asyncio.run(fn.acall(1)) == 2
        running = fn.submit("slow")
        assert entered.wait(10)
        waiting = fn.submit("waits")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                counts = fn.stats
                assert (counts.calls, counts.queue_size, counts.in_flight) == (0, 0, 0)
                assert asyncio.run(fn.acall(3)) == 6
                assert fn.submit(4).result(10) == 8
                fn.shutdown()
                # the child has a timer of its own
                late = batched.dynamically(
                    flush="window", timeout_ms=1e9, queue_timeout_ms=1
                )(sorted)
                assert isinstance(late.submit(1).exception(10), batched.QueueTimeout)
                code = 0
            finally:
                os._exit(code)
        gate.set()
        assert running.result(10) == "slowslow"
        assert waiting.result(10) == "waitswaits"
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert fn.submit(5).result(10) == 10
        assert fn.submit("fork").result(10) == 0
        print("fine")
        """
    )
    assert done.stdout == "fine\n", done.stderr


@needs_fork
def test_a_fork_while_threads_are_calling_leaves_a_child_that_serves() -> None:
    done = python(
        """
        import os, threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        import batched
        fn = batched.dynamically(lambda items: items)
        stop = threading.Event()
        def hammer():
            while not stop.is_set():
                fn(1)
        threads = [threading.Thread(target=hammer) for _ in range(2)]
        for thread in threads:
            thread.start()
        def fork():
            if (pid := os.fork()) == 0:
                threading.Timer(5, os._exit, (1,)).start()
                os._exit(0 if fn([1, 2]) == [1, 2] and fn.stats.queue_size == 0 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        for _ in range(12):
            fork()
        stop.set()
        for thread in threads:
            thread.join(10)
        holder = threading.Thread(target=fn._batcher.runtime._lock.acquire)
        holder.start(), holder.join(), fork()
        print("fine", flush=True)
        os._exit(0)  # the lock stays held here
        """,
        timeout=60,
    )
    assert done.stdout == "fine\n", done.stderr
