"""Callers of a soak that are tasks, on asyncio, uvloop and trio."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from soak.books import Call
from soak.callers import BOUND, Caller

LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"backend": "asyncio", "backend_options": {"use_uvloop": False}},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}
"""Arguments of `anyio.run` for each loop."""


class TaskCaller(Caller):
    """Caller that is a task, on any loop."""

    callback_kinds: Sequence[str] = (
        "raised Exception",
        "raised hostile exception",
    )  # after any other error, futures call no further callbacks

    async def run(self, calls: int) -> None:
        ways: list[Callable[[], Awaitable[None]]] = [
            self.single,
            self.single,
            self.single,
            self.many,
            self.burst,
            self.late,
            self.submitted,
        ]
        if self.subject.kind != "threads":
            ways.append(self.map)
        begun = 0
        while begun < calls and not self.is_over:
            before = len(self.books.outcomes)
            await self.rng.choice(ways)()
            begun += max(1, len(self.books.outcomes) - before)
            if self.refused:
                await anyio.sleep(0.0005)

    async def single(self) -> None:
        for _ in range(self.rng.randint(1, 10)):
            await self._awaited(self.new())

    async def many(self) -> None:
        await self._awaited(self.new(listed=True))

    async def _awaited(self, call: Call) -> None:
        fn = self.subject.fn
        try:
            answer = await self.called(call, fn.acall if self.subject.kind == "threads" else fn)
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
                group.start_soon(self._one)
            if self.rng.random() < 0.2:
                await anyio.sleep(self.rng.choice([0, 0, 0.0005]))
                self.faults.injected.append("cancelled tasks")
                group.cancel_scope.cancel()

    async def _one(self) -> None:  # a task that is cancelled before it begins has made no call
        await self._awaited(self.new())

    async def late(self) -> None:
        with anyio.move_on_after(self.rng.choice([0, 0.0002, 0.001])) as scope:
            await self._awaited(self.new(listed=self.rng.random() < 0.3))
        if scope.cancelled_caught:
            self.faults.injected.append("timeout of a caller")

    async def submitted(self) -> None:
        pending = self.submit_all(self.rng.choice([1, 20]))
        if self.rng.random() < 0.5:
            await anyio.lowlevel.checkpoint()
        for call, future in pending:
            if self.rng.random() < 0.2 and self.cancel(call, future):
                continue
            with anyio.move_on_after(BOUND):
                await finished(future)
                self.enter(call, future)

    async def map(self) -> None:
        calls: list[Call] = []
        breaks = self.rng.random() < max(self.fault_rate, 0.05)
        stop = self.rng.choice([1000, 1000, 0, 1, 7])
        results = self.subject.fn.map(
            self.source(calls, breaks=breaks),
            buffersize=self.rng.choice([None, 1, 5]),
            timeout=self.rng.choice([None, None, BOUND, 0.001]),
            return_exceptions=self.rng.random() < 0.7,
        )
        count = 0
        try:
            async for answer in results:
                self.entered_from_map(calls, answer)
                count += 1
                if count > stop:
                    break
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:
            self.map_raised(calls, error, breaks=breaks)
        finally:
            await results.aclose()
            for call in calls:
                self.books.abandoned(call)


async def finished(future: concurrent.futures.Future[Any]) -> None:
    """Wait until `future` is done, on any loop."""
    if future.done():
        return
    if _on_asyncio():
        wrapped = asyncio.wrap_future(future)
        # its caller reads the error
        wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([wrapped])
    while not future.done():  # noqa: ASYNC110  # trio cannot wait for it
        await anyio.sleep(0.0005)


def _on_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
