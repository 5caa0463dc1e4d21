"""Model process: runs a batched function for the clients that connect to its socket.

Every call of a client is a call of the function on the event loop of this process. So groups,
lengths, limits and statistics apply as for local callers, and there is no second queue. Answers of
one batch to one client leave in one write.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import pickle
import pkgutil
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from .._execution.exceptions import SharedError
from .._function.batched import BatchedCallable
from .._function.requests import MISSING
from .._services.failures import error_text, to_remote
from ..errors import BatcherClosed
from .greeting import PATIENCE, Greeting, welcome
from .messages import (
    CALL,
    CANCEL,
    CHUNK,
    ERROR,
    RESET,
    RESULT,
    STATS,
    Channel,
    Frame,
    Message,
    pickled,
)
from .place import Place, listen, served_here
from .starting import READY

BATCHES: Final = 4
"""Batches of calls that each client may have under way, for each batch that may run at once."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""Options of glibc's mallopt."""
KEPT: Final = 1 << 26
"""Bytes from which glibc takes memory from the system for one array alone."""
FEW: Final = 2
"""Most calls of a client under way for which the thread that has an answer writes it."""
TICK: Final = 1e-3
"""Interval at which a server that ends looks whether all calls are answered (s)."""
ACCEPT_PAUSE: Final = 1.0
"""Pause after a client could not be accepted, for instance because too many files are open (s)."""

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
    import fcntl  # not on Windows

    for descriptor in (report, lock):
        os.set_inheritable(descriptor, False)
    place = Place(Path(path), by_hand=False)
    try:
        served_here.add(place.path)
        function = find_function(reference)
        served_here.discard(place.path)
        listener = listen(place.path)
    except BaseException as error:
        _report(report, error_text(error).error.partition("\n")[0])
        raise

    def ready() -> None:
        served_here.add(place.path)
        fcntl.flock(lock, fcntl.LOCK_UN)  # also for a fork of this process
        os.close(lock)
        _report(report, READY)

    asyncio.run(ModelServer(function, listener, place, linger).run(ready))


def _report(descriptor: int, text: str) -> None:
    with suppress(OSError), os.fdopen(descriptor, "wb") as file:  # the client may have gone
        file.write(text.encode() + b"\n")


def keep_memory() -> None:
    """Let glibc keep memory that was freed, for the next arrays.

    Otherwise the system provides the pages of each large array anew, which takes several times as
    long as to copy it. The options are those of mallopt(3).
    """
    with suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, KEPT)
        mallopt(_M_TRIM_THRESHOLD, 4 * KEPT)
        mallopt(_M_TOP_PAD, KEPT)


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
        self.buffer = memoryview(bytearray(CHUNK))  # for the bytes of all clients, on the loop
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
        keep_memory()
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            from .._operations.collector import register

            register(None)
        self.loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._listener.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(RuntimeError, ValueError):  # in a test, the thread is not the main one
                self.loop.add_signal_handler(number, self.stop)
        self._listen()
        self.wait_for_clients(PATIENCE)
        ready()
        await self._ended.wait()
        self.closing = True
        ending()
        with suppress(OSError):
            self._place.leave()
        self.loop.remove_reader(self._listener)
        self._listener.close()
        await self.function.aclose()
        await self._until_read()
        for session in list(self.sessions):
            session.close()

    async def _until_read(self) -> None:
        """Wait until all clients have read their answers, or have long read nothing."""
        left, since = -1, time.perf_counter()
        while busy := [session for session in self.sessions if not session.is_idle]:
            now_left = sum([session.left for session in busy])
            now = time.perf_counter()
            if now_left != left:
                left, since = now_left, now
            elif now - since > PATIENCE:
                logger.warning("%s ends, although a client does not read its answers", self.name)
                break
            await asyncio.sleep(TICK)

    def _listen(self) -> None:
        if not self.closing:
            self.loop.add_reader(self._listener, self._accept)

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
                task.add_done_callback(self._end_greeting)
        except BlockingIOError:
            pass
        except OSError as error:  # for instance, too many files are open
            logger.warning("%s cannot accept a client: %s", self.name, error)
            self.loop.remove_reader(self._listener)
            self.loop.call_later(ACCEPT_PAUSE, self._listen)

    def _end_greeting(self, task: asyncio.Task[None]) -> None:
        self._greeted.discard(task)
        if not self.sessions:  # it was no client, or has gone already
            self.wait_for_clients()

    async def _welcome(self, link: socket.socket) -> None:
        try:
            link.setblocking(True)
            _, channel = await asyncio.to_thread(welcome, link, self._greeting)
            _Session(self, link, channel)
        except BaseException as error:
            link.close()
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, EOFError):
                logger.warning("%s refused a client: %s", self.name, error)

    def wait_for_clients(self, least: float = 0.0) -> None:
        """End once no client has come for `linger` seconds, and at least for `least` seconds."""
        if self._linger is not None:
            if self._alone is not None:
                self._alone.cancel()
            self._alone = self.loop.call_later(max(self._linger, least), self._end_if_alone)

    def _end_if_alone(self) -> None:
        if not self.sessions and not self._greeted:
            self.stop()


class _Session:
    """Connection of one client.

    The loop reads. Answers are written by the loop or, while few calls are under way, by the thread
    that has the answer, because the way through the loop takes as long as a call.
    """

    def __init__(self, server: ModelServer, link: socket.socket, channel: Channel) -> None:
        self.server = server
        self.replies: dict[int, _Reply] = {}
        """Calls that were accepted and not answered, by number."""
        self._link = link
        self._channel = channel
        self._lock = threading.Lock()  # guards the following, and writing
        self._answered: list[_Reply] = []  # replies that the loop is about to write
        self._unsent: deque[memoryview] = deque()  # bytes for which the socket has no room
        link.setblocking(False)
        server.loop.add_reader(link, self._read)
        server.sessions.add(self)

    def _read(self) -> None:
        buffer = self.server.buffer
        try:
            size = self._link.recv_into(buffer)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self.close()
            return
        for frame in self._channel.read(buffer[:size]):
            if frame.kind == CALL:
                self._call(frame)
            elif frame.kind == CANCEL:
                if (reply := self.replies.pop(frame.number, None)) is not None:
                    reply.abandon()
            elif frame.kind in (STATS, RESET):
                function = self.server.function
                if frame.kind == RESET:
                    function.reset_stats()
                self._write([(frame.kind, frame.number, pickled(function.stats))])

    def close(self) -> None:
        """Close the connection, and abandon the calls that are not answered."""
        server = self.server
        if self in server.sessions:
            server.sessions.discard(self)
            server.loop.remove_reader(self._link)
            server.loop.remove_writer(self._link)
            with self._lock:
                self._link.close()
            replies, self.replies = self.replies, {}
            for reply in replies.values():
                reply.abandon()
            if not server.sessions:
                server.wait_for_clients()

    @property
    def left(self) -> int:
        """Calls without an answer, and bytes of answers that the client has not read."""
        return len(self.replies) + sum(map(len, self._unsent))

    @property
    def is_idle(self) -> bool:
        """Whether all accepted calls are answered, and all answers were sent."""
        return not self.replies and not self._answered and not self._unsent

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
                self._write([(RESULT, number, pickled([]))])
                return
            self.replies[number] = reply
            reply.runtime.submit(request, from_event_loop=True)
        except Exception as error:
            self.replies.pop(number, None)
            self._write([error_frame(number, error)])

    def answer(self, reply: _Reply) -> None:
        """Write the answer of `reply`. Any thread may call this."""
        if len(self.replies) <= FEW:
            self._write_answers([reply])
            return
        with self._lock:
            self._answered.append(reply)
            if len(self._answered) > 1:
                return
        with suppress(RuntimeError):  # the loop is closed
            self.server.loop.call_soon_threadsafe(self._write_answered)

    def _write_answered(self) -> None:
        with self._lock:
            answered, self._answered = self._answered, []
        self._write_answers(answered)

    def _write_answers(self, replies: list[_Reply]) -> None:
        """Write answers to calls whose callers still wait."""
        frames = [
            reply.frame() for reply in replies if self.replies.pop(reply.number, None) is not None
        ]
        if frames:
            self._write(frames)

    def _write(self, frames: list[tuple[int, int, Message]]) -> None:
        with self._lock:
            parts = [part for frame in frames for part in self._channel.write(*frame)]
            self._unsent.append(memoryview(b"".join(parts)))
            blocks = len(self._unsent) == 1 and not self._send()
        if blocks:
            self.server.loop.call_soon_threadsafe(self._wait_to_write)

    def _send(self) -> bool:
        """Send all bytes that the socket takes, under the lock. Return whether none is left."""
        unsent = self._unsent
        try:
            while unsent:
                unsent[0] = unsent[0][self._link.send(unsent[0]) :]
                if not unsent[0]:
                    unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # the client has gone, which the loop reads
            unsent.clear()
        return not unsent

    def _wait_to_write(self) -> None:
        if self in self.server.sessions:
            self.server.loop.add_writer(self._link, self._write_unsent)

    def _write_unsent(self) -> None:
        with self._lock:
            if self._send():
                self.server.loop.remove_writer(self._link)


class _Reply:
    """Waker of a call of a client: writes the answer, in the thread that has it."""

    __slots__ = ("number", "request", "runtime", "session")

    def __init__(self, session: _Session, number: int, runtime: Any) -> None:
        self.runtime = runtime
        self.request: Any = None
        self.number = number
        self.session = session

    def release(self) -> None:
        """Answer the call, as a lock is released to wake a caller."""
        self.session.answer(self)

    def frame(self) -> tuple[int, int, Message]:
        """Return the frame of the answer."""
        error = self.request.error
        if error is None:
            try:
                return RESULT, self.number, pickled(self.request.result)
            except Exception as failed:
                why = f"({type(failed).__name__}: {failed})"
                name = self.session.server.name
                error = TypeError(f"{name} returned an object that cannot be sent {why}")
        return error_frame(self.number, error.restored() if type(error) is SharedError else error)

    def abandon(self) -> None:
        """Drop the call: its caller has gone."""
        self.runtime.abandon(self.request)


def error_frame(number: int, error: BaseException) -> tuple[int, int, Message]:
    """Return the frame of an error: the pickled error and its causes, and its text."""
    data = None
    with suppress(Exception):  # of a class
        chain = [error]
        while (cause := chain[-1].__cause__) is not None and cause not in chain:
            chain.append(cause)
        data = pickle.dumps(chain, 5)
        pickle.loads(data)
    return ERROR, number, pickled((data, to_remote(error)))
