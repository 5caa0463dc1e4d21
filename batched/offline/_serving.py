"""What runs in a process of a step: its function, called with what comes through a pipe.

Errors cross as plain data, told apart where they happened, so that any exception will do. Large
arrays cross beside the pickle that refers to them, without a copy.
"""

from __future__ import annotations

import ctypes
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, Final

import cloudpickle

from .._batched import _BatchedBase
from .._execution.memory import drop_locals, free_cache
from ..errors import RemoteError
from ._errors import RemoteMemoryError, to_remote

_LARGE: Final = 1 << 16
"""Bytes from which on a buffer is sent beside the pickle: what a pipe of Linux holds."""

_PR_SET_PDEATHSIG: Final = 1
"""Option of Linux's prctl: the signal to get when the parent ends."""


@dataclass(frozen=True)
class Function:
    """What a step computes: a batch function, or a class whose instance is one."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    models: int = 0
    """Instances of a class to keep, of one for each key, with which it is called after the items.
    0: there is one, and it gets none.
    """

    @property
    def coroutine(self) -> bool:
        """Its calls are to be awaited."""
        func: Any = unwrap(self.func)
        return any(map(inspect.iscoroutinefunction, (func, func.__call__)))

    def build(self) -> Callable[..., Any]:
        """The function to call; of a class, a new instance. It gives a plain function the extra
        arguments, after the items.
        """
        func, args, kwargs = unwrap(self.func), self.args, self.kwargs
        if inspect.isclass(func) and self.models:
            return _Models(func, args, kwargs, self.models)
        if inspect.isclass(func):
            instance: Any = func(*args, **kwargs)
            return instance  # type: ignore[no-any-return]  # whoever wrote it says so
        if not args and not kwargs:
            return func
        return lambda *items, **features: func(*items, *args, **features, **kwargs)

    def pickled(self, on: tuple[type[BaseException], ...]) -> bytes:
        """It and the exceptions that are the service's fault, for another process.

        Raises:
            TypeError: it cannot be sent.
        """
        func = self.func if _is_importable(self.func) else unwrap(self.func)
        try:
            payload: bytes = cloudpickle.dumps((replace(self, func=func), on))
        except Exception as error:
            raise TypeError(
                f"{self.name}, or what its args= and kwargs= hold, cannot be sent to another "
                f"process ({type(error).__name__}: {error}); define it in a module that can be "
                "imported, and load what it needs in the __init__ of a class"
            ) from error
        return payload


def _is_importable(func: Callable[..., Any]) -> bool:
    """Tells whether another process finds `func` by its name."""
    try:
        pickle.dumps(func)
    except Exception:
        return False
    return getattr(func, "__module__", None) != "__main__"  # which no other process has


class _Models:
    """Instances of a class, one for each key, of which the one that was used least lately goes."""

    def __init__(
        self, kind: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], most: int
    ) -> None:
        def build(key: str) -> Any:
            return kind(key, *args, **kwargs)

        self._of = lru_cache(most)(build)

    def __call__(self, items: list[Any], key: str) -> Any:
        return self._of(key)(items)


def unwrap(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function below a decorator of this package, or `func`."""
    return func.__wrapped__ if isinstance(func, _BatchedBase) else func


class Server:
    """A step's function where it computes: whatever is raised there is told as plain data."""

    def __init__(self, name: str, payload: bytes) -> None:
        self._name = name
        self._payload = payload
        self._call: Callable[..., Any]
        self._on: tuple[type[BaseException], ...] = ()

    def build(self) -> RemoteError | None:
        """Makes the pickled function ready; why that is impossible."""
        try:
            self._call, self._on = _built(self._name, self._payload)
        except BaseException as error:
            return to_remote(error)
        finally:
            del self._payload
        return None

    def answer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any] | RemoteError:
        """What the function returned, alone in a tuple, or what it raised."""
        try:
            return (_as_data(self._call(*args, **kwargs), self._on),)
        except BaseException as error:
            return _told(error, self._on)

    def unreadable(self, error: Exception) -> RemoteError:
        """Answer to what cannot be made a call again."""
        return to_remote(error, self._on)

    def unsendable(self, error: Exception) -> RemoteError:
        """Answer in place of one that cannot be sent."""
        return to_remote(
            TypeError(
                f"{self._name} returned what cannot be sent from its process "
                f"({type(error).__name__}: {error})"
            )
        )


def serve(connection: Connection[Any, Any], name: str, payload: bytes) -> None:
    """Calls the pickled function with what comes, until `connection` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends us
    if sys.platform != "win32":  # and was blocked until now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _die_with_driver()
    server = Server(name, payload)
    del payload
    failed = server.build()
    send(connection, failed)
    if failed is not None:
        return
    while True:
        try:
            args, kwargs = receive(connection)
        except (EOFError, ConnectionError):
            return
        except Exception as error:
            send(connection, server.unreadable(error))
            continue
        answer = server.answer(args, kwargs)
        del args, kwargs
        try:
            send(connection, answer)
        except OSError:
            return
        except Exception as error:
            send(connection, server.unsendable(error))
        del answer  # the next call has all memory for itself


def _built(name: str, payload: bytes) -> tuple[Callable[..., Any], tuple[type[BaseException], ...]]:
    try:
        function, on = pickle.loads(payload)
    except Exception as error:
        raise TypeError(
            f"{name} cannot be found in its process ({type(error).__name__}: {error}); define it, "
            "and what it refers to, in a module that can be imported"
        ) from error
    return function.build(), on


def _told(error: BaseException, on: tuple[type[BaseException], ...]) -> RemoteError:
    """`error` as plain data; if memory ran out, what it held is free again."""
    remote = to_remote(error, on)
    if isinstance(remote, RemoteMemoryError):
        drop_locals(error)
        with suppress(BaseException):  # whatever passes for torch there
            free_cache()
    return remote


def _as_data(output: Any, on: tuple[type[BaseException], ...]) -> Any:
    """`output` in which the exceptions of single rows are plain data."""
    if type(output) not in (list, tuple):
        return output
    return [to_remote(row, on) if isinstance(row, BaseException) else row for row in output]


def _die_with_driver() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    driver = multiprocessing.parent_process()
    assert driver is not None

    def watch() -> None:
        driver.join()
        os._exit(1)

    threading.Thread(target=watch, name="batched-watch", daemon=True).start()


def send(connection: Connection[Any, Any], message: object) -> None:
    buffers: list[memoryview] = []
    data = pickled(message, buffers)
    connection.send([each.nbytes for each in buffers])
    connection.send_bytes(data)
    for each in buffers:
        _write(connection, each)


def receive(connection: Connection[Any, Any]) -> Any:
    sizes: list[int] = connection.recv()
    data = connection.recv_bytes()
    buffers = [bytearray(size) for size in sizes]  # so arrays can be written to
    for each in buffers:
        _read(connection, each)
    return pickle.loads(data, buffers=buffers)


def pickled(message: object, buffers: list[memoryview] | None = None) -> bytes:
    """`message` for another process; large buffers are left out and go to `buffers`, if given."""

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if buffers is None or raw.nbytes < _LARGE:
            return True
        buffers.append(raw)
        return False

    try:
        data: bytes = pickle.dumps(message, protocol=5, buffer_callback=is_small)
        if b"__main__" not in data:  # or in a text, which does no harm
            return data
    except Exception:  # cloudpickle can more, and takes several times as long for small arrays
        pass
    if buffers:
        buffers.clear()
    data = cloudpickle.dumps(message, protocol=5, buffer_callback=is_small)
    return data  # noqa: RET504 -- which is where it has its type


def _write(connection: Connection[Any, Any], buffer: memoryview) -> None:
    if sys.platform == "win32":
        connection.send_bytes(buffer)
        return
    while buffer:
        buffer = buffer[os.write(connection.fileno(), buffer) :]


def _read(connection: Connection[Any, Any], target: bytearray) -> None:
    if sys.platform == "win32":
        connection.recv_bytes_into(target)
        return
    rest = memoryview(target)
    while rest:  # straight to its place, where `recv_bytes_into` copies thrice
        count = os.readv(connection.fileno(), [rest])
        if not count:
            raise EOFError
        rest = rest[count:]
