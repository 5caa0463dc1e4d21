"""The thread runtime: dedicated daemon threads call the batch function, so a model always sees the same ones."""

from __future__ import annotations

import atexit
import itertools
import threading
import time
import weakref
from typing import Any

from .._core.linger import NEVER
from .._core.scheduler import Batch, Scheduler
from .runtime import Runtime, alive
from .shift import Shift
from .wakers import BlockingWaker, async_waker, logger


class ThreadRuntime(Runtime):
    """At most `max_concurrent_batches` threads, started as they are needed, ended by `shutdown` or with this object."""

    workers_stay = True

    def _reset(self) -> None:
        super()._reset()
        self._threads: set[threading.Thread] = set()  # those of the workers
        self._numbers = itertools.count(1)  # for their names

    def here(self) -> ThreadRuntime:
        """The runtime that serves callers of this thread or loop: this one, wherever they are."""
        return self

    def shutdown(self, *, wait: bool, cancel: bool) -> None:
        """Closes; with `wait`, returns once every accepted call has ended and the threads have."""
        threads = set(self._threads)
        self.close(cancel)
        if not wait or self.within:
            return
        drained = BlockingWaker()
        self.when_drained(drained)
        drained.wait()
        for thread in threads - self._threads:
            thread.join()

    async def aclose(self, *, cancel: bool) -> None:
        """Closes, and returns once every accepted call has ended."""
        self.close(cancel)
        if not self.within:
            drained = async_waker()
            self.when_drained(drained)
            await drained

    def _start_worker(self) -> None:
        bell = _Bell(self, self._scheduler)
        thread = threading.Thread(target=_work, args=(bell,), name=f"batched-{self.name}-{next(self._numbers)}", daemon=True)
        with self._lock:
            self._threads.add(thread)
        bell.ring(self)
        try:
            thread.start()
        except BaseException:
            with self._lock:
                self._threads.discard(thread)
            raise

    def _ring(self, bell: Any) -> None:
        bell.ring(self)

    def serve(self, bell: _Bell) -> bool:
        """Runs batches until there is none; False if the worker is to end."""
        while True:
            found = self._take(bell)
            if isinstance(found, Batch):
                shift = Shift(self.badge)
                outcomes = self.execution.run(found)
                self._finish(found, outcomes)  # callbacks of futures run in there, and must not wait for this worker either
                shift.on = False
                del outcomes  # an error among them holds this frame
            elif found is None:
                with self._lock:
                    self._threads.discard(threading.current_thread())
                return False
            elif found == NEVER:
                return True
            else:
                bell.nap(found - time.monotonic())


class _Bell:
    """What a worker rests on. It brings the runtime along, so that one without work keeps no runtime alive."""

    __slots__ = ("_caller", "_lock", "_widowed", "scheduler")

    def __init__(self, runtime: ThreadRuntime, scheduler: Scheduler) -> None:
        self.scheduler = scheduler  # whose batches the worker runs
        self._lock = threading.Lock()  # locked while the worker may rest
        self._lock.acquire()
        self._caller: ThreadRuntime | None = None  # who rang last; None: nobody, or the runtime is gone
        self._widowed = weakref.ref(runtime, lambda _: self.ring(None))

    def ring(self, caller: ThreadRuntime | None) -> None:
        self._caller = caller
        try:
            self._lock.release()
        except RuntimeError:  # rung already
            pass

    def wait(self) -> ThreadRuntime | None:
        """Rests until rung; returns the runtime to serve, None once it is gone."""
        while True:
            self._lock.acquire()
            caller, self._caller = self._caller, None
            if caller is not None or self._widowed() is None:
                return caller

    def nap(self, seconds: float) -> None:
        """Rests until rung, but not longer than `seconds`."""
        self._lock.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        self._caller = None  # it is being served


def _work(bell: _Bell) -> None:
    while True:
        runtime = bell.wait()
        if runtime is None:
            return
        try:
            if not runtime.serve(bell):
                return
        except BaseException as error:
            logger.exception("the worker of %s failed", runtime.name)
            runtime.forsake(f"its worker failed with a {type(error).__name__}")
            return
        del runtime


def _at_exit() -> None:
    """Finishes what was accepted, as `ThreadPoolExecutor` does; interrupted, it leaves the rest undone."""
    runtimes = [runtime for runtime in alive() if isinstance(runtime, ThreadRuntime)]
    for runtime in runtimes:
        runtime.close(cancel=False)
    for runtime in runtimes:
        runtime.shutdown(wait=True, cancel=False)


atexit.register(_at_exit)
