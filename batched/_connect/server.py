"""Model process: runs a batched function for the clients that connect to its socket.

Each client has a thread here, which reads its calls and submits each as a task of an event loop
would: groups, lengths, limits and statistics apply as for local callers, and there is no second
queue. Answers leave from the thread that has finished the batch, in one frame for each client. A
coroutine function runs on the loop of a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pkgutil
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from .._execution.exceptions import SharedError
from .._function.batched import BatchedCallable
from .._function.requests import MISSING
from .._runtime.runtime import CANNOT_START
from .._runtime.timer_thread import daemon_thread, timer
from .._services.failures import error_text, to_remote
from ..errors import BatcherClosed, QueueTimeout, ServerGone
from .connected import ClientFunction
from .frames import (
    CALL,
    CANCEL,
    CHUNK,
    ERROR,
    RESET,
    RESULT,
    STATS,
    Message,
    Numbered,
    error_message,
    load,
    pickled,
)
from .greeting import PATIENCE, Greeting, greet
from .place import Place, served_here, unlock
from .starting import READY
from .wire import Wire

BATCHES: Final = 4
"""Batches of calls that `map` of a client makes ahead, for each batch that may run at once."""
GREETING_TIME: Final = 5.0
"""Time for a client to greet (s)."""
LONGEST: Final = 1e6
"""Longest wait for an event: selectors refuse some longer waits (s)."""
TICK: Final = 1e-2
"""Interval at which a server that ends looks whether all calls are answered (s)."""

logger = logging.getLogger("batched")


def find_function(reference: str) -> BatchedCallable[Any, Any, Any]:
    """Return the batched function `module:attribute`.

    Raises:
        TypeError: the object is no batched function.
        Exception: its module cannot be imported, or has no attribute of this name.
    """
    found = pkgutil.resolve_name(reference)
    # one that is connected itself would wait for this process
    if not isinstance(found, BatchedCallable) or isinstance(found._function, ClientFunction):
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

    def tell(text: str) -> None:
        with suppress(OSError), os.fdopen(report, "wb") as file:  # the client may have gone
            file.write(text.encode() + b"\n")

    for descriptor in (report, lock):
        os.set_inheritable(descriptor, False)
    place = Place(Path(path), by_hand=False)
    try:
        served_here.add(place.path)
        function = find_function(reference)
        server = ModelServer(function, place.listen(), place, linger, lent=True)
    except BaseException as error:
        tell(error_text(error).error.partition("\n")[0])
        raise

    def ready() -> None:
        unlock(lock)
        tell(READY)

    server.run(ready)


class ModelServer:
    """Server of one function. With `linger`, it ends once no client was there for so long (s)."""

    def __init__(
        self,
        function: BatchedCallable[Any, Any, Any],
        listener: socket.socket,
        place: Place,
        linger: float | None = None,
        *,
        lent: bool = False,
    ) -> None:
        self.function = function
        self.name = function._function.name
        self.loop: Any = None  # of a coroutine function
        self.closing = False
        self.sessions: set[Session] = set()
        self._listener = listener
        self._place = place
        self._linger = math.inf if linger is None else linger
        self._is_full = False  # whether no descriptor is left for a client
        self._lent = lent  # whether a client that may end lends its standard error
        self._ends_at = time.perf_counter() + max(self._linger, PATIENCE)  # without a client (s)
        self._greeted_by = 0.0  # when all clients that were accepted have greeted (s)
        self._woken, self._bell = socket.socketpair()
        options = function._function.options
        policy = options.policy
        self.greeting: Greeting = {
            "name": self.name,
            "features": options.features is not None,
            "ahead": BATCHES * policy.batch_size * policy.max_concurrent_batches,
        }

    def run(self, ready: Callable[[], object], ending: Callable[[], object] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT, or until no client is left. Then answer accepted calls.

        `ready` is called once the server serves, and `ending` once it begins to end.
        """
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            from .._operations.collector import register

            register(None)
        if self.function._function.coroutine:
            self.loop = asyncio.new_event_loop()
            daemon_thread(f"{self.name}-loop", self.loop.run_forever).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(ValueError):  # in a test, the thread is not the main one
                signal.signal(number, lambda *_: self.stop())
        self._listener.setblocking(False)
        with self._woken, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            ready()
            while not self.closing:
                left = math.inf if self.sessions else self._ends_at - time.perf_counter()
                if left <= 0:
                    break
                for key, _ in selector.select(min(left, LONGEST)):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._woken.recv(CHUNK)
        self.closing = True
        ending()
        with suppress(OSError, ServerGone):
            self._place.leave()
        self._listener.close()
        self.function.shutdown()
        while any(session.calls for session in list(self.sessions)):
            time.sleep(TICK)
        for session in list(self.sessions):
            session.finish()
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._bell.close()

    def stop(self) -> None:
        """Answer accepted calls, refuse new calls, and end. Any thread may call this."""
        self.closing = True
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # it is about to wake up anyway, or has ended
            self._bell.send(b"\0", socket.MSG_DONTWAIT)

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # too many files are open
            if not self._is_full:
                logger.warning("%s cannot accept a client: %s", self.name, error)
            self._is_full = True
            time.sleep(TICK)
            return
        self._is_full = False
        link.setblocking(True)
        self._greeted_by = time.perf_counter() + GREETING_TIME
        self._ends_at = max(self._ends_at, self._greeted_by)
        try:
            daemon_thread(f"{self.name}-client", Session(self, link).run).start()
        except CANNOT_START as error:
            logger.warning("%s cannot serve a client: %s", self.name, error)
            link.close()

    def note_end(self) -> None:
        """Note that a client has gone."""
        self._ends_at = max(time.perf_counter() + self._linger, self._greeted_by)
        output = select.poll()
        output.register(2, select.POLLOUT)
        is_broken = any(event & ~select.POLLOUT for _, event in output.poll(0))
        if self._lent and not self.closing and (is_broken or not self.sessions):
            self._lent = False
            with suppress(OSError):
                self._place.log_here()
        self._wake()


class Session:
    """Connection of one client.

    For `wake_all`, a session is the event loop of its calls: it gets all calls of a batch together.
    """

    wire: Wire

    def __init__(self, server: ModelServer, link: socket.socket) -> None:
        self.calls: dict[int, _Call] = {}
        """Calls that were accepted and not answered, by number."""
        self.server = server
        self._link = link

    def run(self) -> None:
        """Take calls until the connection ends. Target of a thread."""
        server = self.server
        try:
            _, channel = greet(self._link, server.greeting, GREETING_TIME, first=False)
            self.wire = Wire(self._link, channel)
            server.sessions.add(self)
            while True:
                for number, kind, message in self.wire.read():
                    self._take(number, kind, message)
                if self.wire.is_full:
                    self.wire.wait_sent()
        except EOFError:
            pass
        except Exception as error:  # malformed bytes, or no greeting
            logger.warning("%s closed a connection: %s", server.name, error)
        self._close()

    def _close(self) -> None:
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()
        for call in [*self.calls.values()]:
            call.drop()
        if self in self.server.sessions:
            self.server.sessions.discard(self)
            self.server.note_end()

    def finish(self) -> None:
        """End once the client has read its answers, or has long read nothing."""
        if not self.wire.wait_sent(PATIENCE):
            name = self.server.name
            logger.warning("%s ends, although a client does not read its answers", name)
        self.wire.end()

    def _take(self, number: int, kind: int, message: Message) -> None:
        call, server = self.calls.get(number), self.server
        if kind == CALL and call is None:
            call = self.calls[number] = _Call(self, number)
            preparers = server.function._batcher.preparers
            if preparers is None:
                call.enter(message)
            else:
                preparers.start(call.enter, message)
        elif kind == CANCEL and call is not None:
            call.drop()
        elif kind in (STATS, RESET):
            if kind == RESET:
                server.function.reset_stats()
            self.wire.send((number, kind, pickled(server.function.stats)))

    def run_sync_soon(self, _: object, __: object, calls: list[_Call]) -> None:
        """Answer calls of one batch if their callers still wait."""
        here = [call for call in calls if self.calls.pop(call.number, None) is not None]
        self.wire.send(*[call.answer() for call in here])


class _Call:
    """Call of a client, and its waker."""

    _error: BaseException | None = None
    _expires = False

    def __init__(self, session: Session, number: int) -> None:
        self.number = number
        self._session = session
        self._request: Any = None
        self._runtime: Any = None

    def get_loop(self) -> Session:
        """Return the object that wakes this call, as wakers of coroutines do."""
        return self._session

    def enter(self, message: Message) -> None:
        """Submit the call. An error is its answer."""
        server = self._session.server
        batcher, owner = server.function._batcher, server.function._owner
        try:
            given, kwargs, single, self._queue_timeout_ms = load(message)
            if server.closing:
                raise BatcherClosed(f"{server.name}: its model process is shutting down")
            item, args = (given[0], given[1:]) if given else (MISSING, ())
            self._request = batcher.requests.parse(item, args, kwargs, owner, self, single)
            del message, given, item, args, kwargs
            if not self._request.size:
                self._request.result = []
                self._fail(None)
            elif server.loop is None:
                self._submit()
            else:
                server.loop.call_soon_threadsafe(self._submit)
        except BaseException as error:
            self._fail(error)

    def _submit(self) -> None:
        server = self._session.server
        try:
            if self.number in self._session.calls:
                self._runtime = server.function._batcher.runtime.here(server.loop)
                self._runtime.submit(self._request, from_event_loop=True)
                if self._queue_timeout_ms:
                    timer.start()
                    timer.call_at(time.perf_counter() + self._queue_timeout_ms / 1e3, self.expire)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException | None) -> None:
        self._error = error
        self._session.run_sync_soon(None, None, [self])

    def expire(self) -> None:
        """End the call, unless it has begun."""
        if not self._request.dispatched:
            self._expires = True
            self._runtime.cancel(self._request)

    def drop(self) -> None:
        """Drop the call: its caller has gone."""
        self._session.calls.pop(self.number, None)
        if self._runtime is not None:
            self._runtime.abandon(self._request)

    def answer(self) -> Numbered:
        """Return the message of the answer."""
        request, name = self._request, self._session.server.name
        error = self._error or request.error
        if self._expires and type(error) is CancelledError:
            error = QueueTimeout(
                f"{name}: the call had waited for {self._queue_timeout_ms} ms (queue_timeout_ms), "
                "and none of its items had begun to run; raise queue_timeout_ms, or limit the "
                "unanswered calls by max_queue_size"
            )
        if error is None:
            try:
                return self.number, RESULT, pickled(request.result)
            except BaseException as failed:  # of a class of the result
                why = f"({type(failed).__name__}: {failed})"
                error = TypeError(f"{name} returned an object that cannot be sent {why}")
        if type(error) is SharedError:
            error = error.restored()
        try:
            return self.number, ERROR, error_message(error)
        except BaseException:  # of a class of the error
            return self.number, ERROR, pickled(([], to_remote(error)))
