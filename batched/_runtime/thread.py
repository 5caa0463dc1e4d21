"""Thread runtime: dedicated daemon threads call the batch function.

So a model always sees the same threads. A worker forms a batch, collates it, calls the function and
answers the callers.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import time
import weakref

from .._core.linger import NEVER
from .._core.scheduler import Batch, Scheduler
from . import observer
from .call_queue import CallQueue, alive
from .runtime import Runtime
from .timer_thread import daemon_thread
from .waits import enter_worker
from .wakers import POLL_INTERVAL, log_failure


class ThreadRuntime(Runtime):
    """Runtime of at most `max_concurrent_batches` threads that call the function.

    Threads start when they are needed. They end by `shutdown`, or with this object.
    """

    workers_stay = True

    def _reset(self) -> None:
        super()._reset()
        self._threads: set[threading.Thread] = set()  # threads of the workers
        self._numbers = itertools.count(1)  # numbers for thread names

    def here(self, _: object) -> ThreadRuntime:
        """Return the runtime for callers on any loop, or on none: this one."""
        return self

    def shutdown(self, *, wait: bool, cancel: bool) -> None:
        """Close. With `wait`, return once every accepted call and every thread has ended."""
        threads = set(self._threads)
        self.close(cancel)
        if wait and self.drain():
            for thread in threads - self._threads:
                thread.join()

    def _new_parker(self) -> _Parker:
        return _Parker(self, self._scheduler)

    def _start_worker(self, parker: _Parker) -> None:
        parker.unpark(self)
        parker.thread = daemon_thread(f"{self.name}-{next(self._numbers)}", _work, parker)
        self._threads.add(parker.thread)
        try:
            parker.thread.start()
        except BaseException:
            self._threads.discard(parker.thread)
            raise

    def run(self, batch: Batch) -> None:
        """Call the function for `batch` in this thread, and answer its callers."""
        probe = observer.probe
        began = None if probe is None else probe.began(self.name, batch)
        outcomes = self.execution.run(batch, self)
        if probe is not None and began is not None:
            probe.ended(began, self.name, batch, outcomes)
        self.finish(batch, outcomes)
        del outcomes  # an error in the outcomes holds this frame

    def serve(self, parker: _Parker) -> bool:
        """Run batches until none is ready. Return False if the worker must end."""
        while True:
            found = self._take(parker)
            if isinstance(found, Batch):
                self.run(found)
            elif found is None:
                self._threads.discard(parker.thread)
                return False
            elif found == NEVER:
                return True
            else:
                parker.park_for(found - time.perf_counter())


class _Parker:
    """Place where a worker waits for work.

    `unpark` passes the runtime along, so that a parked worker keeps no runtime alive.
    """

    def __init__(self, runtime: ThreadRuntime, scheduler: Scheduler) -> None:
        self.scheduler: Scheduler | None = scheduler  # scheduler of the worker's batches
        self._lock = threading.Lock()  # locked while the worker may wait
        self._lock.acquire()
        # the runtime that called last; None if none has, or the runtime is gone
        self._caller: ThreadRuntime | None = None
        self.runtime = weakref.ref(runtime, lambda _: self.unpark(None))  # runtime of the worker
        self.pool = runtime.pool
        self.thread: threading.Thread  # of the worker

    def unpark(self, caller: ThreadRuntime | None) -> None:
        """Wake the worker, to serve `caller`."""
        self._caller = caller
        try:
            self._lock.release()
        except RuntimeError:  # already awake
            pass

    def park(self) -> ThreadRuntime | None:
        """Wait for `unpark`. Return the runtime to serve, or None once the runtime is gone."""
        while True:
            self._lock.acquire()
            caller, self._caller = self._caller, None
            if caller is not None or self.runtime() is None:
                return caller

    def park_for(self, seconds: float) -> None:
        """Wait for `unpark`, at most for `seconds`."""
        self._lock.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        self._caller = None  # the worker serves this runtime already


def _work(parker: _Parker) -> None:
    """Serve a runtime until the worker must end. Target of a worker's thread."""
    try:
        enter_worker(parker.pool, thread=True)
        while (runtime := parker.park()) is not None and runtime.serve(parker):
            del runtime
    except BaseException as error:
        _fail(parker.runtime(), error)


def _fail(runtime: ThreadRuntime | None, error: BaseException) -> None:
    """End the calls of a runtime whose worker failed."""
    if runtime is not None:  # else no caller is left
        log_failure("the worker of %s failed", runtime.name)
        runtime.abort(f"its worker failed with a {type(error).__name__}")


def _at_exit() -> None:
    """Finish every accepted call, as `ThreadPoolExecutor` does, and the calls made by these calls.

    An interruption leaves the rest undone.
    """
    runtimes = [runtime for runtime in alive() if runtime.finishes_at_exit]
    CallQueue.exiting = True
    try:
        for runtime in runtimes:
            runtime.close(cancel=False)
        _wait_for(runtimes)
    finally:
        CallQueue.exiting = False
    for runtime in runtimes:
        runtime.shutdown(wait=True, cancel=False)
    _wait_for(runtimes)
    if observer.share is not None:
        observer.share(True)


def _wait_for(runtimes: list[CallQueue]) -> None:
    while any(runtime.pending(running_only=False) for runtime in runtimes):
        time.sleep(POLL_INTERVAL / 10)


atexit.register(_at_exit)
