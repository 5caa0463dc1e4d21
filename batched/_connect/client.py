"""Client's runtime: calls cross a socket to a model process, which runs them.

1. Callers send for each other: see `Wire`. The tasks of an event loop send once a turn.
2. A thread that waits reads for all callers, and hands the reading on once it has its answer. The
   connection's own thread reads while only futures and event loops wait: see `Connection`.
3. Who removes a call from `_calls`, or from `_blocked`, wakes its caller (`_end`). The call has its
   result or its error by then.
4. A signal handler may raise in a thread that waits. Anywhere else it ends all calls (`abort`).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Final

from .._core.policy import BatchPolicy
from .._core.scheduler import Request
from .._execution.execution import Execution
from .._function.requests import MISSING
from .._runtime import observer
from .._runtime.async_backend import post
from .._runtime.call_queue import INTERRUPTED, CallQueue
from .._runtime.recorder import Recorder
from .._runtime.runtime import CANNOT_START
from .._runtime.settling import Wakers, take_wakers
from .._runtime.timer_thread import daemon_thread
from .._runtime.waits import enter_worker
from .._runtime.wakers import Future, Lock, log_failure, wake_all
from ..errors import BatcherClosed, QueueFull, QueueTimeout, ServerGone
from .frames import (
    CALL,
    CANCEL,
    CHUNK,
    NOTHING,
    RESET,
    RESULT,
    STATS,
    Numbered,
    load,
    pickled,
    restored,
)
from .greeting import PATIENCE
from .place import Place
from .wire import Wire

TICK: Final = 1e-3
"""Pause of the thread while a caller reads the last answers (s)."""
LEAST_AHEAD: Final = 256
"""Least number of calls that `map` makes ahead by default."""


class ClientParser:
    """Parser of calls that a model process parses again."""

    def __init__(self, name: str, queue_timeout_ms: float | None) -> None:
        self._name = name
        self._queue_timeout_ms = queue_timeout_ms

    def read(
        self, item: Any, args: tuple[Any, ...], _: object, single: bool, /
    ) -> tuple[Any, tuple[Any, ...], bool]:
        """Return the parts of a call that `prepare` needs: see `ItemRequestParser.read`."""
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
        """Return the call, with a message in place of its items.

        Raises:
            TypeError: an argument cannot be pickled.
        """
        if not single and isinstance(item, list) and not item:
            return Request(None, 0, None, waker)
        given = args if item is MISSING else (item, *args)
        try:
            message = pickled((given, kwargs, single, self._queue_timeout_ms))
        except Exception as error:
            raise TypeError(
                f"the arguments of {self._name} cannot be sent to its process "
                f"({type(error).__name__}: {error})"
            ) from error
        return Request(message, 1, None, waker)


class ClientRuntime(CallQueue):
    """Runtime of the calls of this process for one model process.

    It has no queue of its own: `max_queue_size` limits unanswered calls.
    """

    cancels_running = True
    most_ahead = LEAST_AHEAD
    """Calls that `map` makes ahead: the items of the next batches of the function."""

    def __init__(
        self, policy: BatchPolicy, execution: Execution, recorder: Recorder, _: object, name: str
    ) -> None:
        self._remote: Any = execution.func  # a `RemoteFunction`
        self._numbers = itertools.count(1)
        self._place: Place | None = None  # of the process of the last connection
        self._connections: list[Connection] = []  # at most one
        super().__init__(policy, recorder, name)
        weakref.finalize(self, _end_all, self._connections).atexit = False

    def _reset(self) -> None:
        super()._reset()
        self._calls: dict[int, Request] = {}  # calls without an answer, by number
        self._blocked: dict[int, Request] = {}  # calls that wait for room, by number, oldest first
        self._posted: object = None  # the event loop that is about to send
        self._wire: Wire | None = None  # of the connection, once it is made

    def submit(self, request: Request, *, from_event_loop: bool) -> bool:
        """Send a call, or let it wait until fewer calls are unanswered.

        Return whether it did not have to wait.
        """
        del from_event_loop
        if self._lock._is_owned():
            raise RuntimeError(f"{self.name} is called by code that has interrupted it")
        most = self.policy.max_queue_size or math.inf
        waker: Any = request.waker
        try:
            with self._lock:
                if self._wire is not None and not self._calls and self._wire.wait(0):
                    self._hang_up()  # no answer is due: the connection has ended
                full = len(self._calls) + len(self._blocked) >= most
                is_open = not self._closed or self.exiting
                if is_open and not (full and self.policy.on_full == "raise"):
                    request.arrived, request.number = time.perf_counter(), next(self._numbers)
                    self.recorder.accept()
                    if full:
                        self._blocked[request.number] = request
                    else:
                        self._enter(request)
            if not request.arrived:
                raise self._refused(request, is_open)
            if not self._connections or type(waker) is not Lock:
                self._call_worker(waker)
            get_loop = getattr(waker, "get_loop", None)
            self._send(get_loop and get_loop())
        except (QueueFull, BatcherClosed):
            raise
        except BaseException:
            self.abort(INTERRUPTED)
            raise
        if observer.share is not None:
            observer.share()
        return not full

    def _enter(self, request: Request) -> None:
        """Send a call soon, or once the connection exists. The caller holds the lock."""
        self._calls[request.number] = request
        if self._wire is not None:
            request.dispatched = 1
            self._wire.outbox.append((request.number, CALL, request.items))

    def _send(self, loop: Any = None) -> None:
        """Send now; on a loop, once its other tasks that are ready have called."""
        if loop is None:
            if (wire := self._wire) is not None:
                wire.flush()
        elif self._posted is not loop:
            if isinstance(loop, asyncio.AbstractEventLoop):
                loop.call_soon(self._send_posted)
            else:
                post(loop, self._send_posted)
            self._posted = loop  # last: an exception that interrupts must not lose the callback

    def _send_posted(self) -> None:
        self._posted = None
        self._send()

    def _call_worker(self, waker: Any = None) -> None:
        """Connect, or let the connection's thread read if no caller will."""
        with self._lock:
            new = not self._connections
            if new:
                self._connections.append(Connection())
            connection = self._connections[0]
            idle = connection.reader is None and type(waker) is not Lock
            if idle:
                connection.reader = connection
        if idle:
            connection.release()
        if new:
            target = self._remote.dial, connection
            try:
                daemon_thread(self.name, _serve, weakref.ref(self), *target).start()
            except CANNOT_START as error:
                self.lost(connection, f"no thread can be started to connect: {error}")

    def connected(self, connection: Connection, most_ahead: int, place: Place) -> None:
        """Send the calls that wait for a connection."""
        self.most_ahead = max(LEAST_AHEAD, most_ahead)
        self._place = place
        with self._lock:
            if connection not in self._connections:  # the calls were ended meanwhile
                connection.end()
                return
            self._wire = connection.wire
            for request in self._calls.values():
                self._enter(request)
        self._send()
        self._end_if_idle()

    def wait(self, request: Request, waker: Any, /) -> None:
        """Wait until `request` has ended, and read for all callers while no other thread does."""
        if type(waker) is not Lock:  # of another library's threads
            waker.acquire()
            return
        with self._lock:
            connections = [*self._connections]
        for connection in connections:
            waits = False
            try:
                connection.waiting[waker] = request
                while request.waker is not None:
                    reads = self.may_read(connection, waker, request)
                    waits = True  # until an answer or, by `pass_on`, the turn to read has come
                    connection.wire.wait() if reads else waker.acquire()
                    waits = False
                    if reads:
                        self.answer(connection.read(), connection.left)
                        if connection.left:
                            connection.release()
                self._leave(connection, waker)
            except BaseException:
                if waits:
                    self._leave(connection, waker)
                else:
                    self.abort(INTERRUPTED)
                raise
        if request.error is None:
            self._decode(request, *request.result)

    def _leave(self, connection: Connection, waker: Any) -> None:
        try:
            del connection.waiting[waker]
            if connection.reader is waker:
                self.pass_on(connection)
        except BaseException:
            self.abort(INTERRUPTED)
            raise

    def may_read(self, connection: Connection, reader: Any, request: Request | None = None) -> bool:
        """Return whether `reader` reads. It begins to, unless `request` has ended."""
        with self._lock:
            if connection.reader is None and (request is None or request.waker is not None):
                connection.reader = reader
            return connection.reader is reader

    def pass_on(self, connection: Connection) -> None:
        """Let a caller that waits read, or else the connection's thread, until no call is left."""
        with self._lock:
            before: Any = connection.reader
            reader: Any = None
            if self._calls:
                waiting = [*connection.waiting.items()]
                reader = next((each for each, call in waiting if call.waker), connection)
            connection.reader = reader
        if reader not in (None, before):
            wake_all([reader])

    def answer(self, messages: Iterable[Numbered], left: deque[Numbered] | None = None) -> None:
        """End calls that are answered. A caller who waits reads the message of its own answer.

        A caller who reads for all gives `left`, for the answers of futures and tasks.
        """
        self.waking.add(0)
        try:
            ended = []
            for number, kind, message in messages:
                request = self._calls.get(number)
                if request is None:  # its caller has gone
                    continue
                if type(request.waker) is Lock:
                    request.result = kind, message
                elif left is not None:
                    left.append((number, kind, message))
                    continue
                else:
                    self._decode(request, kind, message)
                ended.append(request)
            self._end(ended)
            if observer.share is not None:
                observer.share()
        finally:
            self.waking.discard(0)

    def _decode(self, request: Request, kind: int, message: Any) -> None:
        try:
            value = load(message)
            if kind == RESULT:
                request.result = value
            else:
                chain, remote = value
                model = self._remote.address.partition(":")[0]
                request.error = restored(chain, remote, model)
                if type(request.error) is QueueTimeout:
                    self.recorder.count("timed_out")
        except Exception as error:  # of any code that a pickle calls
            request.error = TypeError(
                f"the result of {self.name} cannot be read in this process "
                f"({type(error).__name__}: {error})"
            )
            request.error.__cause__ = error

    def _end(self, ended: Iterable[Request]) -> None:
        """Wake the callers of calls that end now, and send calls for which there is room now."""
        wakers: Wakers = {}
        most = self.policy.max_queue_size or 0
        try:
            with self._lock:
                take_wakers([*filter(self._take, ended)], wakers)
                while self._blocked and len(self._calls) < most:
                    request = self._blocked.pop(next(iter(self._blocked)))
                    self._enter(request)
                    if isinstance(request.waker, Future):
                        request.waker.notify_of_room()
            wake_all(wakers.values())
            self._send()
            self._end_if_idle()
        except BaseException:
            self.abort(INTERRUPTED, wakers)
            raise

    def _take(self, request: Request) -> Request | None:
        number = request.number
        return self._calls.pop(number, None) or self._blocked.pop(number, None)

    def _fail(self, request: Request, error: BaseException) -> bool:
        """End a call by `error`. Return False if it has ended."""
        with self._lock:
            here = request.number in self._calls or request.number in self._blocked
            if here:
                request.error = error
        if here:
            self._end([request])
        return here

    def cancel(self, request: Request, even_begun: bool = False) -> bool:
        """End a call. The process drops it if it has not begun."""
        del even_begun  # only the model process knows
        if self._postpone(self.cancel, request) or not self._fail(request, CancelledError()):
            return False
        self.recorder.count("cancelled")
        if request.dispatched and (wire := self._wire) is not None:
            wire.send((request.number, CANCEL, NOTHING))
        return True

    def _refused(self, request: Request, is_open: bool) -> Exception:
        if not is_open:
            return super()._refused(request, is_open)
        self.recorder.count("rejected")
        self.notices.add("refusal", "a call was refused: too many calls have no answer")
        return QueueFull(
            f"{self.name} has no room for a call: {len(self._calls)} calls have no answer yet, of "
            f"at most {self.policy.max_queue_size} (max_queue_size)"
        )

    def close(self, cancel: bool) -> None:
        """Refuse calls from now on. With `cancel`, end all that were not sent."""
        if self._postpone(self.close, cancel):
            return
        self._closed = True
        why = f"{self.name} was shut down before this call ran"
        for request in self._find_open() if cancel else ():
            is_future = isinstance(request.waker, Future)
            error = CancelledError() if is_future else BatcherClosed(why)
            if not request.dispatched and self._fail(request, error):
                self.recorder.count("cancelled")
        self._send()  # the calls that a loop, which may be blocked, is about to send
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        with self._lock:
            if self._closed and not any(self.load()):
                self._hang_up()

    def _hang_up(self) -> None:
        """End the connection. The next call makes another one."""
        with self._lock:
            _end_all(self._connections)
            self._connections.clear()
            self._wire = None

    def lost(self, connection: Connection, why: str) -> None:
        """End all calls, because the connection has ended or could not be made."""
        place = self._place
        if place is not None and (log := place.last_words()):
            why = f"{why}; its log is {log}"
        self.abort(why, connection=connection)
        if place is not None:
            place.clean()

    def abort(
        self, why: str, wakers: Wakers | None = None, connection: Connection | None = None
    ) -> None:
        """End all calls and the connection, unless it is another one than `connection`."""
        lost = wakers or {}
        try:
            with self._lock:
                if connection is not None and connection not in self._connections:
                    return
                self._hang_up()
                calls = self._find_open()
                for request in calls:
                    request.error = self._lost_call(why)
                take_wakers(calls, lost)
                self._calls.clear()
                self._blocked.clear()
            for _ in calls:
                self.recorder.count("lost")
                self.notices.add("loss", f"a call was lost: {why}")
            wake_all(lost.values())
        except BaseException:  # a signal handler has raised again
            self.abort(why, lost)
            raise

    def _lost_call(self, why: str) -> BatcherClosed:
        return ServerGone(f"{self.name}: {why}")

    def forget(self) -> None:
        for connection in self._connections:
            connection.close()  # the parent of the fork goes on using the socket
        self._connections.clear()
        super().forget()

    def _find_open(self) -> list[Request]:
        return [*self._calls.values(), *self._blocked.values()]

    def load(self) -> tuple[int, int, int]:
        """Return the numbers of calls that wait for a connection or for room, and of sent ones."""
        calls, blocked = [*self._calls.values()], len(self._blocked)
        sent = sum([each.dispatched for each in calls])
        return len(calls) - sent, blocked, sent

    def ask(self, *, reset: bool = False) -> Any:
        """Return the statistics of the model process, or None if it does not run.

        With `reset`, set them to zero. The question has a connection of its own.
        """
        found = self._remote.find(self._place)
        if found is None:
            return None
        link, _, channel, _ = found
        wire = Wire(link, channel)
        link.settimeout(PATIENCE)
        wire.send((0, RESET if reset else STATS, NOTHING))
        try:
            while not (answers := wire.read()):
                pass
            return load(answers[0][2])
        except EOFError:
            raise ServerGone(f"the process of {self.name} did not send its statistics") from None
        finally:
            wire.close()


class Connection:
    """A connection, or one that is being made, and the state of who reads it.

    It wakes its thread as a lock wakes a caller.
    """

    def __init__(self) -> None:
        self.wire: Any = None  # once it is made
        self.reader: Any = self  # a caller's waker, this object for the thread, or None
        self.waiting: dict[Any, Request] = {}  # calls whose callers wait, and may read, by waker
        self.left: deque[Numbered] = deque()  # answers that a caller has left to the thread
        self.is_over = False  # whether the other end has closed it
        self._bell, self._woken = socket.socketpair()

    def release(self) -> None:
        """Wake the thread."""
        with suppress(OSError):
            self._bell.send(b"0", socket.MSG_DONTWAIT)

    def read(self) -> list[Numbered]:
        """Read for a caller. The thread finds out how the connection has ended."""
        try:
            messages: list[Numbered] = self.wire.read()
        except (EOFError, ValueError):
            self.reader = self
            self.end()
            self.release()
            return []
        return messages

    def sleep(self) -> None:
        """Wait until the thread is woken, or the other end closes the connection."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        poll.register(self.wire.link, 0)
        woken = dict(poll.poll())
        if self._woken.fileno() in woken:
            self._woken.recv(CHUNK)
        else:
            self.is_over = True
            time.sleep(TICK)  # for the caller who reads the last answers

    def end(self) -> None:
        if self.wire is not None:
            self.wire.end()

    def close(self) -> None:
        for each in (self.wire, self._bell, self._woken):
            if each is not None:
                each.close()


def _serve(
    ref: Callable[[], ClientRuntime | None], dial: Callable[[], Any], connection: Connection
) -> None:
    """Connect, then read answers when no caller does. Target of a thread."""
    why = "its process has ended"
    try:
        link, greeting, channel, place = dial()
        wire = connection.wire = Wire(link, channel)
        if (runtime := ref()) is not None:
            enter_worker(runtime.pool, thread=True)  # callbacks must not wait for this thread
            runtime.connected(connection, greeting["ahead"], place)
        while runtime is not None:
            if connection.left:
                runtime.answer([connection.left.popleft()])
            elif connection.reader is connection or (
                connection.is_over and runtime.may_read(connection, connection)
            ):
                del runtime
                messages = wire.read()
                if (runtime := ref()) is not None:
                    runtime.answer(messages)
                    runtime.pass_on(connection)
                del messages
            else:
                del runtime
                connection.sleep()
                runtime = ref()
    except EOFError:
        pass
    except ServerGone as error:
        why = str(error)
    except BaseException as error:
        log_failure("the connection to a model process failed")
        why = f"the connection failed with {type(error).__name__}: {error}"
    connection.end()
    if (runtime := ref()) is not None:
        runtime.lost(connection, why)
    connection.close()


def _end_all(connections: list[Connection]) -> None:
    for connection in [*connections]:
        connection.end()
