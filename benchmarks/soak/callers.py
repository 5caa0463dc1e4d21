"""Callers of a soak, with every way of calling and of giving up. Tasks are in `tasks`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import batched
from soak.books import Call
from soak.faults import RAISED, Injected, Untouchable, raise_in_callback
from soak.subject import Subject

BOUND = 30.0
"""Time after which a wait counts as a hang (s)."""

# three types until Python 3.11
LATE = (TimeoutError, concurrent.futures.TimeoutError, asyncio.TimeoutError)


class Caller:
    """Part common to all callers: making calls, and entering their ends in the books."""

    callback_kinds: Sequence[str] = tuple(RAISED)  # errors that callbacks of futures raise

    def __init__(self, subject: Subject, rng: random.Random, fault_rate: float) -> None:
        self.subject = subject
        self.books = subject.books
        self.faults = subject.faults
        self.rng = rng
        self.fault_rate = fault_rate  # share of calls with a fault
        self.refused = 0  # refused calls in a row, because the batcher was closed
        self.hostile: set[int] = set()  # numbers of calls whose futures have a callback that raises

    def new(self, *, listed: bool = False, tagged: bool = True) -> Call:
        """Return a new call, with or without a planned fault."""
        rng = self.rng
        many = listed or (self.subject.features and rng.random() < 0.3)
        size = rng.choice([1, 2, 3, 7, 20, 90]) if many else 1
        tag: Any = 0
        if tagged and (draw := rng.random()) < 0.2:
            tag = int(draw * 15)
            if draw < self.fault_rate / 4:
                tag = Untouchable()
        call = self.books.begin(
            size,
            tag=tag,
            listed=listed and not self.subject.features,
            length=rng.choice([0, 1, 3, 3, 17]),
        )
        if rng.random() < self.fault_rate:
            self.faults.plan[rng.choice(call.items)] = rng.choice(self.subject.kinds)
        return call

    def called(self, call: Call, way: Callable[..., Any], *, submits: bool = False) -> Any:
        """Return the result of `call`, called by `way`."""
        subject = self.subject
        arguments = (subject.argument(call),) if submits else subject.arguments(call)
        if type(call.tag) is int and call.tag == 0:
            return way(*arguments)
        if call.number % 2 or subject.spread:
            return way(*arguments, tag=call.tag)
        return way(*arguments, call.tag)

    def answered(self, call: Call, answer: Any) -> None:
        self.refused = 0
        self.books.answered(call, self.subject.is_right(call, answer), answer)

    def failed(self, call: Call, error: BaseException) -> None:
        self.refused = self.refused + 1 if isinstance(error, batched.BatcherClosed) else 0
        self.books.failed(call, error)

    @property
    def is_over(self) -> bool:
        """Whether the batcher stays closed."""
        return self.subject.over and self.refused > 10

    def submit(self, call: Call) -> Any:
        """Return the future of `call`; None if the call was not accepted."""
        try:
            future = self.called(call, self.subject.fn.submit, submits=True)
        except BaseException as error:
            self.failed(call, error)
            return None
        if self.rng.random() < self.fault_rate / 4:
            self.hostile.add(call.number)
            if (
                self.rng.random() < 0.3
                and self.subject.kind == "threads"
                and isinstance(self, ThreadCaller)
            ):
                future.add_done_callback(self.subject.block)
                return future
            try:
                future.add_done_callback(
                    raise_in_callback(self.faults, self.rng.choice(self.callback_kinds))
                )
            except BaseException:  # of the callback, since the future is done
                pass
        return future

    def submit_all(self, count: int) -> list[tuple[Call, concurrent.futures.Future[Any]]]:
        """Make `count` calls. Return the accepted calls with their futures."""
        pending = []
        for _ in range(count):
            call = self.new()
            future = self.submit(call)
            if future is not None:
                pending.append((call, future))
        return pending

    def enter(self, call: Call, future: concurrent.futures.Future[Any]) -> None:
        """Enter the end of `future`, which is done."""
        if future.cancelled():
            self.books.cancelled_by_shutdown(call)
        elif (error := future.exception(0)) is not None:
            self.failed(call, error)
        else:
            self.answered(call, future.result(0))

    def cancel(self, call: Call, future: concurrent.futures.Future[Any]) -> bool:
        """Cancel `future`. Return False if it is too late."""
        try:
            if not future.cancel():
                return False
        except BaseException:  # of a callback, which `cancel` calls here, as futures do
            if call.number not in self.hostile:
                raise
        if not (future.cancelled() and future.done()):
            self.books.blame("wrong", f"{call} was cancelled, but its future is not")
        self.books.cancelled(call)
        return True

    def source(self, calls: list[Call], *, breaks: bool) -> Iterator[Any]:
        """Yield items for `map`, and add their calls to `calls`."""
        for _ in range(self.rng.randint(0, 60)):
            call = self.new(tagged=False)
            calls.append(call)
            yield self.subject.argument(call)
        if breaks:
            self.faults.injected.append("source of map raised")
            raise Injected("source")

    def entered_from_map(self, calls: list[Call], answer: Any) -> None:
        call = calls.pop(0)
        if isinstance(answer, BaseException):
            self.failed(call, answer)
        else:
            self.answered(call, answer)

    def map_raised(self, calls: list[Call], error: BaseException, *, breaks: bool) -> None:
        """Enter that `map` ended with `error`, and with it the unanswered calls."""
        if isinstance(error, LATE) and not isinstance(error, batched.BatchedError):
            return
        if breaks and type(error) is Injected and error.args == ("source",) and not calls:
            return
        if not calls:
            self.books.blame("wrong", f"map raised {error!r:.200} without a call that failed")
        else:
            # the call that was read last
            refused = isinstance(error, batched.BatcherClosed) and "before this" not in str(error)
            self.failed(calls.pop(-1 if refused else 0), error)


class ThreadCaller(Caller):
    """Caller that is a thread, which its calls block."""

    def run(self, calls: int) -> None:
        ways: list[Callable[[], None]] = [self.burst, self.burst, self.late]
        if self.subject.kind == "threads":
            ways += [self.single, self.single, self.single, self.many, self.map]
        begun = 0
        while begun < calls and not self.is_over:
            before = len(self.books.outcomes)
            self.rng.choice(ways)()
            # ends of the calls of all callers, who make similar numbers of calls
            begun += max(1, len(self.books.outcomes) - before)
            if self.refused:
                time.sleep(0.0005)

    def single(self) -> None:
        for _ in range(self.rng.randint(1, 10)):
            self._blocking(self.new())

    def many(self) -> None:
        self._blocking(self.new(listed=True))

    def _blocking(self, call: Call) -> None:
        try:
            answer = self.called(call, self.subject.fn)
        except BaseException as error:
            self.failed(call, error)
        else:
            self.answered(call, answer)

    def burst(self) -> None:
        pending = self.submit_all(self.rng.choice([1, 10, 60]))
        if self.rng.random() < 0.5:
            pending = [
                (call, future)
                for call, future in pending
                if self.rng.random() < 0.8 or not self.cancel(call, future)
            ]
        self._collect(pending)

    def late(self) -> None:
        """Wait for a result with a short timeout."""
        call = self.new()
        future = self.submit(call)
        if future is None:
            return
        try:
            future.result(self.rng.choice([0, 0.0005]))
        except LATE:
            if not future.done():
                self.faults.injected.append("timeout of a caller")
            if self.rng.random() < 0.7 and self.cancel(call, future):
                return
        except BaseException:
            pass
        self._collect([(call, future)])

    def map(self) -> None:
        calls: list[Call] = []
        breaks = self.rng.random() < max(self.fault_rate, 0.05)
        stop = self.rng.choice([1000, 1000, 0, 1, 7])
        timeout = self.rng.choice([None, None, BOUND, 0.001])
        results = self.subject.fn.map(
            self.source(calls, breaks=breaks),
            buffersize=self.rng.choice([None, 1, 5]),
            timeout=timeout,
            return_exceptions=self.rng.random() < 0.7,
        )
        try:
            for count, answer in enumerate(results):
                self.entered_from_map(calls, answer)
                if count >= stop:
                    break
        except BaseException as error:
            self.map_raised(calls, error, breaks=breaks)
        results.close()
        for call in calls:
            self.books.abandoned(call)

    def _collect(self, pending: list[tuple[Call, Any]]) -> None:
        done, _ = concurrent.futures.wait([future for _, future in pending], BOUND)
        for call, future in pending:
            if future in done:
                self.enter(call, future)  # a call that stays open counts as hung
