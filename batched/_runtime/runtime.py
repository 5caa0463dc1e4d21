"""Workers' side of a runtime, common to threads and loops: call a worker, find a batch, answer.

Workers follow the leader/followers pattern. At any time at most one free worker watches the queue:
it is about to ask for a batch, or it sleeps until the moment at which a batch may leave. `_alarm`
is the moment at which it looks. A caller that lets a batch leave earlier wakes or starts a worker.
A worker that takes a batch wakes or starts another worker if items still wait. So no thread polls.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Final

from .._core.capacity import Room
from .._core.linger import NEVER
from .._core.policy import BatchPolicy
from .._core.scheduler import Batch, Scheduler
from .._execution.attempts import Outcomes
from .._execution.execution import Execution
from . import observer
from .call_queue import AWAKE, CallQueue
from .observer import Observer
from .recorder import Recorder
from .settling import Settled, Wakers, complete, settle, take_wakers
from .wakers import log_failure, logger, wake_all

CANNOT_START: Final = (RuntimeError, MemoryError)
"""Errors for which no thread can start. A signal handler is taken to raise another type."""

MANY: Final = 1 << 30
"""Number of batches that may run at once where something else is the limit."""

MANY_ALONE: Final = 32
"""Batches of one item in a row, beside other calls, of which a warning tells."""


class Runtime(CallQueue):
    """Runtime of one scheduler; subclasses own the workers."""

    workers_stay: bool
    """Whether workers without work are parked until they are called; if not, they end."""

    def __init__(
        self,
        policy: BatchPolicy,
        execution: Execution,
        recorder: Recorder,
        on_batch: Observer | None,
        name: str,
    ) -> None:
        self.most_workers = policy.max_concurrent_batches
        self.execution = execution
        self.cancels_running = execution.in_steps
        self.observer = on_batch
        workers = policy.max_concurrent_batches
        if execution.in_steps:  # each row is a batch, and the function decides how many are live
            workers *= policy.batch_size
            policy = replace(
                policy, batch_size=1, max_batch_tokens=None, max_concurrent_batches=MANY
            )
        super().__init__(policy, recorder, name)
        self.pool.size = workers
        # batches of one item in a row beside which other calls waited; below 0 once it was told
        self._alone = 0.0

    def _call_worker(self) -> None:
        """Wake a worker that is parked, or start one if fewer run than may run."""
        with self._lock:
            if self._parked:
                self._parked[-1].unpark(self)  # the worker removes its parker from the list
                return
            if len(self._workers) >= self.most_workers:
                return
            parker = self._new_parker()
            self._workers.add(parker)
        try:
            self._start_worker(parker)
        except CANNOT_START as error:
            with self._lock:
                self._workers.discard(parker)  # if the worker has begun nevertheless, it ends
                self._alarm = NEVER  # so that the next call tries again
            if not self._workers:
                self.abort(f"no worker could be started: {error}")

    def _take(self, parker: Any) -> Batch | float | None:
        """Return the next step of a free worker.

        The step is a batch to run, the moment until which to park on `parker`, or None to end.
        """
        more = False  # whether another worker must be called
        with self._lock:
            scheduler = self._scheduler
            if parker not in self._workers:  # the queue was reset, or it could not be started
                return None
            if parker in self._parked:  # the worker woke by itself
                self._parked.remove(parker)
            now = time.perf_counter()
            found: Batch | float | None = scheduler.take(now)
            if found is not None:
                more = scheduler.has_room and scheduler.waiting > 0
                self._alarm = AWAKE if more else NEVER
            else:
                # callers who come back while a worker that stays is awake need not wake it
                found = self._alarm = scheduler.next_deadline(now if self.workers_stay else NEVER)
                stays = self.workers_stay and (self.exiting or not self._closed)
                if stays or found < NEVER or scheduler.waiting:
                    self._parked.append(parker)
                else:
                    self._workers.remove(parker)
                    found = None
            if scheduler.admitted:
                self._notify_admitted()
        if more:
            self._call_worker()
        return found

    def finish(self, batch: Batch, outcomes: Outcomes) -> None:
        """Free the worker of `batch`, then answer the callers.

        So a caller that calls again at once finds the worker free.
        """
        wakers: Wakers = {}
        try:
            with self._lock:
                scheduler = self._scheduler
                if batch not in scheduler.running:  # the queue was reset
                    return
                settled = settle(scheduler, outcomes)
                take_wakers(settled[0], wakers)
                scheduler.finished(batch, time.perf_counter())
                alone = batch.size == 1 < self.policy.batch_size and scheduler.waiting
                self._alone = self._alone + 1 if alone else min(self._alone, 0)
                if self._alone == MANY_ALONE:
                    self._tell_of_groups(batch, scheduler)
                if scheduler.admitted:
                    self._notify_admitted()
            self._answer(batch, wakers, settled)
        except BaseException:
            self.abort("its answer was lost", wakers)
            raise
        if self.observer is not None:
            self.observer(batch, outcomes)
        if batch.attempts > 1:
            self._note_attempts(batch, outcomes)

    def _answer(self, batch: Batch, wakers: Wakers, settled: Settled) -> None:
        """Wake the callers whose requests have ended with `batch`."""
        _, open_ended, parts = settled
        errors = complete(open_ended, self.execution.collator.join, self.name) if open_ended else 0
        self.recorder.ended(batch, errors)
        for request, start, outcomes in parts:
            request.on_part(start, outcomes)  # type: ignore[misc]  # `settle` has looked
        wake_all(wakers.values())
        if observer.meters:
            self.recorder.flush()
            observer.report()
            if observer.share is not None:
                observer.share()

    def fail(self, error: BaseException) -> None:
        """End all calls, because a worker failed with `error`, which is being handled."""
        log_failure("the worker of %s failed", self.name)
        self.abort(f"its worker failed with a {type(error).__name__}")

    def _note_attempts(self, batch: Batch, outcomes: Outcomes) -> None:
        """Log that the function ran in parts, because memory ran out or an item failed."""
        if batch.too_big:
            self.notices.add(
                "memory",
                f"{batch.too_big[0][0]} items ran out of memory, and were run in smaller parts",
            )
        # no code of the classes of errors is called
        if any(issubclass(type(part), BaseException) for part in outcomes[1]):
            self.notices.add(
                "item",
                f"items of a batch of {batch.size} failed; the function was called "
                f"{batch.attempts} times in all",
            )

    def _tell_of_groups(self, batch: Batch, scheduler: Scheduler) -> None:
        """Log which argument keeps calls apart, if any does. The caller holds the lock."""
        key: Any = batch.slices[0][0].group_key
        others = {request.group_key for request in scheduler} - {key}
        if not others:
            return
        self._alone = -math.inf
        other: Any = others.pop()
        names = getattr(key, "arguments", key).differ_from(getattr(other, "arguments", other))
        logger.warning(
            "%s has run %d batches of one item in a row while other calls waited: calls share a "
            "batch if their extra arguments are equal, and these differ in %s. Put what differs "
            "from call to call into the items",
            *(self.name, MANY_ALONE, ", ".join(names) or "dtype, size or device of a feature"),
        )

    def join(self, scheduler: Scheduler, key: Hashable, room: Room) -> list[Batch]:
        """Return rows of the group `key` that join live rows, each a batch of one item.

        `scheduler` handed out the live rows. No call joins them once the queue was reset.
        """
        with self._lock:
            if scheduler is not self._scheduler:
                return []
            batches = scheduler.join(key, room, time.perf_counter())
            self._notify_admitted()
        if observer.probe is not None:
            for batch in batches:
                observer.probe.joined(batch)
        return batches

    @abstractmethod
    def _new_parker(self) -> Any:
        """Return the parker of a new worker for the present scheduler."""

    @abstractmethod
    def _start_worker(self, parker: Any) -> None:
        """Start a worker that calls `_take` with `parker` until the next step is None."""
