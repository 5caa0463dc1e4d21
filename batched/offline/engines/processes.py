"""Workers that are processes (Linux and macOS).

1. A process is a new interpreter, never a fork, and does not run the main script. So a script needs
   no `if __name__ == "__main__"`. Functions of the main script, lambdas and closures travel by
   value, all other functions by name. A function that cannot travel is refused before the run.
2. A lost process costs one call: a crash, an exit with any code, `kill -9`, or a call that is
   longer than the time limit. The next call starts another process, which builds the class again. A
   process that is lost while it builds the class is like an error of the class.
3. Death by SIGKILL counts as a memory error, since systems end processes that take too much memory.
4. A process cannot outlive its driver. On Linux the kernel ends the process with the thread that
   started it. On macOS a call that runs ends first.
5. A process has its own session: Ctrl-C reaches the driver alone.
6. A call and its output may have 1 GiB each. An array arrives in memory that both processes share.

The pools of the standard library and of joblib take exit code 0 for the end of the work, or run the
main script.
"""

from __future__ import annotations

from typing import Any

from ..._connect.pipe import KILLED, Client, value_of
from ...errors import WorkerDied
from ..step import Step
from .engine import Worker, WorkerClosed, time_limit_exceeded
from .serving import Server, pickled


class WorkerKilled(WorkerDied, MemoryError):
    """A process ended by SIGKILL, most often by the system because memory had run out."""


class ProcessWorker(Worker):
    """A process, and the processes that replace it."""

    def __init__(self, step: Step, payload: bytes) -> None:
        super().__init__(step)
        self._payload = payload  # a pickled `Step`
        self._client: Client | None = None

    def start(self) -> None:
        """Start a process that builds the function."""
        self.close()
        self._client = Client(Server.__module__, f"Server({self.step.name!r}).answer")
        if self.closing.is_set():  # and perhaps `kill` and `close` came too early
            self.kill()
            self.close()
            raise WorkerClosed
        self.call(self._payload)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the function in the process."""
        client, message = self._client, pickled((args, kwargs))
        assert client
        try:
            answer = client.call(message, self.step.timeout_s if self.ready else None)
        except (EOFError, OSError) as error:
            self.ready = False
            if isinstance(error, TimeoutError):
                client.process.kill()
                raise time_limit_exceeded(self.step) from None
            how = client.close()
            kind = WorkerKilled if how == KILLED else WorkerDied
            raise kind(f"the process of {self.step.name} {how}") from None
        return value_of(*answer)

    def kill(self) -> None:
        """End the process, with the call that runs."""
        if self._client:
            self._client.process.kill()

    def close(self) -> None:
        """Let the process end."""
        if self._client:
            self._client.close()
