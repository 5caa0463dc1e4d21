"""Where a batch function computes: in the thread that calls it, or in a process of its own.

A place is started once and then called like the function; it builds a class before that. Rules of
the process:

1. It is spawned, never forked, and does not run the main script again, so that a script needs no
   `if __name__ == "__main__"`. Functions of the main script, lambdas and closures travel by value,
   all others by their names. What cannot travel is refused before anything runs.
2. It costs one call to lose it: by a crash, by an exit with any code, by `kill -9`, by a call that
   is longer than the limit and is ended with SIGKILL, which also ends one that never lets go of the
   GIL. The next call starts another one and builds the class again.
3. Death by SIGKILL counts as a memory error: that is how systems end what takes too much.
4. It cannot outlive its driver. On Linux the kernel ends it with the thread that started it;
   everywhere a thread in it waits for the driver's end.

The process is one of `multiprocessing`, with a pipe. Its pools, and others', take exit code 0 for
the end of their work, or start processes themselves, which would run the main script.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from time import perf_counter
from typing import Any, Final, Protocol
from weakref import WeakSet

from ..errors import RemoteError, TimeLimitExceeded, WorkerDied
from ._serving import Function, receive, send, serve

_SPAWN: Final = multiprocessing.get_context("spawn")

_ALIVE_INTERVAL: Final = 1.0
"""How often a caller looks whether the process lives (s). Usually its end closes the pipe, unless
processes that it has forked still hold that open.
"""

_EXIT_TIME: Final = 5.0
"""Time for a process to end by itself (s)."""

_END_INTERVAL: Final = 0.002
"""How often it is looked at meanwhile (s)."""

BUILDS: Final = 3
"""Processes, or actors, that may die in a row while they start; then it is not by chance."""

_SIGKILL: Final = 9
"""The signal by that name, where there are signals."""


class BuildError(Exception):
    """A function that could not be made ready; `error` says why."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class PlaceClosed(Exception):
    """The place was closed while it was called."""


class WorkerKilled(WorkerDied, MemoryError):
    """A process ended by SIGKILL, most often by the system, as memory had run out."""


class Place(Protocol):
    """Where a function computes. Each thread that calls it starts it before, and closes it."""

    @property
    def call(self) -> Callable[..., Any]:
        """The function; only once the place is started."""
        ...

    def start(self) -> None:
        """Makes the function ready.

        Raises:
            BuildError: it cannot be built.
        """
        ...

    def retire(self) -> None:
        """Has no further call wait for its turn, from any thread; those that run go on."""
        ...

    def close(self) -> None:
        """Gives back what it holds."""
        ...

    def kill(self) -> None:
        """Ends a call that runs, from any thread, if that is possible."""
        ...


class Here:
    """The thread that calls."""

    call: Callable[..., Any]

    def __init__(self, function: Function) -> None:
        self._function = function

    def start(self) -> None:
        try:
            self.call = self._function.build()
        except BaseException as error:
            raise BuildError(error) from error

    def retire(self) -> None:
        pass

    def close(self) -> None:
        vars(self).pop("call", None)

    def kill(self) -> None:
        pass


class InProcess:
    """A process of its own, of which a call may take `timeout_s` seconds."""

    def __init__(self, name: str, payload: bytes, timeout_s: float | None) -> None:
        self._name = name
        self._payload = payload  # a pickled `Function`
        self._timeout_s = timeout_s
        self._changing = threading.Lock()  # held while the next two change
        self._process: BaseProcess | None = None
        self._killed = False
        self._connection: Connection[Any, Any]
        _PLACES.add(self)

    def start(self) -> None:
        deaths = 0
        while True:
            try:
                self._spawn()
                error = self._answer(None)
            except WorkerDied as died:
                deaths += 1
                if deaths < BUILDS:
                    continue
                error = died
            if error is None:
                return
            self.close()
            raise BuildError(error)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Output of the function.

        Raises:
            RemoteError: what it raised.
            TimeLimitExceeded: it took too long, and has been ended.
            WorkerDied: its process ended.
            BuildError: it had to be built again, and could not.
            PlaceClosed: `kill` was called.
        """
        if self._process is None:
            self.start()
        try:
            send(self._connection, (args, kwargs))
        except OSError:
            raise self._death() from None
        answer = self._answer(self._timeout_s)
        if isinstance(answer, RemoteError):
            raise answer
        return answer[0]

    def retire(self) -> None:
        pass

    def close(self) -> None:
        if self._process is not None:
            self._connection.close()  # which ends it, unless it is busy
            _await_end(self._process)
            self._end()

    def kill(self) -> None:
        with self._changing:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def _spawn(self) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(
            target=serve, args=(theirs, self._name, self._payload), name=f"batched-{self._name}"
        )
        with self._changing:
            if self._killed:
                raise PlaceClosed
            try:
                with _without_main_script(), _without_interrupts():
                    process.start()
            finally:
                theirs.close()
            self._process = process

    def _answer(self, limit: float | None) -> Any:
        """The next message of the process, which may take `limit` seconds."""
        process = self._process
        assert process is not None
        start = perf_counter()
        try:
            while True:
                left = inf if limit is None else max(0.0, limit - (perf_counter() - start))
                if self._connection.poll(min(left, _ALIVE_INTERVAL)):
                    return receive(self._connection)
                if not process.is_alive() and not self._connection.poll(0):
                    raise self._death()
                if not left:
                    self._end()
                    raise TimeLimitExceeded(
                        f"{self._name} took longer than timeout_s={limit:g}, and was ended"
                    )
        except (EOFError, OSError):
            raise self._death() from None

    def _death(self) -> Exception:
        """The error that tells how the process ended."""
        process = self._process
        assert process is not None
        _await_end(process)  # its pipe is gone, and so is it, in a moment
        code = process.exitcode
        self._end()
        if self._killed:
            return PlaceClosed()
        if code == -_SIGKILL:
            return WorkerKilled(
                f"the process of {self._name} was killed, as systems do when memory runs out"
            )
        if code is None:
            how = "closed its pipe"
        else:
            how = f"exited with {code}" if code >= 0 else f"got {signal.Signals(-code).name}"
        return WorkerDied(f"the process of {self._name} {how}")

    def _end(self) -> None:
        process = self._process
        assert process is not None
        process.kill()
        process.join()
        with self._changing:
            self._process = None
        if not self._killed:  # else multiprocessing may be looking at it, for this program ends
            process.close()
        self._connection.close()


def _await_end(process: BaseProcess) -> None:
    """Waits for `process` to end by itself, for a while; `process.join` would for ever, once that
    has closed the pipe by which it is waited for.
    """
    start = perf_counter()
    pause = threading.Event()
    while process.is_alive() and perf_counter() - start < _EXIT_TIME:
        pause.wait(_END_INTERVAL)


_PLACES: Final[WeakSet[InProcess]] = WeakSet()


@atexit.register  # runs before the one of multiprocessing, which waits for processes
def _kill_all() -> None:
    for place in list(_PLACES):
        place.kill()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Time in which a process that starts begins with SIGINT blocked, until it ignores that."""
    if sys.platform == "win32":
        yield
        return
    ensure_running()  # the process that comes with the first one, whose start unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_starting = threading.Lock()


@contextmanager
def _without_main_script() -> Iterator[None]:
    """Time in which a process that starts finds no main script to run again."""
    main: Any = sys.modules["__main__"]
    with _starting:
        kept = {
            name: main.__dict__[name] for name in ("__spec__", "__file__") if name in vars(main)
        }
        vars(main).update(dict.fromkeys(kept))
        try:
            yield
        finally:
            vars(main).update(kept)
