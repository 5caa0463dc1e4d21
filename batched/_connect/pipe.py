"""Calls of a function in a process of its own, one after another, over a socket pair.

The process that calls may end the other one at any moment. Arrays cross in sealed memory, as
between connected functions.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

from .frames import CALL, CHUNK, ERROR, Channel, Message, load, restored
from .memory import Incoming, Outgoing, new_file

_EXIT_TIME: Final = 5.0
"""Time for a process to end by itself (s)."""
_PR_SET_PDEATHSIG: Final = 1
"""Option of Linux's prctl: the signal for a process when its parent ends."""

Answer = tuple[int, Message]
"""`RESULT` or `ERROR`, and the message of the result or error."""


class _Pipe:
    """One end of a socket pair. `files` are for buffers that leave, and that arrive."""

    def __init__(self, link: socket.socket, files: Sequence[int]) -> None:
        self.link = link
        self._channel = Channel(Outgoing(files[0]), Incoming(files[1])) if files else Channel()
        self._buffer = memoryview(bytearray(CHUNK))
        for file in files[:1]:
            os.close(file)

    def send(self, kind: int, message: Message) -> None:
        self.link.sendall(self._channel.write([(0, kind, message)]))

    def receive(self) -> Answer:
        while size := self.link.recv_into(self._buffer):
            for _, kind, message in self._channel.read(self._buffer[:size]):
                return kind, message
        raise EOFError


class Client(_Pipe):
    """A new process, and calls of the function that it serves: an expression in a module."""

    def __init__(self, module: str, function: str) -> None:
        ours, theirs = socket.socketpair()
        with ExitStack() as stack:
            both = range(2 * hasattr(os, "memfd_create"))  # macOS has none
            files = [stack.enter_context(new_file()).fileno() for _ in both]
            socket.send_fds(ours, [b"\0"], files)
            super().__init__(ours, [*map(os.dup, files)])
        with theirs:
            handle = theirs.fileno()
            self.process = spawn(
                f"from {__name__} import serve; import {module}; "
                f"serve({handle}, {module}.{function})",
                [handle],
            )

    def call(self, message: Message, limit: float | None = None) -> Answer:
        """Return the answer to a call.

        Raises:
            TimeoutError: there was none within `limit` (s).
            EOFError, OSError: the process ends, as after `process.kill()`.
        """
        self.link.settimeout(limit)
        self.send(CALL, message)
        return self.receive()

    def close(self) -> str:
        """Let the process end. Return how it ended."""
        with self.link, suppress(OSError):  # a fork of this process may have the socket, too
            self.link.shutdown(socket.SHUT_RDWR)
        return end(self.process)


def serve(handle: int, answer: Callable[[Message], Answer]) -> None:
    """Answer calls until the other end of a socket is closed. On Linux, end with the parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    link = socket.socket(fileno=handle)
    os.register_at_fork(after_in_child=link.close)  # a fork may outlive this process
    _, files, _, _ = socket.recv_fds(link, 1, 2)
    pipe = _Pipe(link, files[::-1])
    with suppress(EOFError, OSError):
        while True:
            pipe.send(*answer(pipe.receive()[1]))


def value_of(kind: int, message: Message) -> Any:
    """Return the result that an answer has, or raise its error."""
    value = load(message)
    if kind == ERROR:
        raise restored(*value)
    return value


def spawn(code: str, handles: Sequence[int], stdout: Any = None) -> subprocess.Popen[bytes]:
    """Start an interpreter that finds the modules of this one, and does not run the main script.

    The process has its own session: Ctrl-C does not reach it.
    """
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {[*map(str, sys.path)]}; {code}"],
        pass_fds=handles,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        stdout=stdout,
    )


def end(process: subprocess.Popen[bytes]) -> str:
    """Wait for the end of a process, and kill it if that takes long. Return how it ended."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_TIME)
    process.kill()
    code = process.wait()
    if code == -signal.SIGKILL:
        return KILLED
    return f"exited with {code}" if code >= 0 else f"got {signal.Signals(-code).name}"


KILLED: Final = "was killed, as systems do when memory runs out"
