"""A batch function under control, and callers of it on any runtime: what the contract tests are
written in.
"""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
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


@contextmanager
def interrupted_once(ready: Callable[[], object]) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block, in the main thread, once `ready` has returned."""
    over = threading.Event()

    def handle(*_: object) -> None:
        if not over.is_set():
            over.set()
            raise KeyboardInterrupt

    def interrupt() -> None:
        ready()
        # one that comes just before a thread begins to wait is handled at the end of the wait
        while not over.wait(0.1):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, handle)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


def refuse_thread(_: threading.Thread) -> None:
    """Stand in for `Thread.start` where no thread can be started."""
    raise RuntimeError("can't start new thread")


LOOPS = [partial(anyio.run, backend=backend) for backend in ("asyncio", "trio")]
"""`anyio.run` on each loop."""
if sys.platform != "win32":
    LOOPS.append(partial(anyio.run, backend_options={"use_uvloop": True}))


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
        self._served: list[Any] = []
        self.batches: list[list[Any]] = []  # as the function got them
        self.fn: Any = None
        self._threads = threading.Semaphore(0)
        self._tasks = anyio.Semaphore(0)

    @property
    def is_connected(self) -> bool:
        """Whether callers call the function through a socket."""
        return self.kind.endswith("connect")

    @property
    def name(self) -> str:
        return str(self._served[-1].server.name if self._served else self.fn.__qualname__)

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

    def decorated(self, function: Any, **settings: Any) -> Any:
        """Return `function`, decorated and, if the scenario says so, served and connected to."""
        package: Any = batched.aio if self.kind.startswith("aio") else batched
        if not self.is_connected:
            return package.dynamically(**settings)(function)
        from served import Served  # not in the many processes that need no server

        self._served.append(Served(batched.dynamically(**settings)(function)))
        return package.connect(self._served[-1].address)

    def decorate(
        self, compute: Callable[..., Sequence[Any]] = _done, *, gated: bool = False, **settings: Any
    ) -> Any:
        """Return the batched function, which applies `compute` to each batch."""
        self.fn = self.decorated(self.function(compute, gated), **settings)
        return self.fn

    def function(self, compute: Callable[..., Any], gated: bool) -> Callable[..., Any]:
        """Return a plain or a coroutine function, as the scenario asks."""

        def plain(items: Any, **extra: Any) -> Any:
            self.batches.append(items.copy())
            if gated:
                assert self._threads.acquire(timeout=BOUND), "nobody let the batch through"
            return compute(items, **extra)

        async def coroutine(items: Any, **extra: Any) -> Any:
            self.batches.append(items.copy())
            if gated:
                with anyio.fail_after(BOUND):
                    await self._tasks.acquire()
            else:
                await anyio.lowlevel.checkpoint()
            return compute(items, **extra)

        return coroutine if self.kind == "aio-coroutine" else plain

    def let_through(self, batches: int = 1) -> None:
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
            await self.shut_down()

    async def shut_down(self) -> None:
        """Close the function, and its server if it has one, once all observers were called."""
        with anyio.fail_after(BOUND):
            await self.fn.aclose()
            while self._served:
                await anyio.to_thread.run_sync(self._served.pop().stop)

    async def running(self, batches: int) -> None:
        await self.until(lambda: len(self.batches) >= batches)

    async def queued(self, items: int) -> None:
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

    @asynccontextmanager
    async def busy(self, item: Any = "busy") -> AsyncIterator[Callers]:
        """Yield callers of a gated function, which meanwhile runs a batch of `item` alone."""
        async with self.callers() as callers:
            await callers.call(item)
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
