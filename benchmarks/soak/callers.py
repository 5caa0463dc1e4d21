"""Callers of a soak, threads and tasks, with every way of calling and of giving up."""

from __future__ import annotations

import concurrent.futures
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel

import batched
from soak.books import Call
from soak.faults import CALLBACK, RAISED, Injected
from soak.subject import Subject

BOUND = 30.0
"""Time after which a wait counts as a hang (s)."""


class Caller:
    """Part common to all callers: making calls, and entering their ends in the books."""

    callback_kinds: tuple[str, ...] = tuple(RAISED)
    """Errors that callbacks of futures raise."""

    def __init__(self, subject: Subject, rng: random.Random, fault_rate: float) -> None:
        self.subject = subject
        self.books = subject.books
        self.faults = subject.faults
        self.rng = rng
        self.fault_rate = fault_rate  # share of calls with a fault
        self.refused = 0  # refused calls in a row, because the batcher was closed

    def new(self, *, listed: bool = False, tagged: bool = True) -> Call:
        """Return a new call, with or without a planned fault."""
        rng, features = self.rng, self.subject.features
        many = listed or (features and rng.random() < 0.3)
        size = rng.choice([1, 2, 3, 7, 20, 90]) if many else 1
        tag = rng.choice([0, 0, 0, 0, 1, 2]) if tagged else 0
        call = self.books.begin(size, tag, listed and not features, rng.choice([0, 1, 3, 3, 17]))
        if rng.random() < self.fault_rate:
            self.faults.plan[rng.choice(call.items)] = rng.choice(self.subject.kinds)
        return call

    def called(self, call: Call, way: Callable[..., Any]) -> Any:
        """Return the result of `call`, called by `way`."""
        argument = self.subject.argument(call)
        if not call.tag:
            return way(argument)
        return way(argument, tag=call.tag) if call.number % 2 else way(argument, call.tag)

    def answered(self, call: Call, answer: Any) -> None:
        self.refused = 0
        self.books.answered(call, self.subject.is_right(call, answer), answer)

    def failed(self, call: Call, error: BaseException) -> None:
        self.refused = self.refused + 1 if isinstance(error, batched.BatcherClosed) else 0
        self.books.failed(call, error)

    def goes_on(self, begun: int, calls: int) -> bool:
        """Return whether to call again, when `begun` calls of all callers have ended since."""
        return len(self.books.outcomes) - begun < calls and not (
            self.subject.over and self.refused > 10
        )

    def submit(self, count: int) -> list[tuple[Call, Any]]:
        """Make `count` calls. Return the accepted calls with their futures."""
        pending = []
        for _ in range(count):
            call = self.new()
            try:
                future = self.called(call, self.subject.fn.submit)
            except BaseException as error:
                self.failed(call, error)
                continue
            pending.append((call, future))
            if self.rng.random() < self.fault_rate / 4:
                kind = self.rng.choice(self.callback_kinds)
                with suppress(BaseException):  # of the callback, if the future is done
                    future.add_done_callback(lambda _, kind=kind: self._raise(kind))
        return pending

    def _raise(self, kind: str) -> None:
        self.faults.injected.append(CALLBACK)
        raise RAISED[kind]()

    def enter(self, call: Call, future: Any) -> None:
        """Enter the end of `future`, which is done."""
        if future.cancelled():
            self.books.cancelled_by_shutdown(call)
        elif (error := future.exception(0)) is not None:
            self.failed(call, error)
        else:
            self.answered(call, future.result(0))

    def cancel(self, call: Call, future: Any) -> bool:
        """Cancel `future`. Return False if it is too late."""
        cancelled = True  # if a callback raises, which `cancel` calls here, as futures do
        with suppress(BaseException):
            cancelled = future.cancel()
        if cancelled:
            if not (future.cancelled() and future.done()):
                self.books.blame("wrong", f"{call} was cancelled, but its future is not")
            self.books.cancelled(call)
        return cancelled


class ThreadCaller(Caller):
    """Caller that is a thread, which its calls block."""

    def run(self, calls: int) -> None:
        ways = [self.burst, self.burst, self.late]
        if self.subject.kind == "threads":
            ways += [self.single, self.single, self.many, self.map]
        begun = len(self.books.outcomes)
        while self.goes_on(begun, calls):
            self.rng.choice(ways)()
            if self.refused:
                time.sleep(0.0005)

    def single(self) -> None:
        for _ in range(self.rng.randint(1, 10)):
            self._block(self.new())

    def many(self) -> None:
        self._block(self.new(listed=True))

    def _block(self, call: Call) -> None:
        try:
            answer = self.called(call, self.subject.fn)
        except BaseException as error:
            self.failed(call, error)
        else:
            self.answered(call, answer)

    def burst(self) -> None:
        pending = self.submit(self.rng.choice([1, 10, 60]))
        if self.rng.random() < 0.5:
            dice = self.rng.random
            pending = [each for each in pending if dice() < 0.8 or not self.cancel(*each)]
        self.collect(pending)

    def late(self) -> None:
        """Wait for a result with a short timeout."""
        pending = self.submit(1)
        for call, future in pending:
            with suppress(BaseException):
                future.result(self.rng.choice([0, 0.0005]))
            if not future.done():
                self.faults.injected.append("timeout of a caller")
                if self.rng.random() < 0.7 and self.cancel(call, future):
                    return
        self.collect(pending)

    def map(self) -> None:
        calls: list[Call] = []
        stop, breaks = self.rng.choice([1000, 1000, 0, 1, 7]), self.rng.random() < self.fault_rate

        def source() -> Iterator[Any]:
            for _ in range(self.rng.randint(0, 60)):
                calls.append(self.new(tagged=False))
                yield self.subject.argument(calls[-1])
            if breaks:
                self.faults.injected.append("source of map raised")
                raise Injected("source")

        results = self.subject.fn.map(
            source(),
            buffersize=self.rng.choice([None, 1, 5]),
            timeout=self.rng.choice([None, None, BOUND, 0.001]),
            return_exceptions=self.rng.random() < 0.7,
        )
        try:
            for count, answer in enumerate(results):
                call = calls.pop(0)
                if isinstance(answer, BaseException):
                    self.failed(call, answer)
                else:
                    self.answered(call, answer)
                if count >= stop:
                    break
        except BaseException as error:
            if isinstance(error, TimeoutError) and not isinstance(error, batched.BatchedError):
                pass  # the timeout of `map`
            elif calls:
                # the call that was read last, or the oldest
                refused = isinstance(error, batched.BatcherClosed) and "before this" not in str(
                    error
                )
                self.failed(calls.pop(-1 if refused else 0), error)
            elif error.args != ("source",):
                self.books.blame("wrong", f"map raised {error!r:.200} without a failed call")
        results.close()
        for call in calls:
            self.books.abandoned(call)

    def collect(self, pending: list[tuple[Call, Any]]) -> None:
        done, _ = concurrent.futures.wait([future for _, future in pending], BOUND)
        for call, future in pending:
            if future in done:
                self.enter(call, future)  # a call that stays open counts as lost


class TaskCaller(Caller):
    """Caller that is a task, on any loop."""

    # after any other error, futures call no further callbacks
    callback_kinds = "raised Exception", "raised hostile exception"

    async def run(self, calls: int) -> None:
        ways = [self.single, self.single, self.many, self.burst, self.late, self.submitted]
        begun = len(self.books.outcomes)
        while self.goes_on(begun, calls):
            await self.rng.choice(ways)()
            if self.refused:
                await anyio.sleep(0.0005)

    async def single(self) -> None:
        await self.wait_for(self.new())

    async def many(self) -> None:
        await self.wait_for(self.new(listed=True))

    async def wait_for(self, call: Call) -> None:
        try:
            answer = await self.called(call, self.subject.fn.acall)
        except anyio.get_cancelled_exc_class():
            self.books.abandoned(call)
            raise
        except BaseException as error:
            self.failed(call, error)
        else:
            self.answered(call, answer)

    async def burst(self) -> None:
        async with anyio.create_task_group() as group:
            for _ in range(self.rng.choice([2, 20, 60])):
                group.start_soon(self.single)  # one that is cancelled first makes no call
            if self.rng.random() < 0.2:
                await anyio.sleep(self.rng.choice([0, 0, 0.0005]))
                self.faults.injected.append("cancelled tasks")
                group.cancel_scope.cancel()

    async def late(self) -> None:
        with anyio.move_on_after(self.rng.choice([0, 0.0002, 0.001])) as scope:
            await self.wait_for(self.new(listed=self.rng.random() < 0.3))
        if scope.cancelled_caught:
            self.faults.injected.append("timeout of a caller")

    async def submitted(self) -> None:
        pending = self.submit(self.rng.choice([1, 20]))
        if self.rng.random() < 0.5:
            await anyio.lowlevel.checkpoint()
        for call, future in pending:
            if self.rng.random() < 0.2 and self.cancel(call, future):
                continue
            with anyio.move_on_after(BOUND):
                while not future.done():  # noqa: ASYNC110  # trio cannot wait for it
                    await anyio.sleep(0.0005)
                self.enter(call, future)
