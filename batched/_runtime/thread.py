"""Thread runtime: dedicated daemon threads call the batch function.

So a model always sees the same threads. A worker forms a batch, collates it, calls the function and
answers the callers. With `prefetch` there is one worker, which forms and collates batches. In
addition, `max_concurrent_batches` threads call the function and answer. So the next batch, if it is
full, is ready when the function returns.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable

from .._core.linger import NEVER
from .._core.scheduler import Batch, Scheduler
from .._execution.execution import Prepared
from . import observer, recorder
from .call_queue import AWAKE, CallQueue, alive
from .row_source import run_rows
from .runtime import Runtime
from .timer_thread import daemon_thread
from .waits import WorkerContext, enter_worker
from .wakers import POLL_INTERVAL, log_failure

_Work = tuple["ThreadRuntime", Batch, Prepared]
"""A runtime, one of its batches, and the collated batch."""


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

    def rest(self) -> None:
        """End the workers that wait for work. The next call starts a worker."""
        with self._lock:
            parked, self._parked = self._parked, []
            self._workers -= len(parked)
            for parker in parked:
                parker.scheduler = None  # so the worker ends, and calls another one if items wait
        for parker in parked:
            parker.unpark(self)

    def _new_parker(self) -> _Parker:
        return _Parker(self, self._scheduler)

    def _start_worker(self, parker: _Parker) -> None:
        parker.unpark(self)
        try:
            if self.policy.prefetch:
                parker.calls = queue.SimpleQueue()
                for _ in range(self.policy.max_concurrent_batches):
                    self._start(_call, parker)
            self._start(_work, parker)
        except BaseException:
            parker.dismiss()
            raise

    def _start(self, work: Callable[[_Parker], None], parker: _Parker) -> None:
        thread = daemon_thread(f"{self.name}-{next(self._numbers)}", work, parker)
        with self._lock:
            self._threads.add(thread)
        parker.threads.append(thread)
        try:
            thread.start()
        except BaseException:
            self._leave(parker)
            raise

    def _leave(self, parker: _Parker) -> None:
        """Forget the threads of a worker that is about to end."""
        with self._lock:
            self._threads.difference_update(parker.threads)

    def run(
        self,
        batch: Batch,
        prepared: Prepared | None,
        worker: WorkerContext,
        parker: _Parker | None = None,
    ) -> Batch | float | None:
        """Call the function for `batch` in this thread, and answer its callers.

        With `parker`, return the next step of the worker (see `Runtime._take`).
        """
        worker.batch = batch
        batch.begun = True
        probe = observer.probe
        began = None if probe is None else probe.began(self.name, batch)
        outcomes = (
            run_rows(self, batch, worker)
            if self.execution.in_steps
            else self.execution.run(batch, prepared)
        )
        worker.batch = None  # contexts live long, and must not keep results alive
        if probe is not None and began is not None:
            probe.ended(began, self.name, batch, outcomes)
        found = self._finish(batch, outcomes, parker)
        del outcomes  # an error in the outcomes holds this frame
        return found

    def wake_worker(self) -> None:
        """Wake the worker, which prepares its next batch or ends."""
        with self._lock:
            if self._parked:
                self._alarm = AWAKE
                self._parked[-1].unpark(self)

    def serve(self, parker: _Parker, worker: WorkerContext) -> bool:
        """Run batches until none is ready. Return False if the worker must end."""
        found = self._take(parker)
        while True:
            if isinstance(found, Batch):
                if parker.calls is None:
                    found = self.run(found, None, worker, parker)
                    continue
                parker.calls.put((self, found, self.execution.prepare(found)))
            elif found is None:
                self._leave(parker)
                return False
            elif found == NEVER:
                return True
            else:
                parker.park_for(found - time.perf_counter())
            found = self._take(parker)


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
        # the worker, and with `prefetch` the threads that call the function for it
        self.threads: list[threading.Thread] = []
        self.calls: queue.SimpleQueue[_Work | None] | None = None  # work for these threads

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

    def dismiss(self) -> None:
        """End the threads that call the function, once they have finished their work."""
        if self.calls is not None:
            self.calls.put(None)


def _work(parker: _Parker) -> None:
    """Serve a runtime until the worker must end. Target of a worker's thread."""
    try:
        worker = enter_worker(parker.pool, thread=True)
        if parker.calls is not None and (runtime := parker.runtime()) is not None:
            runtime.execution.collator.enter_thread()
            del runtime
        while (runtime := parker.park()) is not None and runtime.serve(parker, worker):
            del runtime
    except BaseException as error:
        _fail(parker.runtime(), error)
    finally:
        parker.dismiss()


def _call(parker: _Parker) -> None:
    """Call the function for each batch that a worker has prepared. Target of a thread."""
    try:
        worker = enter_worker(parker.pool, thread=True)
        assert parker.calls is not None
        free_since = 0.0
        while (work := parker.calls.get()) is not None:
            runtime, batch, prepared = work
            batch.started = max(batch.started, free_since)  # the batch was formed ahead
            runtime.run(batch, prepared, worker)
            free_since = time.perf_counter()
            runtime.wake_worker()
            del work, runtime, batch, prepared
        parker.dismiss()  # passes the end on to the next thread
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
        while any(runtime.pending(running_only=False) for runtime in runtimes):
            time.sleep(POLL_INTERVAL / 10)
    finally:
        CallQueue.exiting = False
    for runtime in runtimes:
        runtime.shutdown(wait=True, cancel=False)
    if recorder.sink is not None:
        recorder.sink.close()


atexit.register(_at_exit)
