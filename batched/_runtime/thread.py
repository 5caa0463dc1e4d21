"""The thread runtime: dedicated daemon threads call the batch function, so a model always sees the
same ones.

A worker forms a batch, collates it, calls the function and answers the callers. With `prefetch`
there is one worker, which forms and collates batches while `max_concurrent_batches` other threads
do the rest, so that the next one, if it is full, is ready when the function returns.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from .._core.linger import NEVER
from .._core.policy import BatchPolicy
from .._core.scheduler import Batch, Scheduler
from .._execution.execution import Execution, Prepared
from ..stats import Recorder
from .async_backend import current_loop
from .observer import Observer
from .reception import AWAKE, Reception
from .runtime import Look, Runtime, alive
from .shift import Shift, daemon_thread, enter_worker
from .wakers import POLL_INTERVAL, async_waker, blocking_waker, log_failure, wake_all

_Work = tuple["ThreadRuntime", Batch, Prepared]
"""A batch that is collated, and whose it is."""


class ThreadRuntime(Runtime):
    """At most `max_concurrent_batches` threads call the function, started as they are needed, ended
    by `shutdown` or with this object.
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
        self._threads: set[threading.Thread] = set()  # those of the workers
        self._numbers = itertools.count(1)  # for their names

    def here(self, _: object) -> ThreadRuntime:
        """The runtime that serves callers on some loop, or none: this one, wherever they are."""
        return self

    def shutdown(self, *, wait: bool, cancel: bool) -> None:
        """Closes; with `wait`, returns once every accepted call has ended and the threads have."""
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
        """Closes, and returns once every accepted call has ended."""
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
        """Forgets the threads of a worker that is about to end."""
        with self._lock:
            self._threads.difference_update(bell.threads)

    def _ring(self, bell: Any) -> None:
        bell.ring(self)

    def run(self, batch: Batch, prepared: Prepared | None, bell: Any = None) -> Look | None:
        """Calls the function for `batch` here, and answers its callers; see `_finish`."""
        shift = Shift(self.badge, batch, self.answer)
        try:
            outcomes = self.execution.run(batch, prepared)
            shift.answers()
            # callbacks of futures run in there, and must not wait for this worker either
            look = self._finish(batch, outcomes, bell)
            del outcomes  # an error among them holds this frame
        finally:
            shift.ends()
        return look

    def relieve(self) -> None:
        """Calls the worker to the batch that it had no room for, or to its end, and wakes those who
        wait for the last one.
        """
        with self._lock:
            idle = self._closed and not self._scheduler.waiting and bool(self._resting)
            call = idle or self._scheduler.next_deadline() < self._alarm
            if call:
                self._alarm = AWAKE
            drained = self._drained()
        if call:
            self._call_worker()
        wake_all(drained, current_loop())

    def serve(self, bell: _Bell) -> bool:
        """Runs batches until there is none; False if the worker is to end."""
        look: Look | None = None
        while True:
            found = self._take(bell, look)
            look = None
            if isinstance(found, Batch):
                if bell.calls is None:
                    look = self.run(found, None, bell)
                else:
                    bell.calls.put((self, found, self.execution.prepare(found)))
            elif found is None:
                self._leave(bell)
                return False
            elif found == NEVER:
                return True
            else:
                bell.nap(found - time.perf_counter())


class _Bell:
    """What a worker rests on. It brings the runtime along, so that one without work keeps no
    runtime alive.
    """

    __slots__ = ("_caller", "_lock", "badge", "calls", "runtime", "scheduler", "threads")

    def __init__(self, runtime: ThreadRuntime, scheduler: Scheduler) -> None:
        self.scheduler: Scheduler | None = scheduler  # whose batches the worker runs
        self._lock = threading.Lock()  # locked while the worker may rest
        self._lock.acquire()
        # who rang last; None: nobody, or the runtime is gone
        self._caller: ThreadRuntime | None = None
        self.runtime = weakref.ref(runtime, lambda _: self.ring(None))  # whose worker it is
        self.badge = runtime.badge
        # the worker and those that call the function for it
        self.threads: list[threading.Thread] = []
        self.calls: queue.SimpleQueue[_Work | None] | None = None  # what they are to call

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
            if caller is not None or self.runtime() is None:
                return caller

    def nap(self, seconds: float) -> None:
        """Rests until rung, but not longer than `seconds`."""
        self._lock.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        self._caller = None  # it is being served

    def dismiss(self) -> None:
        """Ends the threads that call the function, after what they have been given."""
        if self.calls is not None:
            self.calls.put(None)


def _work(bell: _Bell) -> None:
    """What a worker does."""
    try:
        enter_worker(bell.badge)
        if bell.calls is not None and (runtime := bell.runtime()) is not None:
            runtime.execution.collator.enter_thread()
            del runtime
        while (runtime := bell.wait()) is not None and runtime.serve(bell):
            del runtime
    except BaseException as error:
        _fail(bell.runtime(), error)
    finally:
        bell.dismiss()


def _call(bell: _Bell) -> None:
    """What a thread does that calls the function for what a worker has prepared."""
    try:
        enter_worker(bell.badge)
        assert bell.calls is not None
        free_since = 0.0
        while (work := bell.calls.get()) is not None:
            runtime, batch, prepared = work
            batch.started = max(batch.started, free_since)  # it was formed ahead
            runtime.run(batch, prepared)
            free_since = time.perf_counter()
            runtime.relieve()
            del work, runtime, batch, prepared
        bell.dismiss()  # for the next of these threads
    except BaseException as error:
        _fail(bell.runtime(), error)


def _fail(runtime: ThreadRuntime | None, error: BaseException) -> None:
    if runtime is not None:  # else there are no callers
        log_failure("the worker of %s failed", runtime.name)
        runtime.forsake(f"its worker failed with a {type(error).__name__}")


def _at_exit() -> None:
    """Finishes what was accepted, as `ThreadPoolExecutor` does, and what that calls in turn;
    interrupted, it leaves the rest undone.
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
