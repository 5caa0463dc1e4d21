"""Model process: runs a batched function for the clients that connect to its socket.

Every call of a client is a call of the function on the event loop of this process. So groups,
lengths, limits and statistics apply as for local callers, and there is no second queue. Answers of
one batch to one client leave in one write.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import pkgutil
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from .._execution.exceptions import SharedError
from .._function.batched import BatchedCallable
from .._function.requests import MISSING
from .._services.failures import error_text, to_remote
from ..errors import BatcherClosed
from .greeting import Greeting, welcome
from .messages import CALL, CANCEL, ERROR, RESET, RESULT, STATS, Channel, Frame, pickled
from .place import Place, listen, served_here
from .starting import READY

BATCHES: Final = 4
"""Batches of calls that each client may have under way, for each batch that may run at once."""

TICK: Final = 1e-3
"""Interval at which a server that ends looks whether all calls are answered (s)."""

logger = logging.getLogger("batched")


def find_function(reference: str) -> BatchedCallable[Any, Any, Any]:
    """Return the batched function `module:attribute`.

    Raises:
        TypeError: the object is no batched function.
        Exception: its module cannot be imported, or has no such attribute.
    """
    found = pkgutil.resolve_name(reference)
    if not isinstance(found, BatchedCallable):
        raise TypeError(
            f"{reference} is no batched function but {type(found).__name__}; decorate it with "
            "@batched.dynamically, and name a method of an instance as module:instance.method"
        )
    return found


def main(reference: str, path: str, linger: float, report: int, lock: int) -> None:
    """Serve a function for the client that started this process.

    `report` and `lock` are descriptors: of a pipe for the one sentence that the client reads, and
    of the lock file, which is unlocked once this process listens.
    """
    for descriptor in (report, lock):
        os.set_inheritable(descriptor, False)
    place = Place(Path(path))
    try:
        function = find_function(reference)
        listener = listen(place.path)
    except BaseException as error:
        _report(report, error_text(error).error.partition("\n")[0])
        raise

    def ready() -> None:
        served_here.add(place.path)
        os.close(lock)
        _report(report, READY)

    asyncio.run(ModelServer(function, listener, place, linger).run(ready))


def _report(descriptor: int, text: str) -> None:
    with suppress(OSError), os.fdopen(descriptor, "wb") as file:  # the client may have gone
        file.write(text.encode())


class ModelServer:
    """Server of one function. With `linger`, it ends once no client was there for so long (s)."""

    def __init__(
        self,
        function: BatchedCallable[Any, Any, Any],
        listener: socket.socket,
        place: Place,
        linger: float | None,
    ) -> None:
        self.function = function
        self.name = function._function.name
        self.loop: asyncio.AbstractEventLoop
        self.closing = False
        self.sessions: set[_Session] = set()
        self._listener = listener
        self._place = place
        self._linger = linger
        self._alone: asyncio.TimerHandle | None = None  # since the last client has gone
        self._ended: asyncio.Event
        self._greeted: set[asyncio.Task[None]] = set()
        options = function._function.options
        policy = options.policy
        self._greeting: Greeting = {
            "name": self.name,
            "pid": os.getpid(),
            "features": options.features is not None,
            "credit": BATCHES * policy.batch_size * policy.max_concurrent_batches,
        }

    async def run(
        self, ready: Callable[[], object], ending: Callable[[], object] = lambda: None
    ) -> None:
        """Serve until SIGTERM or SIGINT, or until no client is left. Then answer accepted calls.

        `ready` is called once the server serves, and `ending` once it begins to end.
        """
        self.loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._listener.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(RuntimeError, ValueError):  # in a test, the thread is not the main one
                self.loop.add_signal_handler(number, self.stop)
        self.loop.add_reader(self._listener, self._accept)
        self._wait_for_clients()
        ready()
        await self._ended.wait()
        self.closing = True
        ending()
        with suppress(OSError), self._place.locked(wait=True):
            self._place.remove()
        self.loop.remove_reader(self._listener)
        self._listener.close()
        await self.function.aclose()
        await self._until(lambda: not any(session.replies for session in self.sessions))
        for session in list(self.sessions):
            session.close()
        await self._until(lambda: not self.sessions)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # noqa: ASYNC110  # the hot path need not note each change
            await asyncio.sleep(TICK)

    def stop(self) -> None:
        """Answer accepted calls, refuse new ones, and end. Only the server's loop calls this."""
        self._ended.set()

    def _accept(self) -> None:
        """Accept the clients that wait."""
        try:
            while True:
                link, _ = self._listener.accept()
                task = asyncio.create_task(self._welcome(link))
                self._greeted.add(task)
                task.add_done_callback(self._greeted.discard)
        except BlockingIOError:
            pass
        except OSError as error:  # for instance, too many files are open
            logger.warning("%s cannot accept a client: %s", self.name, error)

    async def _welcome(self, link: socket.socket) -> None:
        try:
            link.setblocking(True)
            _, channel = await asyncio.to_thread(welcome, link, self._greeting)
            await self.loop.connect_accepted_socket(lambda: _Session(self, channel), link)
        except BaseException as error:
            link.close()
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, EOFError):
                logger.warning("%s refused a client: %s", self.name, error)

    def _wait_for_clients(self) -> None:
        """End once no client has come for `linger` seconds."""
        if self._linger is not None:
            if self._alone is not None:
                self._alone.cancel()
            self._alone = self.loop.call_later(self._linger, self._end_if_alone)

    def _end_if_alone(self) -> None:
        if not self.sessions and not self._greeted:
            self.stop()


class _Session(asyncio.Protocol):
    """Connection of one client."""

    def __init__(self, server: ModelServer, channel: Channel) -> None:
        self.server = server
        self.replies: dict[int, _Reply] = {}
        """Calls that were accepted and not answered, by number."""
        self._channel = channel
        self._transport: asyncio.Transport
        self._unsent: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # that of a socket
        self.server.sessions.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        server = self.server
        server.sessions.discard(self)
        replies, self.replies = self.replies, {}
        for reply in replies.values():
            reply.abandon()
        if not server.sessions:
            server._wait_for_clients()

    def data_received(self, data: bytes) -> None:
        for frame in self._channel.read(data):
            if frame.kind == CALL:
                self._call(frame)
            elif frame.kind == CANCEL:
                if (reply := self.replies.pop(frame.number, None)) is not None:
                    reply.abandon()
            elif frame.kind in (STATS, RESET):
                function = self.server.function
                if frame.kind == RESET:
                    function.reset_stats()
                self.send(frame.kind, frame.number, function.stats)

    def close(self) -> None:
        """Send the frames that wait, and close the connection."""
        self._flush()
        self._transport.close()

    def _call(self, frame: Frame) -> None:
        server = self.server
        number = frame.number
        batched = server.function
        try:
            given, kwargs, single = frame.load()
            if server.closing:
                raise BatcherClosed(f"{server.name}: its model process is shutting down")
            item, args = (given[0], given[1:]) if given else (MISSING, ())
            batcher = batched._batcher
            reply = _Reply(self, number, batcher.runtime.here(server.loop))
            reply.request = request = batcher.requests.parse(
                item, args, kwargs, batched._owner, reply, single
            )
            del given, item, args, kwargs
            if not request.size:
                self.send(RESULT, number, [])
                return
            self.replies[number] = reply
            reply.runtime.submit(request, from_event_loop=True)
        except Exception as error:
            self.replies.pop(number, None)
            self.send_error(number, error)

    def send(self, kind: int, number: int, value: object) -> None:
        """Send a frame, together with the other frames of this turn of the loop."""
        if not self._unsent:
            self.server.loop.call_soon(self._flush)
        self._unsent += self._channel.write(kind, number, pickled(value))

    def send_error(self, number: int, error: BaseException) -> None:
        """Send the error of a call."""
        data = None
        with suppress(Exception):  # of a class
            chain = [error]
            while (cause := chain[-1].__cause__) is not None and cause not in chain:
                chain.append(cause)
            data = pickle.dumps(chain, 5)
            pickle.loads(data)
        self.send(ERROR, number, (data, to_remote(error)))

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._transport.write(b"".join(unsent))


class _Reply:
    """Waker of a call of a client: sends the answer, on the loop of the server."""

    __slots__ = ("_done", "_number", "_session", "request", "runtime")

    def __init__(self, session: _Session, number: int, runtime: Any) -> None:
        self.runtime = runtime
        self.request: Any = None
        self._session = session
        self._number = number
        self._done = False

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._session.server.loop

    def done(self) -> bool:
        return self._done

    def set_result(self, _: None, /) -> None:
        """Send the answer of the request, unless its caller has gone."""
        self._done = True
        request, session = self.request, self._session
        if session.replies.pop(self._number, None) is None:
            return
        error = request.error
        if error is None:
            try:
                session.send(RESULT, self._number, request.result)
                return
            except Exception as failed:
                why = f"({type(failed).__name__}: {failed})"
                name = session.server.name
                error = TypeError(f"{name} returned an object that cannot be sent {why}")
        session.send_error(self._number, error.restored() if type(error) is SharedError else error)

    def abandon(self) -> None:
        """Drop the call: its caller has gone."""
        self.runtime.abandon(self.request)
