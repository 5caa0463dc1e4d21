"""Thread runtime: dedicated daemon threads call the batch function.

So a model always sees the same threads. A worker forms a batch, collates it, calls the function and
answers the callers.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref

from .._core.linger import NEVER
from .._core.scheduler import Batch
from . import observer
from .call_queue import CallQueue, alive
from .runtime import Runtime
from .timer_thread import daemon_thread
from .waits import Pool, enter_worker
from .wakers import POLL_INTERVAL


class ThreadRuntime(Runtime):
    """Runtime of at most `max_concurrent_batches` threads that call the function.

    Threads start when they are needed. They end by `shutdown`, or with this object.
    """

    workers_stay = True

    def shutdown(self, *, wait: bool, cancel: bool) -> None:
        """Close. With `wait`, return once every accepted call and every thread has ended."""
        workers = set(self._workers)
        self.close(cancel)
        if wait and self.may_wait():
            self.drain()
            for parker in workers - self._workers:
                parker.thread.join()

    def _new_parker(self) -> _Parker:
        return _Parker(self)

    def _start_worker(self, parker: _Parker) -> None:
        parker.unpark(self)
        name = f"{self.name}-{len(self._workers)}"
        parker.thread = daemon_thread(name, _work, parker, self.pool)
        parker.thread.start()

    def serve(self, parker: _Parker) -> bool:
        """Run batches until none is ready. Return False if the worker must end."""
        while True:
            found = self._take(parker)
            if isinstance(found, Batch):
                outcomes = (observer.probe or self.execution).run(found, self)
                self.finish(found, outcomes)
                del outcomes  # an error in the outcomes holds this frame
            elif found is None:
                return False
            elif found == NEVER:
                return True
            else:
                parker.park_for(found - time.perf_counter())


class _Parker:
    """Place where a worker waits for work.

    `unpark` passes the runtime along, so that a parked worker keeps no runtime alive.
    """

    thread: threading.Thread  # of the worker

    def __init__(self, runtime: ThreadRuntime) -> None:
        self._lock = threading.Lock()  # locked while the worker may wait
        self._lock.acquire()
        # the runtime that called last; None if none has, or the runtime is gone
        self._caller: ThreadRuntime | None = None
        self.runtime = weakref.ref(runtime, lambda _: self.unpark(None))  # runtime of the worker

    def unpark(self, caller: ThreadRuntime | None) -> None:
        """Wake the worker, to serve `caller`."""
        self._caller = caller
        try:
            self._lock.release()
        except RuntimeError:  # already awake
            pass

    def park(self) -> ThreadRuntime | None:
        """Wait for `unpark`. Return the runtime to serve, or None once the runtime is gone."""
        self._lock.acquire()
        caller, self._caller = self._caller, None
        return caller or self.runtime()

    def park_for(self, seconds: float) -> None:
        """Wait for `unpark`, at most for `seconds`."""
        self._lock.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        self._caller = None  # the worker serves this runtime already


def _work(parker: _Parker, pool: Pool) -> None:
    """Serve a runtime until the worker must end. Target of a worker's thread."""
    try:
        enter_worker(pool, thread=True)
        while (runtime := parker.park()) is not None and runtime.serve(parker):
            del runtime
    except BaseException as error:
        if (failed := parker.runtime()) is not None:  # else no caller is left
            failed.fail(error)


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
    while any(any(runtime.load()) or runtime.waking for runtime in runtimes):
        time.sleep(POLL_INTERVAL / 10)


atexit.register(_at_exit)
