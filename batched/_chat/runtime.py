"""Runtime of clients: the batches of all callers are tasks on one event loop in a daemon thread."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial
from typing import Any

from .._core.scheduler import Batch, Request
from .._function.function import BatchFunction, Parts
from .._runtime.async_backend import current_loop
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
    """Runtime on the loop of all clients."""

    finishes_at_exit = True

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.cancels_running = True

    def _start_worker(self, parker: Any) -> None:
        clients_loop().call_soon_threadsafe(super()._start_worker, parker)

    def cancel(self, request: Request, even_begun: bool = False) -> bool:
        """Cancel a call as other runtimes do, and end the work for items that have begun."""
        items = request.items if request.listed else [request.items]
        if not super().cancel(request, even_begun):
            return False
        if request.dispatched:
            for item in items:
                clients_loop().call_soon_threadsafe(item.give_up)
        return True

    def wait(self, request: Request, waker: Any, /) -> None:
        """Block this thread until the call has ended."""
        self.check_wait()
        super().wait(request, waker)

    def check_wait(self) -> None:
        """Note that this code is about to wait for a call.

        Raises:
            RuntimeError: the code might wait for itself, and so for ever.
        """
        if current_loop() is clients_loop():
            raise RuntimeError(
                f"{self.name} is called by a validator or by on_batch, on the thread that answers "
                "the calls of all clients, and would wait for itself; call it with the answer"
            )
        super().check_wait()

    def _answer(self, batch: Batch, wakers: Wakers, settled: Settled) -> None:
        """Wake the callers, and end requests for lists that have failed.

        A new thread wakes futures, because their callbacks may block.
        """
        for request in settled[1]:
            if request.error is not None and request.listed:
                for item in request.items:
                    item.give_up()
        answer = partial(super()._answer, batch, wakers, settled)
        if not any(isinstance(waker, Future) for waker in wakers.values()):
            answer()
            return
        self.waking.add(id(batch))

        def answer_futures() -> None:
            try:
                answer()
            finally:
                self.waking.discard(id(batch))

        try:
            daemon_thread(f"{self.name}-callbacks", answer_futures).start()
        except RuntimeError:  # no more threads
            answer_futures()


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
