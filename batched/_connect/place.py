"""Places of model processes: the socket of each, and the lock under which it is started.

There is one place for each function, user, environment and folder, and for each version of the
function's module. So a process never serves code that was changed since.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from ..errors import ServerGone
from . import UNIX

MOST_PATH: Final = 104
"""Most bytes of a socket's path, the end included: 108 on Linux, 104 on macOS."""


served_here: set[Path] = set()
"""Sockets on which this process serves a function."""


class Place:
    """Socket of a model process, and the lock file beside the socket."""

    def __init__(self, path: Path, *, by_hand: bool = True) -> None:
        self.path = path
        self._lock = path.with_suffix(".lock")
        self._by_hand = by_hand  # whether the process was started by hand

    @classmethod
    def at(cls, address: str) -> Place:
        """Return the place of `module:attribute`, or of `unix:PATH`.

        Raises:
            ServerGone: the folder of sockets cannot be used.
        """
        if address.startswith(UNIX):
            return cls(Path(address.removeprefix(UNIX)))
        reference = address
        module = reference.partition(":")[0]
        parts = reference, sys.prefix, os.getcwd(), *map(str, _version(module))
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return cls(_folder() / f"{digest[:24]}.socket", by_hand=False)

    def dial(self) -> socket.socket | None:
        """Return a socket connected to the process, or None if no process listens.

        Raises:
            ServerGone: the socket cannot be used.
        """
        if self.path in served_here:
            raise ServerGone(
                "this process serves the function, and would wait for itself; call the function "
                "instead of connecting to it"
            )
        link = socket.socket(socket.AF_UNIX)
        try:
            if len(os.fsencode(self.path)) >= MOST_PATH:
                raise ServerGone(
                    f"the path of the socket is longer than {MOST_PATH - 1} bytes: {self.path}; "
                    "set XDG_RUNTIME_DIR to a folder with a shorter path, or choose another socket"
                )
            link.connect(os.fspath(self.path))
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
            link.close()
            return None
        except OSError as error:
            link.close()
            raise ServerGone(f"cannot use the socket {self.path}: {error.strerror}") from None
        except BaseException:
            link.close()
            raise
        return link

    @contextmanager
    def locked(self, *, wait: bool) -> Iterator[int | None]:
        """Hold the lock in the `with` block, which gets the descriptor of the lock file.

        It gets None if another process holds the lock, unless `wait`.
        """
        import fcntl  # not on Windows

        while True:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(descriptor)
                yield None
                return
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self._lock)):
                    break
            os.close(descriptor)  # its last holder has removed the file
        try:
            yield descriptor
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for copies of it in other processes
            os.close(descriptor)

    def clean(self) -> None:
        """Remove the files if no process listens and none is being started.

        The lock file stays while it says how long the next start must wait.
        """
        if self._by_hand:
            return
        with suppress(OSError, ServerGone), self.locked(wait=False) as lock:
            if lock is None:
                return
            if (link := self.dial()) is not None:
                link.close()
            else:
                _unlink_socket(self.path)
                if not History(lock).is_recent:
                    self._lock.unlink(missing_ok=True)

    def leave(self) -> None:
        """Remove what the process that listened here has made.

        Only a process that a client has started has a lock file.
        """
        if self._by_hand:
            _unlink_socket(self.path)
            return
        with self.locked(wait=True):
            _unlink_socket(self.path)
            self._lock.unlink(missing_ok=True)


class History:
    """Earlier starts at a place, kept in its lock file.

    All processes of a machine with Unix sockets share one `perf_counter`, until it is restarted.
    """

    GROWTH: Final = 2.0
    """Ratio of a pause to the last one."""
    FIRST, FIRST_AFTER_FAILURE = 0.25, 1.0
    """First pauses (s): after a process has died, and after a model could not be built."""
    LONGEST: Final = 30.0
    """Longest pause (s). A process that has lived longer is started again at once."""

    def __init__(self, lock: int) -> None:
        self._lock = lock
        try:
            state: dict[str, Any] = json.loads(os.pread(lock, 1 << 16, 0))
            self._time, self._pause = float(state["time"]), float(state["pause"])
            self.failure: str = state["failure"]
        except (ValueError, KeyError, TypeError):
            self._time, self._pause, self.failure = 0.0, 0.0, ""

    @property
    def is_recent(self) -> bool:
        """Whether the last start was so recently that the next one waits longer."""
        return abs(time.perf_counter() - self._time) < self.LONGEST + self._pause

    def left(self) -> float:
        """Return the rest of the pause after the last start (s)."""
        return min(self._time + self._pause - time.perf_counter(), self._pause)

    def note(self, failure: str = "") -> None:
        """Note a start, or the sentence by which a start has failed."""
        longer = max(self.FIRST, self.GROWTH * self._pause) if self.is_recent else 0.0
        least = self.FIRST_AFTER_FAILURE if failure else 0.0
        self._pause = min(max(longer, least), self.LONGEST)
        self._time, self.failure = time.perf_counter(), failure
        data = json.dumps({"time": self._time, "pause": self._pause, "failure": failure}).encode()
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, data, 0)


def check_peer(link: socket.socket) -> None:
    """Raise ServerGone if the process at the other end belongs to another user.

    Only Linux can tell. Elsewhere the rights of the folder are the only protection.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return
    _, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise ServerGone(
            f"the process at the other end of the socket belongs to user {uid}, this one to user "
            f"{os.geteuid()}; only processes of one user may share a model process"
        )


def listen(path: Path) -> socket.socket:
    """Return a socket that listens at `path`, for this user alone.

    Raises:
        ServerGone: the path is too long or in no folder, is no socket, or another process listens
            there.
        OSError: the socket cannot be created.
    """
    if not path.parent.is_dir():
        raise ServerGone(f"the folder {path.parent} does not exist; create it first")
    if (link := Place(path).dial()) is not None:
        link.close()
        raise ServerGone(f"another process listens at {path}")
    _unlink_socket(path)
    if os.path.lexists(path):
        raise ServerGone(f"{path} exists and is no socket; choose another path for the socket")
    listener = socket.socket(socket.AF_UNIX)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(before)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def _unlink_socket(path: Path) -> None:
    """Remove a socket. A file of any other kind stays: it is the user's."""
    if path.is_socket() and not path.is_symlink():
        path.unlink(missing_ok=True)


def _folder() -> Path:
    """Return the folder of the sockets of this user, which nobody else can read."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    uid = os.geteuid()
    if os.path.isdir(runtime):
        folder = Path(runtime, "batched")
    else:
        folder = Path(tempfile.gettempdir(), f"batched-{uid}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ServerGone(f"cannot use the folder {folder}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid or status.st_mode & 0o077:
        raise ServerGone(
            f"{folder} must be a folder of user {uid} that nobody else can read (mode 700): its "
            "sockets run any code that is written to them"
        )
    return folder


def _version(module: str) -> tuple[str, int] | tuple[()]:
    """Return path and time of change of a module's file. No module is imported."""
    top, *rest = module.split(".")
    try:
        found = importlib.util.find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
        if found is None:
            return ()
        folders = found.submodule_search_locations
        if rest and folders:
            path = Path(next(iter(folders))).joinpath(*rest).with_suffix(".py")
            if not path.exists():
                path = path.with_suffix("") / "__init__.py"
        elif found.origin is not None:
            path = Path(found.origin)
        else:
            return ()
        return str(path), path.stat().st_mtime_ns
    except (ImportError, OSError, ValueError):
        return ()


def describe_os_error(error: OSError) -> str:
    """Return the sentence for an error of files or sockets."""
    if error.errno == errno.ENOSPC:
        return f"no space is left for {error.filename or 'its files'}"
    return f"{error.strerror}: {error.filename}" if error.filename else str(error)
