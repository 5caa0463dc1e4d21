"""Workers that are processes (Linux and macOS).

1. A process is a new interpreter, never a fork, and does not run the main script. So a script needs
   no `if __name__ == "__main__"`. Functions of the main script, lambdas and closures travel by
   value, all other functions by name. A function that cannot travel is refused before the run.
2. A lost process costs one call: a crash, an exit with any code, `kill -9`, or a call that is
   longer than the time limit. The next call starts another process, which builds the class again.
3. Death by SIGKILL counts as a memory error, since systems end processes that take too much memory.
4. A process cannot outlive its driver. On Linux the kernel ends the process with the thread that
   started it. Everywhere a thread in the process waits for the driver's end of the pipe to close.
5. A process has its own session: Ctrl-C reaches the driver alone.

The pools of the standard library and of joblib take exit code 0 for the end of the work, or run the
main script.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from math import inf
from multiprocessing.connection import Connection, Pipe
from time import perf_counter
from typing import Any, Final

from ...errors import RemoteError, WorkerDied
from ..step import Step
from .engine import Worker, WorkerClosed, time_limit_exceeded
from .serving import Buffers, pickled, receive, send

_ALIVE_INTERVAL: Final = 1.0
"""Time between two looks whether the process lives (s). Usually the end of the process closes the
pipe, unless a fork of the process holds the pipe open.
"""

_EXIT_TIME: Final = 5.0
"""Time for a process to end by itself (s)."""

BUILDS: Final = 3
"""Deaths of processes, or actors, in a row during the build, after which the build has failed."""


class WorkerKilled(WorkerDied, MemoryError):
    """A process ended by SIGKILL, most often by the system because memory had run out."""


class ProcessWorker(Worker):
    """A process, and the processes that replace it."""

    _connection: Connection[Any, Any]

    def __init__(self, step: Step, payload: bytes) -> None:
        super().__init__(step)
        self._payload = payload  # a pickled `Step`
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    def start(self) -> bool:
        """Start a process that builds the function."""
        failed: Exception | None = None
        for _ in range(BUILDS):
            try:
                failed = self._launch()
                break
            except WorkerDied as died:
                failed = died
        if failed is not None:
            self.close()
            raise failed
        return True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the function in the process."""
        reply = self._ask((args, kwargs), self.step.timeout_s)
        if isinstance(reply, RemoteError):
            raise reply
        return reply[0]

    def _launch(self) -> RemoteError | None:
        self._connection, theirs = Pipe()
        path, handle = [*map(str, sys.path)], theirs.fileno()
        code = f"import sys; sys.path[:] = {path}; from {__package__} import serving"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{code}; serving.main({handle})"],
                pass_fds=[handle],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        failed: RemoteError | None = self._ask((self.step.name, self._payload), None)
        return failed

    def kill(self) -> bool:
        """End the process, with the call that runs."""
        self._killed = True
        if (process := self._process) is not None:
            process.kill()
        return True

    def close(self) -> None:
        """Ask the process to end, and kill the process if it does not."""
        if self._process is not None:
            with suppress(OSError):
                send(self._connection, b"")  # which ends the process
            self._end(self._process, _EXIT_TIME)

    def _ask(self, message: Any, limit: float | None) -> Any:
        """Return the reply to `message`, which may take `limit` seconds."""
        connection, process, buffers = self._connection, self._process, Buffers()
        assert process is not None
        data = pickled(message, buffers)
        deadline = inf if limit is None else perf_counter() + limit
        try:
            send(connection, data, buffers)
            while not connection.poll(min(max(0, deadline - perf_counter()), _ALIVE_INTERVAL)):
                if self._killed or (process.poll() is not None and not connection.poll(0)):
                    raise EOFError
                if perf_counter() >= deadline:
                    self._end(process)
                    raise time_limit_exceeded(self.step)
            reply, large = receive(connection)
        except (EOFError, OSError):  # the end of the process is near
            raise self._death(self._end(process, _EXIT_TIME)) from None
        return pickle.loads(reply, buffers=large)

    def _end(self, process: subprocess.Popen[bytes], seconds: float = 0) -> int | None:
        """End `process`. Return its exit code if it ends by itself within `seconds`."""
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(seconds)
        process.kill()
        process.wait()
        self._process, self.ready = None, False
        self._connection.close()
        return code

    def _death(self, code: int | None) -> Exception:
        """Return the error of a process that ended with `code`."""
        if self._killed:
            return WorkerClosed()
        process = f"the process of {self.step.name}"
        if code is None:
            return WorkerDied(f"{process} closed its pipe")
        if code == -signal.SIGKILL:
            return WorkerKilled(f"{process} was killed, as systems do when memory runs out")
        how = f"exited with {code}" if code >= 0 else f"got {signal.Signals(-code).name}"
        return WorkerDied(f"{process} {how}")
