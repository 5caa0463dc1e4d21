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
from .._core.policy import BatchPolicy
from .._core.scheduler import Batch, Scheduler
from .._execution.execution import Execution, Prepared
from ..stats import Recorder
from .async_backend import current_loop
from .observer import Observer
from .reception import AWAKE, Reception
from .runtime import Runtime, alive
from .shift import Shift, daemon_thread, enter_worker
from .wakers import POLL_INTERVAL, async_waker, blocking_waker, log_failure, wake_all

_Work = tuple["ThreadRuntime", Batch, Prepared]
"""A runtime, one of its batches, and the collated batch."""


class ThreadRuntime(Runtime):
    """Runtime of at most `max_concurrent_batches` threads that call the function.

    Threads start when they are needed. They end by `shutdown`, or with this object.
    """

    workers_stay = True

    def __init__(
        self,
        policy: BatchPolicy,
        execution: Execution,
        recorder: Recorder,
        observer: Observer | None,
        name: str,
    ) -> None:
        super().__init__(policy, execution, recorder, observer, name)
        if policy.prefetch:
            self.most_workers = 1

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
        waiting = self.waiting_for(None) if wait else None
        if waiting is None:
            return
        with waiting:
            drained = blocking_waker()
            self.when_drained(drained)
            drained.acquire()
        for thread in threads - self._threads:
            thread.join()

    async def aclose(self, *, cancel: bool) -> None:
        """Close, and return once every accepted call has ended."""
        self.close(cancel)
        waiting = self.waiting_for(None)
        if waiting is None:
            return
        with waiting:
            drained = async_waker(current_loop())
            self.when_drained(drained)
            await drained

    def _new_bell(self) -> _Bell:
        return _Bell(self, self._scheduler)

    def _start_worker(self, bell: _Bell) -> None:
        bell.ring(self)
        try:
            if self.policy.prefetch:
                bell.calls = queue.SimpleQueue()
                for _ in range(self.policy.max_concurrent_batches):
                    self._start(_call, bell)
            self._start(_work, bell)
        except BaseException:
            bell.dismiss()
            raise

    def _start(self, work: Callable[[_Bell], None], bell: _Bell) -> None:
        thread = daemon_thread(f"{self.name}-{next(self._numbers)}", work, bell)
        with self._lock:
            self._threads.add(thread)
        bell.threads.append(thread)
        try:
            thread.start()
        except BaseException:
            self._leave(bell)
            raise

    def _leave(self, bell: _Bell) -> None:
        """Forget the threads of a worker that is about to end."""
        with self._lock:
            self._threads.difference_update(bell.threads)

    def run(
        self, batch: Batch, prepared: Prepared | None, shift: Shift, bell: _Bell | None = None
    ) -> Batch | float | None:
        """Call the function for `batch` in this thread, and answer its callers.

        With `bell`, return the next step of the worker (see `Runtime._take`).
        """
        shift.batch, shift.runtime = batch, self
        batch.begun = True
        outcomes = self.execution.run(batch, prepared)
        # contexts live long, and must not keep results alive
        shift.batch = shift.runtime = None
        if shift.waits:
            shift.waits = {}
        found = self._finish(batch, outcomes, bell)
        del outcomes  # an error in the outcomes holds this frame
        return found

    def relieve(self) -> None:
        """Call the worker if there is room for its next batch, or if it can end.

        If all calls have ended, wake the callers that wait for that.
        """
        with self._lock:
            idle = self._closed and not self._scheduler.waiting and bool(self._resting)
            call = idle or self._scheduler.next_deadline() < self._alarm
            if call:
                self._alarm = AWAKE
            drained = self._drained()
        if call:
            self._call_worker()
        wake_all(drained)

    def serve(self, bell: _Bell, shift: Shift) -> bool:
        """Run batches until none is ready. Return False if the worker must end."""
        found = self._take(bell)
        while True:
            if isinstance(found, Batch):
                if bell.calls is None:
                    found = self.run(found, None, shift, bell)
                    continue
                bell.calls.put((self, found, self.execution.prepare(found)))
            elif found is None:
                self._leave(bell)
                return False
            elif found == NEVER:
                return True
            else:
                bell.nap(found - time.perf_counter())
            found = self._take(bell)


class _Bell:
    """Bell on which a worker rests.

    Ringing passes the runtime along, so that a resting worker keeps no runtime alive.
    """

    __slots__ = ("_caller", "_lock", "badge", "calls", "runtime", "scheduler", "threads")

    def __init__(self, runtime: ThreadRuntime, scheduler: Scheduler) -> None:
        self.scheduler: Scheduler | None = scheduler  # scheduler of the worker's batches
        self._lock = threading.Lock()  # locked while the worker may rest
        self._lock.acquire()
        # the runtime that rang last; None if none has, or the runtime is gone
        self._caller: ThreadRuntime | None = None
        self.runtime = weakref.ref(runtime, lambda _: self.ring(None))  # runtime of the worker
        self.badge = runtime.badge
        # the worker, and with `prefetch` the threads that call the function for it
        self.threads: list[threading.Thread] = []
        self.calls: queue.SimpleQueue[_Work | None] | None = None  # work for these threads

    def ring(self, caller: ThreadRuntime | None) -> None:
        """Wake the worker, to serve `caller`."""
        self._caller = caller
        try:
            self._lock.release()
        except RuntimeError:  # already rung
            pass

    def wait(self) -> ThreadRuntime | None:
        """Rest until rung. Return the runtime to serve, or None once the runtime is gone."""
        while True:
            self._lock.acquire()
            caller, self._caller = self._caller, None
            if caller is not None or self.runtime() is None:
                return caller

    def nap(self, seconds: float) -> None:
        """Rest until rung, at most for `seconds`."""
        self._lock.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        self._caller = None  # the worker serves this runtime already

    def dismiss(self) -> None:
        """End the threads that call the function, once they have finished their work."""
        if self.calls is not None:
            self.calls.put(None)


def _work(bell: _Bell) -> None:
    """Serve a runtime until the worker must end. Target of a worker's thread."""
    try:
        shift = enter_worker(bell.badge, thread=True)
        if bell.calls is not None and (runtime := bell.runtime()) is not None:
            runtime.execution.collator.enter_thread()
            del runtime
        while (runtime := bell.wait()) is not None and runtime.serve(bell, shift):
            del runtime
    except BaseException as error:
        _fail(bell.runtime(), error)
    finally:
        bell.dismiss()


def _call(bell: _Bell) -> None:
    """Call the function for each batch that a worker has prepared. Target of a thread."""
    try:
        shift = enter_worker(bell.badge, thread=True)
        assert bell.calls is not None
        free_since = 0.0
        while (work := bell.calls.get()) is not None:
            runtime, batch, prepared = work
            batch.started = max(batch.started, free_since)  # the batch was formed ahead
            runtime.run(batch, prepared, shift)
            free_since = time.perf_counter()
            runtime.relieve()
            del work, runtime, batch, prepared
        bell.dismiss()  # passes the end on to the next thread
    except BaseException as error:
        _fail(bell.runtime(), error)


def _fail(runtime: ThreadRuntime | None, error: BaseException) -> None:
    """End the calls of a runtime whose worker failed."""
    if runtime is not None:  # else no caller is left
        log_failure("the worker of %s failed", runtime.name)
        runtime.forsake(f"its worker failed with a {type(error).__name__}")


def _at_exit() -> None:
    """Finish every accepted call, as `ThreadPoolExecutor` does, and the calls made by these calls.

    An interruption leaves the rest undone.
    """
    runtimes = [runtime for runtime in alive() if isinstance(runtime, ThreadRuntime)]
    Reception.exiting = True
    try:
        for runtime in runtimes:
            runtime.close(cancel=False)
        while any(runtime.pending(running_only=False) for runtime in runtimes):
            time.sleep(POLL_INTERVAL / 10)
    finally:
        Reception.exiting = False
    for runtime in runtimes:
        runtime.shutdown(wait=True, cancel=False)


atexit.register(_at_exit)
