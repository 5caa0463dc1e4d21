"""Function of a step in its own process or actor, and the messages between it and the driver.

Errors cross as plain data, so that any exception can cross. Large arrays cross a pipe after the
pickle that refers to them, without a copy.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

import cloudpickle

from ..._execution.memory import release_memory
from ..._services.failures import RemoteMemoryError, to_remote
from ...errors import RemoteError
from ..step import Step
from .function import build

_LARGE: Final = 1 << 16
"""Bytes from which a buffer is sent after the pickle: the capacity of a pipe of Linux."""

_PR_SET_PDEATHSIG: Final = 1
"""Option of Linux's prctl: the signal for a process whose parent ends."""

Buffers = list[memoryview]
"""Large buffers that a pickle refers to."""


class Server:
    """Function of a step in its own process, or as an actor; every error is a reply of plain data.

    The server and the driver pickle messages themselves, so that a message that cannot be pickled
    is an error like any other.
    """

    def __init__(self, name: str, payload: bytes, path: Sequence[str] = ()) -> None:
        sys.path += [each for each in path if each not in sys.path]
        self._name = name
        self._payload = payload  # a pickled `Step`
        self._call: Callable[..., Any]
        self._on: tuple[type[BaseException], ...] = ()

    def __repr__(self) -> str:
        return self._name  # in the logs of Ray

    def build(self) -> RemoteError | None:
        """Build the function. Return the error if that fails."""
        try:
            step: Step = pickle.loads(self._payload)
        except Exception as error:
            return to_remote(
                TypeError(
                    f"{self._name} cannot be found in its process ({type(error).__name__}: {error})"
                    "; define it, and what it refers to, in a module that can be imported"
                )
            )
        del self._payload
        self._on = step.retry.on
        try:
            self._call = build(step)
        except BaseException as error:
            return to_remote(error, self._on)
        return None

    def reply(
        self, message: bytes, large: Sequence[Any] = (), buffers: Buffers | None = None
    ) -> bytes:
        """Return the pickled output of a call, alone in a tuple, or the error of the call."""
        try:
            args, kwargs = pickle.loads(message, buffers=large)
            output = self._call(*args, **kwargs)
            if type(output) in (list, tuple):  # exceptions in the place of results
                output = [
                    to_remote(row, self._on) if isinstance(row, BaseException) else row
                    for row in output
                ]
        except BaseException as error:
            remote = to_remote(error, self._on)
            if isinstance(remote, RemoteMemoryError):
                release_memory(error)
            return pickled(remote)
        try:
            return pickled((output,), buffers)
        except Exception as error:
            why = f"({type(error).__name__}: {error})"
        refused = f"{self._name} returned what cannot be sent from its process {why}"
        return pickled(to_remote(TypeError(refused)))


def main(handle: int) -> None:
    """Serve a function over a pipe: first its name and pickle, then a call for each message."""
    connection: Connection[Any, Any] = Connection(handle)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_die_with_driver, args=(handle,), daemon=True).start()
    with suppress(EOFError, OSError):
        name, payload = pickle.loads(receive(connection)[0])
        server = Server(name, payload)
        failed = server.build()
        send(connection, pickled(failed))
        while failed is None:
            message, large = receive(connection)
            if not message:
                return
            buffers: Buffers = []
            reply = server.reply(message, large, buffers)
            del message, large
            send(connection, reply, buffers)


def _die_with_driver(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, 0)  # for nothing but the end of the driver
    while not poll.poll(1000):  # a function may close the pipe, which ends the process, too
        pass
    os._exit(1)


def pickled(message: object, buffers: Buffers | None = None) -> bytes:
    """Return `message` for another process. Large buffers go to `buffers`, if there is a list."""

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if buffers is None or raw.nbytes < _LARGE:
            return True
        buffers.append(raw)
        return False

    try:
        data: bytes = pickle.dumps(message, protocol=5, buffer_callback=is_small)
        if b"__main__" not in data:  # the name of the module or, harmless, in a text
            return data
    except Exception:  # cloudpickle can more, and takes several times as long for small arrays
        pass
    if buffers:
        buffers.clear()
    data = cloudpickle.dumps(message, protocol=5, buffer_callback=is_small)
    return data  # noqa: RET504 -- which is where it has its type


def send(connection: Connection[Any, Any], message: bytes, buffers: Sequence[Any] = ()) -> None:
    """Send a pickle, and the large buffers that it refers to."""
    connection.send([each.nbytes for each in buffers])
    connection.send_bytes(message)
    for buffer in buffers:
        while buffer:
            buffer = buffer[os.write(connection.fileno(), buffer) :]


def receive(connection: Connection[Any, Any]) -> tuple[bytes, list[bytearray]]:
    """Return the next pickle, and its large buffers.

    Raises:
        EOFError: the other end is closed.
    """
    sizes: list[int] = connection.recv()
    message = connection.recv_bytes()
    buffers = list(map(bytearray, sizes))  # so arrays can be written to
    for buffer in buffers:
        rest = memoryview(buffer)
        while rest:  # straight to its place, where `recv_bytes_into` copies thrice
            count = os.readv(connection.fileno(), [rest])
            if not count:
                raise EOFError
            rest = rest[count:]
    return message, buffers
