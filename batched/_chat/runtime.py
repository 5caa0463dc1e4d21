"""Runtime of clients: the items of all callers are tasks on one event loop in a daemon thread."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

from .._core.policy import BatchPolicy
from .._core.scheduler import Batch, Request
from .._execution.execution import Execution
from .._function.function import BatchFunction, Parts
from .._runtime.event_loop import EventLoopRuntime
from .._runtime.settling import Settled, Wakers
from .._runtime.timer_thread import daemon_thread
from .._runtime.wakers import Future

_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""Event loops of all clients, by process."""


def clients_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all clients in this process, and start its thread."""
    if (loop := _loops.get(os.getpid())) is None:
        made = asyncio.new_event_loop()
        loop = _loops.setdefault(os.getpid(), made)  # the first of several threads
        if loop is made:
            daemon_thread("loop-of-clients", loop.run_forever).start()
        else:
            made.close()
    return loop


class ClientRuntime(EventLoopRuntime):
    """Runtime with a task for each item, on the loop of all clients.

    So an item ends alone, and the items of a request are chosen at the moment of its sending.
    """

    finishes_at_exit = True

    def __init__(self, policy: BatchPolicy, execution: Execution, *rest: Any) -> None:
        items = policy.batch_size * policy.max_concurrent_batches
        if policy.batch_size > 1:  # requests are formed from items that wait
            items *= 2
        policy = replace(policy, batch_size=1, max_concurrent_batches=items)
        super().__init__(policy, execution, *rest)
        self.cancels_running = True

    def _reset(self) -> None:
        super()._reset()
        self._answers: list[Any] = []  # ended batches with futures that are not woken yet

    def _start_worker(self, parker: Any) -> None:
        clients_loop().call_soon_threadsafe(super()._start_worker, parker)

    def cancel(self, request: Request, even_begun: bool = False) -> bool:
        """Cancel a call as other runtimes do, and end the work for items that have begun."""
        items = request.items if request.listed else [request.items]
        if not super().cancel(request, even_begun):
            return False
        if request.dispatched:
            clients_loop().call_soon_threadsafe(_give_up, items)
        return True

    def _answer(self, batch: Batch, wakers: Wakers, settled: Settled) -> None:
        """Wake the callers. A new thread wakes futures, because their callbacks may block."""
        if not any(isinstance(waker, Future) for waker in wakers.values()):
            super()._answer(batch, wakers, settled)
            return
        self.waking.add(id(batch))
        self._answers.append((batch, wakers, settled))
        if len(self._answers) == 1:  # the items of one request end together
            clients_loop().call_soon(self._answer_futures)

    def _answer_futures(self) -> None:
        answers, self._answers = self._answers, []
        try:
            daemon_thread(f"{self.name}-callbacks", self._answer_all, answers).start()
        except RuntimeError:  # no more threads
            self._answer_all(answers)

    def _answer_all(self, answers: list[Any]) -> None:
        for batch, wakers, settled in answers:
            try:
                super()._answer(batch, wakers, settled)
            finally:
                self.waking.discard(id(batch))


def _give_up(items: list[Any]) -> None:
    for item in items:
        item.give_up()


class ClientFunction(BatchFunction):
    """Batch function of a client: a blocking call, and a coroutine method `on_loop`."""

    @property
    def runtime(self) -> Any:
        """Class of its runtime."""
        return ClientRuntime

    def parts(self, *, bound: bool) -> Parts:
        """Return new parts. Their runtime awaits `on_loop`."""
        parts = super().parts(bound=bound)
        func = getattr(self.func, "on_loop", self.func)  # absent in a step of an offline run
        return parts._replace(execution=replace(parts.execution, func=func))
