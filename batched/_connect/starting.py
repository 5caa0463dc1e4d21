"""Start of a model process by the first client that needs it, and connections to it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, BinaryIO, Final

from .._runtime.timer_thread import daemon_thread
from ..errors import ServerGone
from . import UNIX
from .frames import Channel
from .greeting import PATIENCE, Greeting, check_server, greet
from .pipe import end, spawn
from .place import Place, served_here

READY: Final = "ready"
"""Report of a process that listens. Any other report is the reason why it cannot."""
BETWEEN: Final = 0.01
"""Pause before the next attempt to connect (s)."""
PAUSE: Final = 0.5
"""Pause after a start that has failed (s). Who asks for another start meanwhile gets its error."""

Found = tuple[socket.socket, Greeting, Channel, Place]
"""A connection: its socket, the greeting of the server, the channel, and the place."""


def find(address: str, greeting: Greeting, place: Place | None = None) -> Found | None:
    """Return a connection to the process at `address`, or at `place`; None if it does not run.

    Raises:
        ServerGone: the process refuses this client, or it is this process.
    """
    place = place or Place.at(address)
    if place.path in served_here:
        raise ServerGone(
            "this process serves the function, and would wait for itself; call the function "
            "instead of connecting to it"
        )
    link = place.dial()
    if link is None:
        return None
    try:
        server, channel = greet(link, greeting, PATIENCE)
        check_server(server, greeting.get("features"))
        return link, server, channel, place
    except BaseException as error:
        link.close()
        if isinstance(error, EOFError):  # the process is ending
            return None
        raise


def connect(address: str, greeting: Greeting, linger: float) -> Found:
    """Return a connection to the process at `address`, which is started if it does not run.

    `linger` is the time for which a process that is started waits for clients (s).

    Raises:
        ServerGone: no process runs, and none can be started, or it refuses this client.
    """
    try:
        deadline = time.perf_counter() + PATIENCE
        while (found := find(address, greeting)) is None:
            if time.perf_counter() > deadline:
                raise ServerGone(f"the process of {address} closes each connection")
            if address.startswith(UNIX):
                path = address.removeprefix(UNIX)
                raise ServerGone(
                    f"no process listens at {path}; "
                    f"`python -m batched serve module:function --socket {path}` starts one"
                )
            place = Place.at(address)
            with place.locked() as lock:
                if not place.is_served():
                    _start(place, address, linger, lock)
                    deadline = time.perf_counter() + PATIENCE
            time.sleep(BETWEEN)  # the process may be ending, or have no room for one more client
    except OSError as error:
        raise ServerGone(f"cannot connect to the process of {address}: {error}") from error
    return found


def _start(place: Place, reference: str, linger: float, lock: int) -> None:
    """Start a process, and wait until it listens.

    The process holds the lock, too, until it listens. So no other client starts a second one if
    this client ends.

    Raises:
        ServerGone: its model cannot be built.
    """
    ours, theirs = os.pipe()
    arguments: list[Any] = [reference, str(place.path), linger, theirs, lock]
    # programs that import their application from the folder may no longer have it on the path;
    # `linger` may be infinite
    code = (
        f"sys.path.append({os.getcwd()!r}); from math import inf; "
        f"from {__package__} import server; server.main(*{arguments!r})"
    )
    stdout = sys.__stderr__ if sys.__stderr__ is not None else subprocess.DEVNULL
    with open(ours, "rb") as report, open(theirs, "wb", buffering=0) as line_end:
        process = spawn(code, [theirs, lock], stdout)
        try:
            daemon_thread("process", _await_end, process, line_end).start()
        except RuntimeError:  # this interpreter is ending, and Python 3.12 starts no thread
            line_end.close()
            process.returncode = 0  # no thread waits for it
        why = report.readline().decode().strip()
    if why == READY:
        return
    why = why or f"while it was built, it {end(process)}"
    time.sleep(PAUSE)
    raise ServerGone(f"cannot start the process of {reference}: {why}")


def _await_end(process: subprocess.Popen[bytes], report: BinaryIO) -> None:
    """Wait for the end of a process, and end its report, which a fork of it may hold open."""
    process.wait()
    with suppress(OSError, ValueError):  # it was read and closed
        report.write(b"\n")
