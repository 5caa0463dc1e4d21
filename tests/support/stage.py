"""A batch function under control, and callers of it on any runtime: what the contract tests are
written in.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
import pytest

import batched

BOUND = 20.0
"""Seconds after which a wait counts as a hang."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once `condition` holds. It is for events in other threads that notify nobody."""
    never = threading.Event()
    for _ in range(int(BOUND / 0.002)):
        if condition():
            return
        never.wait(0.002)
    raise AssertionError("it did not happen in time")


def python(
    code: str, *options: str, timeout: float = 2.5 * BOUND
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own, which must end by itself.

    The code may import the modules that tests import.
    """
    return subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def end_together(rows: batched.Rows[Any, Any], count: int) -> None:
    """Finish rows with their own items, once `count` of them are live."""
    while rows:
        rows.join()
        if len(rows) == count:
            for row in rows:
                row.finish(row.item)
            rows.leave()


class Gate:
    """A batch function that waits to be let through, and tells that it was entered."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, items: list[Any]) -> list[Any]:
        self.entered.set()
        assert self.opened.wait(BOUND)
        return items


def held(**settings: Any) -> tuple[Gate, Any, Any]:
    """Return a gate, a batched function that is busy with one item, and the future of that item."""
    gate = Gate()
    fn: Any = batched.dynamically(**{"batch_size": 1, **settings})(gate)
    running = fn.submit("running")
    assert gate.entered.wait(BOUND)
    return gate, fn, running


async def echo_coroutine(items: list[Any]) -> list[Any]:
    return items


class Turnstile:
    """A batch function that waits to be let through, once for each batch."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self._opened = threading.Semaphore(0)

    def __call__(self, items: list[Any]) -> list[Any]:
        self.batches.append(items.copy())
        assert self._opened.acquire(timeout=BOUND), "nobody let the batch through"
        return items

    def let_through(self, batches: int = 1) -> None:
        self._opened.release(batches)


def in_time(function: Callable[[], Any]) -> Any:
    """Return the result of `function`, called in a thread that may be left hanging."""
    outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(BOUND)


def refuse_thread(_: threading.Thread) -> None:
    """Stand in for `Thread.start` where no thread can be started."""
    raise RuntimeError("can't start new thread")


LOOPS: list[tuple[str, dict[str, Any]]] = [("asyncio", {}), ("trio", {})]
"""Backends of `anyio.run`, each with its options."""
if sys.platform != "win32":
    LOOPS.append(("asyncio", {"use_uvloop": True}))


@dataclass(frozen=True)
class Scenario:
    """Who calls, what kind of function, on which loop."""

    kind: str
    loop: str

    @property
    def backend(self) -> tuple[str, dict[str, Any]]:
        if self.loop == "trio":
            return "trio", {}
        return "asyncio", {"use_uvloop": self.loop == "uvloop"}


SCENARIOS = [
    Scenario("threads", "asyncio"),
    *(
        Scenario(kind, loop)
        for kind in ("acall", "aio-sync", "aio-coroutine")
        for loop in ("asyncio", "uvloop", "trio")
    ),
    Scenario("connect", "asyncio"),
    *(Scenario("aio-connect", loop) for loop in ("asyncio", "uvloop", "trio")),
]


def _done(items: list[Any], tag: Any = None) -> list[tuple[str, Any]]:
    return [("done", item) for item in items]


class Stage:
    """A batch function under control: every batch is recorded and, if `gated`, waits to be let
    through.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.kind = scenario.kind
        self._served: Any = None
        if self.is_connected:
            from served import ServedDecorator  # not in the many processes that need no server

            connect = (self.aio_package if self.kind.startswith("aio") else self.package).connect
            self._served = ServedDecorator(self.package.dynamically, connect)
        self.batches: list[list[Any]] = []  # as the function got them
        self.fn: Any = None
        self._threads = threading.Semaphore(0)
        self._tasks = anyio.Semaphore(0)

    package: Any = batched
    aio_package: Any = batched.aio

    @property
    def is_connected(self) -> bool:
        """Whether callers call the function through a socket."""
        return self.kind.endswith("connect")

    @property
    def name(self) -> str:
        """Name of the function in messages."""
        if self._served is not None:
            return str(self._served.served[-1].server.name)
        return str(self.fn.__qualname__)

    @property
    def own_stats(self) -> Any:
        """Counts of this process."""
        return self.fn.client_stats if self.is_connected else self.fn.stats

    def skip_if_connected(self, reason: str) -> None:
        """Skip the test where the function is in another process, with the reason."""
        if self.is_connected:
            pytest.skip(reason)

    @property
    def calls_from_threads(self) -> bool:
        return self.kind in {"threads", "connect"}

    @property
    def decorator(self) -> Any:
        if self._served is not None:
            return self._served
        return (self.aio_package if self.kind.startswith("aio") else self.package).dynamically

    def decorate(
        self, compute: Callable[..., Sequence[Any]] = _done, *, gated: bool = False, **settings: Any
    ) -> Any:
        """Return the batched function, which applies `compute` to each batch."""
        self.fn = self.decorator(**settings)(self.function(compute, gated))
        return self.fn

    def function(self, compute: Callable[..., Any], gated: bool) -> Callable[..., Any]:
        """Return a plain or a coroutine function, as the scenario asks."""

        def plain(items: Any, **extra: Any) -> Any:
            if self.note(items) or gated:
                assert self._threads.acquire(timeout=BOUND), "nobody let the batch through"
            return compute(items, **extra)

        async def coroutine(items: Any, **extra: Any) -> Any:
            if self.note(items) or gated:
                with anyio.fail_after(BOUND):
                    await self._tasks.acquire()
            else:
                await anyio.lowlevel.checkpoint()
            return compute(items, **extra)

        return coroutine if self.kind == "aio-coroutine" else plain

    def note(self, batch: Any) -> bool:
        """Record a batch; return whether it waits to be let through in any case."""
        self.batches.append(batch.copy())
        return False

    def let_through(self, batches: int = 1) -> None:
        """Let that many batches of a gated function pass."""
        for _ in range(batches):
            if self.kind == "aio-coroutine":
                self._tasks.release()
            else:
                self._threads.release()

    async def call(self, item: Any, *, on: Any = None, **extra: Any) -> Any:
        """Call the batched function, or another one, in the way of this scenario."""
        fn = self.fn if on is None else on
        with anyio.fail_after(BOUND):
            if self.calls_from_threads:
                return await anyio.to_thread.run_sync(
                    lambda: fn(item, **extra),
                    abandon_on_cancel=True,
                    limiter=anyio.CapacityLimiter(1),
                )
            return await (fn.acall if self.kind == "acall" else fn)(item, **extra)

    async def close(self) -> None:
        """Let all batches pass, and end all decorated functions."""
        if self.fn is not None:
            self.let_through(1000)
            with anyio.fail_after(BOUND):
                await self.fn.aclose()
        if self._served is not None:
            await anyio.to_thread.run_sync(self._served.stop)

    async def shut_down(self) -> None:
        """Close the function, and its server if it has one, once all observers were called."""
        with anyio.fail_after(BOUND):
            await self.fn.aclose()
            if self._served is not None:
                await anyio.to_thread.run_sync(self._served.stop)

    async def running(self, batches: int) -> None:
        """Return once that many batches have begun."""
        await self.until(lambda: len(self.batches) >= batches)

    async def queued(self, items: int) -> None:
        """Return once exactly that many items wait."""
        await self.until(lambda: self.fn.stats.queue_size == items)

    @staticmethod
    async def until(condition: Callable[[], bool]) -> None:
        with anyio.fail_after(BOUND):
            while not condition():  # noqa: ASYNC110  # read from statistics, which ring no bell
                await anyio.sleep(0.0005)

    @asynccontextmanager
    async def callers(self) -> AsyncIterator[Callers]:
        """Yield a group of concurrent callers; all of them are done at the end of the block."""
        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                yield Callers(self, group)

    busy_item: Any = "busy"

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[Callers]:
        """Yield callers of a gated function, which meanwhile runs a batch of `busy_item` alone."""
        async with self.callers() as callers:
            await callers.call(self.busy_item)
            await self.running(1)
            yield callers


class Callers:
    """Concurrent calls, started one after another in a known order."""

    def __init__(self, stage: Stage, group: anyio.abc.TaskGroup) -> None:
        self.answers: dict[int, Any] = {}  # by the number of the call: what it returned or raised
        self._stage = stage
        self._group = group
        self._started = 0

    async def call(self, item: Any, **extra: Any) -> int:
        """Start a call, and return its number once the call waits in the queue or runs."""
        number, before = self._started, self._stage.fn.stats.calls
        self._started += 1

        async def one() -> None:
            try:
                self.answers[number] = await self._stage.call(item, **extra)
            except Exception as error:
                self.answers[number] = error

        self._group.start_soon(one)
        await self._stage.until(
            lambda: self._stage.fn.stats.calls > before or number in self.answers
        )
        return number
