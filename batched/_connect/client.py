"""Client's runtime: calls cross a socket to a model process, which runs them.

The queue of a client is that of any runtime. A call leaves the queue as soon as the process has
room for it (`credit`): the thread that calls also sends, and sends the calls of other threads that
come meanwhile. One thread for each connection connects, receives answers and wakes callers.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import socket
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from .._core.capacity import Capacity
from .._core.linger import NEVER
from .._core.policy import BatchPolicy
from .._core.scheduler import Batch, Request
from .._execution.execution import Execution
from .._function.requests import MISSING
from .._runtime.async_backend import current_loop, post
from .._runtime.call_queue import CallQueue
from .._runtime.recorder import Recorder
from .._runtime.runtime import CANNOT_START, MANY
from .._runtime.settling import Wakers, take_wakers
from .._runtime.timer_thread import daemon_thread
from .._runtime.waits import enter_worker
from .._runtime.wakers import log_failure, wake_all
from ..errors import BatcherClosed, RemoteError, ServerGone
from ..stats import Stats
from .greeting import Greeting
from .messages import CALL, CANCEL, CHUNK, RESET, RESULT, STATS, Channel, Frame, Message, pickled
from .place import Place

MOST_TURNS: Final = 8
"""Most times that a caller sends calls of other threads before a thread takes over."""
LEAST_AHEAD: Final = 256
"""Least number of calls that `map` makes ahead by default."""
PATIENCE: Final = 10.0
"""Time for the model process to send its statistics (s)."""

Dial = Callable[[], tuple[socket.socket, Greeting, Channel, Place]]


class ClientParser:
    """Parser of calls that a model process parses again."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read(
        self, item: Any, args: tuple[Any, ...], _: object, single: bool, /
    ) -> tuple[Any, tuple[Any, ...], bool]:
        """Return what `prepare` gets: see `ItemRequestParser.read`."""
        if item is MISSING:
            raise TypeError(f"{self._name} needs an item, or a list of items")
        return item, args, single or not isinstance(item, list)

    def parse(
        self,
        item: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        _: object,
        waker: Any,
        single: bool,
        /,
    ) -> Request:
        """Return the call, whose items are a message.

        Raises:
            TypeError: an argument cannot be pickled.
        """
        if not single and isinstance(item, list) and not item:
            return Request(None, 0, None, waker)
        given = args if item is MISSING else (item, *args)
        try:
            message = pickled((given, kwargs, single))
        except Exception as error:
            raise TypeError(
                f"the arguments of {self._name} cannot be sent to its process "
                f"({type(error).__name__}: {error})"
            ) from error
        return Request(message, 1, None, waker)


class _Connection:
    """Socket of a client, and the calls that were sent and not answered."""

    def __init__(
        self, link: socket.socket, greeting: Greeting, channel: Channel, place: Place
    ) -> None:
        self.channel = channel
        self.credit: int = greeting["credit"]  # most calls under way
        self.peer: int = greeting["pid"]  # the process
        self.place = place
        self.calls: dict[int, tuple[Request, Batch]] = {}  # by number; under the runtime's lock
        self.outbox: deque[tuple[int, int, Message | None]] = deque()  # frames besides calls
        self.sending = False  # whether a thread sends; under the runtime's lock
        self._link = link

    def send(self, data: bytes | memoryview, *, wait: bool) -> memoryview | None:
        """Send `data`. Without `wait`, return the rest for which the socket has no room."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._link.send(rest, 0 if wait else socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                return rest
        return None

    def receive(self, buffer: bytearray) -> int:
        """Fill `buffer`. Return the number of bytes, 0 at the end of the connection."""
        try:
            return self._link.recv_into(buffer)
        except OSError:
            return 0

    def end(self) -> None:
        """End the connection. The thread that receives wakes up and closes the socket."""
        try:
            self._link.shutdown(socket.SHUT_RDWR)
        except OSError:  # has ended already
            pass

    def close(self) -> None:
        """Close the socket in this process."""
        self._link.close()


class ClientRuntime(CallQueue):
    """Runtime of the calls of this process for one model process."""

    cancels_running = True

    def __init__(
        self,
        policy: BatchPolicy,
        execution: Execution,
        recorder: Recorder,
        _: object,
        name: str,
    ) -> None:
        self._remote: Any = execution.func  # a `RemoteFunction`
        self._numbers = itertools.count(1)  # of the threads
        self._pause = 0.0  # time until a process that has died is started again (s)
        super().__init__(
            replace(policy, flush="eager", max_concurrent_batches=MANY), recorder, name
        )

    def _reset(self) -> None:
        super()._reset()
        self._connection: _Connection | None = None
        self._connecting = False
        self._posted: object = None  # the loop that will call `_send`

    def close(self, cancel: bool) -> None:
        super().close(cancel)
        with self._lock:
            self._end_if_idle()

    def submit(self, request: Request, *, from_event_loop: bool) -> bool:
        queued = super().submit(request, from_event_loop=from_event_loop)
        if self._connection is not None:
            waker = request.waker
            # a task that awaits lets the calls of other tasks of its loop join
            if hasattr(waker, "get_loop") and (loop := current_loop()) is waker.get_loop():
                self._send_soon(loop)
            else:
                self._send()
        return queued

    def cancel(self, request: Request, even_begun: bool = False) -> bool:
        del even_begun  # only the model process knows; it drops a call that has not begun there
        cancelled = super().cancel(request, True)
        if cancelled and request.dispatched:
            with self._lock:
                connection = self._connection
                if connection is None:
                    return True
                sent, batch = connection.calls.get(request.number, (None, None))
                if sent is not request or batch is None:  # of an earlier connection
                    return True
                del connection.calls[request.number]
                self._end_calls({batch: 1})
                connection.outbox.append((CANCEL, request.number, None))
                self._end_if_idle()
            self._send()
        return cancelled

    def abort(self, why: str, wakers: Wakers | None = None) -> None:
        connection = self._connection
        super().abort(why, wakers)
        if connection is not None:
            connection.end()

    def forget(self) -> None:
        if self._connection is not None:  # the parent of a fork goes on using the socket
            self._connection.close()
        super().forget()

    def _time_of_queue(self) -> float:
        connection = self._connection
        most = self.policy.batch_size if connection is None else connection.credit
        return self._scheduler.time_left(most)

    @property
    def most_ahead(self) -> int:
        """Calls that `map` makes ahead: as many as may be under way."""
        connection = self._connection
        return LEAST_AHEAD if connection is None else max(connection.credit, LEAST_AHEAD)

    def stats(self) -> Stats:
        """Return the statistics of the model process. They are zero if it does not run."""
        return self._ask(STATS) or Recorder().snapshot(0, 0, 0)

    def reset_stats(self) -> None:
        """Set the statistics of the model process to zero."""
        self._ask(RESET)

    def _ask(self, kind: int) -> Any:
        """Return the answer of the model process to a question, or None if it does not run.

        The question has a connection of its own, so that any thread may wait for the answer.
        """
        connection = self._connection
        found = self._remote.find(connection and connection.place)
        if found is None:
            return None
        link, _, channel, _ = found
        with link:
            link.settimeout(PATIENCE)
            try:
                link.sendall(b"".join(channel.write(kind, 0)))
                frames: list[Frame] = []
                while not frames:
                    frames = channel.read(received(link))
            except OSError as error:
                raise ServerGone(
                    f"the process of {self.name} did not send its statistics: {error}"
                ) from None
        return frames[0].load()

    def _call_worker(self) -> None:
        """Connect, unless a connection exists or is being made."""
        with self._lock:
            if self._connecting or self._connection is not None:
                return
            self._connecting = True
        name = f"{self.name}-{next(self._numbers)}"
        try:
            daemon_thread(name, _serve, weakref.ref(self), self._remote.dial).start()
        except BaseException as error:
            self.abort(f"no thread can be started to connect: {error}")
            if not isinstance(error, CANNOT_START):
                raise

    def _send_soon(self, loop: Any) -> None:
        """Let `loop`, which runs this code, send once the tasks that are ready have called."""
        if self._posted is not loop:
            if isinstance(loop, asyncio.AbstractEventLoop):
                loop.call_soon(self._send_posted)
            else:
                post(loop, self._send_posted)
            self._posted = loop  # last: an exception that interrupts must not lose the callback

    def _send_posted(self) -> None:
        self._posted = None
        self._send()

    def _send(self) -> None:
        """Send all frames that may leave, unless another thread is sending them."""
        if self._postpone(self._send):
            return
        connection, sends = None, False
        try:
            with self._lock:
                connection = self._connection
                if connection is None or connection.sending:
                    return
                sends = connection.sending = True
            self._send_all(connection, wait=False)
        except BaseException:  # of a signal handler: nobody else would send
            if sends and connection is not None:
                connection.end()
            raise

    def _send_all(self, connection: _Connection, *, wait: bool) -> None:
        """Send frames until none is left.

        Without `wait`, another thread goes on once the socket is full, or other threads call all
        the time: this thread has a call of its own. The caller has set `sending`.
        """
        try:
            for turn in itertools.count(1):
                with self._lock:
                    frames = self._take_frames(connection)
                    if not frames:
                        connection.sending = False
                        break
                write = connection.channel.write
                data = b"".join([part for frame in frames for part in write(*frame)])
                rest = connection.send(data, wait=wait)
                if rest is not None or (turn >= MOST_TURNS and not wait):
                    name = f"{self.name}-send"
                    daemon_thread(name, self._send_rest, connection, rest or b"").start()
                    break
        except OSError:  # the thread that receives ends all calls
            connection.end()
        except BaseException:  # nobody knows how much was sent
            connection.end()
            raise
        with self._lock:
            self._notify_admitted()

    def _send_rest(self, connection: _Connection, rest: bytes | memoryview) -> None:
        try:
            connection.send(rest, wait=True)
        except OSError:
            connection.end()
            return
        self._send_all(connection, wait=True)

    def _take_frames(self, connection: _Connection) -> list[tuple[int, int, Message | None]]:
        """Return the frames that may leave, under the lock."""
        frames = [connection.outbox.popleft() for _ in range(len(connection.outbox))]
        scheduler = self._scheduler
        if connection is not self._connection:
            return frames
        while scheduler.waiting and (room := connection.credit - scheduler.in_flight) > 0:
            scheduler.capacity = Capacity(room, None)
            batch = scheduler.take(time.perf_counter())
            if batch is None:
                break
            self.recorder.waited(batch.waits)
            for request, _, _ in batch.slices:
                connection.calls[request.number] = request, batch
                frames.append((CALL, request.number, request.items))
        return frames

    def adopt(self, connection: _Connection) -> bool:
        """Use `connection` from now on. Return False if no call needs it any more."""
        with self._lock:
            self._connecting = False
            if self._closed and not self._scheduler.waiting:
                self._alarm = NEVER
                return False
            self._connection = connection
            self._workers.add(connection)
        self._send()
        return True

    def answer(self, connection: _Connection, frames: list[Frame]) -> None:
        """Answer the calls of `frames`."""
        answers: dict[int, tuple[Any, bool]] = {}
        for frame in frames:
            if frame.number in connection.calls:
                answers[frame.number] = self._load(frame)
            else:  # its caller has gone
                frame.drop()
        ended: list[Request] = []
        wakers = Wakers()
        sizes: Counter[Batch] = Counter()
        with self._lock:
            for number, (value, failed) in answers.items():
                request, batch = connection.calls.pop(number, (None, None))
                if request is None or batch is None:
                    continue  # cancelled meanwhile
                sizes[batch] += 1
                if request.waker is None:  # about to be cancelled
                    continue
                if failed:
                    request.error = value
                else:
                    request.result, request.answered = value, 1
                ended.append(request)
            if not sizes:
                return
            take_wakers(ended, wakers)
            if connection is self._connection:
                self._end_calls(sizes)
            more = self._scheduler.waiting > 0
            self._end_if_idle()
        try:
            if more:
                self._send()
        finally:
            wake_all(wakers.values())

    def _load(self, frame: Frame) -> tuple[Any, bool]:
        """Return the result or the error of a call, and whether it is an error."""
        try:
            value = frame.load()
            if frame.kind == RESULT:
                return value, False
            return restored(*value), True
        except Exception as error:
            refused = TypeError(
                f"the result of {self.name} cannot be read in this process "
                f"({type(error).__name__}: {error})"
            )
            refused.__cause__ = error
            return refused, True

    def _end_calls(self, sizes: Mapping[Batch, int]) -> None:
        """Give the credit of calls back, under the lock. `sizes`: their number, by batch."""
        scheduler = self._scheduler
        for batch, size in sizes.items():
            scheduler.answer_early(batch, size)
            if batch.early == batch.size:
                scheduler.finished(batch, time.perf_counter())

    def _end_if_idle(self) -> None:
        """End the connection of a closed queue without calls. The caller holds the lock."""
        if self._closed and self._connection is not None and not any(self.load()):
            self._connection.end()
            self._workers.clear()
            self._connection, self._alarm = None, NEVER

    def lost(self, connection: _Connection | None, why: str, pause: float) -> None:
        """End all calls, because the connection has ended or could not be made.

        `pause` is the time until the process is started again, if it is known (s).
        """
        with self._lock:
            if connection is not self._connection:
                return
        self._pause = pause
        self.notices.add("process", why)
        self.abort(why)

    def _lost_call(self, why: str) -> BatcherClosed:
        error = ServerGone(f"{self.name}: {why}")
        error.retry_after_s = self._pause
        return error


def received(link: socket.socket) -> bytes:
    """Return the next bytes of a socket.

    Raises:
        OSError: the connection has ended.
    """
    data = link.recv(CHUNK)
    if not data:
        raise ConnectionResetError("the connection has ended")
    return data


def restored(data: bytes | None, remote: RemoteError) -> BaseException:
    """Return an error of another process.

    `data` is the pickled error with its causes, None if these cannot be pickled. The `RemoteError`
    stands for an error whose class this process does not know.
    """
    error: BaseException = remote
    if data is not None:
        try:
            chain: list[BaseException] = pickle.loads(data)
            for effect, cause in itertools.pairwise(chain):
                effect.__cause__ = cause
            error = chain[0]
        except Exception:  # a class may not be importable here
            error = remote
    if remote.lines:
        error.add_note(f"In the model process:\n{remote.lines}")
    return error


def _serve(ref: weakref.ref[ClientRuntime], dial: Dial) -> None:
    """Connect, and receive answers until the connection ends. Target of a thread."""
    connection: _Connection | None = None
    why, pause = "its process has ended", 0.0
    try:
        link, greeting, channel, place = dial()
        connection = _Connection(link, greeting, channel, place)
    except BaseException as error:
        if isinstance(error, ServerGone):
            pause = error.retry_after_s
        else:
            log_failure("cannot connect")
        why = str(error)
    runtime = ref()
    if connection is not None:
        if runtime is not None and runtime.adopt(connection):
            enter_worker(runtime.pool, thread=True)  # callbacks must not wait for this thread
            end = weakref.finalize(runtime, connection.end)
            end.atexit = False
            del runtime
            try:
                _receive(ref, connection)
            except BaseException:
                log_failure("the connection failed")
            end.detach()
        connection.end()
        connection.close()
        runtime = ref()
    if runtime is not None:
        runtime.lost(connection, why, pause)
    if connection is not None:
        connection.place.clean()


def _receive(ref: weakref.ref[ClientRuntime], connection: _Connection) -> None:
    """Receive answers until the connection ends, or the runtime is gone."""
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    while size := connection.receive(buffer):
        frames = connection.channel.read(view[:size])
        runtime = ref()
        if runtime is None:
            return
        if frames:
            runtime.answer(connection, frames)
        del runtime, frames
