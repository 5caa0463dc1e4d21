"""Places of model processes: the socket of each, and the lock under which it is bound and removed.

There is one place for each function, user, environment and folder, and for each version of the
function's module and of this library. So a process never serves code that was changed since.

1. The lock is the socket's path with `.lock` appended. It is a file of this user, never a link. A
   process removes the file as it releases the lock. A process that has waited for a removed file
   begins again.
2. Look for a process, bind and listen under the lock, and remove the socket under it. So of two
   processes that start together one listens, and a process removes only its own socket.
3. If a start fails under the lock, the lock file says why to every client that waits for it.
4. The files of a user stay: a lock file with other content, and a path that is no socket.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from .._installation import __version__
from ..errors import ServerGone
from . import UNIX

LISTEN: Final = 1024
"""Clients that wait until the process accepts them."""
MOST_TEXT: Final = 1 << 16
"""Most bytes that are read of a lock file."""

served_here: set[Path] = set()
"""Sockets on which this process serves a function."""


class Place:
    """Socket of a model process, and the files next to it."""

    def __init__(self, path: Path, *, by_hand: bool = True) -> None:
        self.path = path
        self._lock = Path(f"{path}.lock")
        self._log = Path(f"{path}.log")
        self._by_hand = by_hand  # whether the process was started by hand
        self._socket: os.stat_result | None = None  # of the socket that this process has bound

    @classmethod
    def at(cls, address: str) -> Place:
        """Return the place of `module:attribute`, or of `unix:PATH`.

        Raises:
            ServerGone: other users can read the folder of sockets.
            OSError: this folder cannot be used.
        """
        if address.startswith(UNIX):
            return cls(Path(address.removeprefix(UNIX)))
        of_module = _version(address.partition(":")[0])
        parts = __version__, address, sys.prefix, os.getcwd(), *of_module
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return cls(_folder() / f"{digest[:24]}.socket", by_hand=False)

    def dial(self) -> socket.socket | None:
        """Return a socket connected to the process, or None if no process listens.

        Raises:
            ServerGone: the socket cannot be used.
        """
        link = socket.socket(socket.AF_UNIX)
        link.setblocking(False)
        why = None
        try:
            link.connect(str(self.path))
            return link
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
            pass
        except BlockingIOError:
            why = f"the process at {self.path} accepts no more connections"
        except OSError as error:
            why = f"cannot use the socket {self.path}: {error.strerror or error}"
        link.close()
        if why:
            raise ServerGone(why)
        return None

    def is_served(self) -> bool:
        """Return whether a process listens here."""
        link = self.dial()
        if link:
            link.close()
        return link is not None

    def listen(self) -> socket.socket:
        """Return a socket that listens here, for this user alone.

        A client that starts this process holds the lock.

        Raises:
            ServerGone: the path is no socket, another process listens there, or other users could
                replace the socket.
            OSError: the socket cannot be created.
        """
        if not self._by_hand:
            return self._listen()
        mode = self.path.parent.stat().st_mode
        if mode & 0o022 and not mode & stat.S_ISVTX:
            raise ServerGone(
                f"other users may write to {self.path.parent}, and could replace the socket; "
                "choose a folder of this user, such as /run/name with mode 700"
            )
        with self.locked():
            return self._listen()

    def _listen(self) -> socket.socket:
        if self.is_served():
            raise ServerGone(f"another process listens at {self.path}")
        if os.path.lexists(self.path):
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise ServerGone(
                    f"{self.path} exists and is no socket; choose another path for the socket"
                )
            self.path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        self.path.chmod(0o600)
        self._socket = self.path.lstat()
        listener.listen(LISTEN)
        return listener

    @contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[int]:
        """Hold the lock in the `with` block, which gets the descriptor of the lock file.

        Raises:
            ServerGone: the error that has ended the block of the process for which this one waited.
            BlockingIOError: another process holds the lock, and `wait` is False.
            OSError: the lock belongs to another user, or is a link.
        """
        import fcntl  # not on Windows

        while True:
            lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            text = b"not read yet"
            try:
                if os.fstat(lock).st_uid != os.geteuid():
                    raise PermissionError(f"{self._lock} is no lock of this user")
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                text = os.read(lock, MOST_TEXT)
                if os.fstat(lock).st_nlink:
                    yield lock
                    return
                if text:
                    raise ServerGone(text.decode())
            except ServerGone as failed:
                if not text:
                    os.write(lock, str(failed).encode())
                raise
            finally:
                with suppress(OSError):  # a process that was started has released it already
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if not text and os.fstat(lock).st_nlink:
                        self._lock.unlink()
                unlock(lock)

    def clean(self) -> None:
        """Remove the files if no process listens and none is being started."""
        if not self._by_hand:
            with suppress(OSError, ServerGone), self.locked(wait=False):
                if not self.is_served():
                    self.path.unlink(missing_ok=True)
                    if self.last_words() is None:
                        self._log.unlink(missing_ok=True)

    def leave(self) -> None:
        """Remove the files of this process, which has listened here."""
        with self.locked():
            with suppress(FileNotFoundError):
                if self._socket and os.path.samestat(self._socket, self.path.lstat()):
                    self.path.unlink()
            if not self._by_hand:
                self._log.unlink(missing_ok=True)

    def log_here(self) -> None:
        """Write the standard error of this process to the log from now on."""
        with self._log.open("wb") as log:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)

    def last_words(self) -> Path | None:
        """Return the log, if the process has written to it."""
        with suppress(OSError):
            if self._log.stat().st_size:
                return self._log
        return None


def unlock(lock: int) -> None:
    """Release a lock, also for copies of it in other processes."""
    import fcntl

    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _folder() -> Path:
    """Return the folder of the sockets of this user, which no other user can read."""
    uid = os.geteuid()
    folder = Path(tempfile.gettempdir(), f"batched-{uid}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid or status.st_mode & 0o077:
        raise ServerGone(
            f"{folder} must be a folder of user {uid} that nobody else can read (mode 700): its "
            "sockets run any code that is written to them"
        )
    return folder


def _version(module: str) -> list[str]:
    """Return path and time of change of a module's file. No module is imported."""
    top, *rest = module.split(".")
    with suppress(AttributeError, ImportError, OSError, TypeError, ValueError):  # there is none
        spec: Any = importlib.util.find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
        for name in rest:
            spec = PathFinder.find_spec(name, spec.submodule_search_locations)
        return [spec.origin, str(os.stat(spec.origin).st_mtime_ns)]
    return []
