"""Start of a model process by the first client that needs it, and connections to it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, BinaryIO, Final

from .._runtime.timer_thread import daemon_thread
from ..errors import ServerGone
from . import UNIX
from .greeting import PATIENCE, Greeting, greet
from .messages import Channel
from .place import History, Place, describe_os_error

BUILDS: Final = 3
"""Deaths in a row, while the model is built, after which the start has failed."""
BETWEEN: Final = 0.01
"""Pause before the next attempt to connect (s)."""
ALIVE_INTERVAL: Final = 0.2
"""Interval at which a starting process is looked at (s)."""
MOST_WAIT: Final = 0.5
"""Longest rest of a pause for which calls wait (s)."""


Found = tuple[socket.socket, Greeting, Channel, Place]
"""A connection: its socket, the greeting of the server, the channel, and the place."""


def find(address: str, greeting: Greeting, place: Place | None = None) -> Found | None:
    """Return a connection to the process at `address`, or at `place`; None if it does not run."""
    return _greeted(place or Place.at(address), greeting)


def connect(address: str, greeting: Greeting, linger: float) -> Found:
    """Return a connection to the process at `address`, which is started if it does not run.

    `linger` is the time for which a process that is started waits for clients (s).

    Raises:
        ServerGone: no process runs, and none can be started, or it refuses this client.
    """
    try:
        deadline = time.perf_counter() + PATIENCE
        while True:
            found = find(address, greeting)
            if found is not None:
                return found
            if time.perf_counter() > deadline:
                raise ServerGone(f"the process of {address} closes each connection")
            if address.startswith(UNIX):
                path = address.removeprefix(UNIX)
                raise ServerGone(
                    f"no process listens at {path}; "
                    f"`python -m batched serve module:function --socket {path}` starts one"
                )
            place = Place.at(address)
            with place.locked(wait=True) as lock:
                assert lock is not None
                started = _start(place, address, linger, lock)
            if started:
                deadline = time.perf_counter() + PATIENCE
            else:  # a process that ends, or has no room for one more client
                time.sleep(BETWEEN)
    except OSError as error:
        why = describe_os_error(error)
        raise ServerGone(f"cannot connect to the process of {address}: {why}") from error


def _greeted(place: Place, greeting: Greeting) -> Found | None:
    """Return a connection to the process at `place`, or None if no process runs there."""
    link = place.dial()
    if link is None:
        return None
    try:
        answer, channel = greet(link, greeting)
    except EOFError:  # the process is ending
        link.close()
        return None
    except BaseException:
        link.close()
        raise
    if "refused" in answer:
        link.close()
        raise ServerGone(answer["refused"])
    return link, answer, channel, place


def _start(place: Place, reference: str, linger: float, lock: int) -> bool:
    """Start a process and wait until it listens. Return False if one listens already.

    Raises:
        ServerGone: the process cannot build its model, now or in the start just before.
    """
    if (link := place.dial()) is not None:
        link.close()
        return False
    history = History(lock)
    left = history.left()
    why = history.failure
    if left > MOST_WAIT and not why:
        why = (
            f"the process of {reference} has died several times; the next one is started in "
            f"{left:.0f} s"
        )
    if left > 0 and why:
        error = ServerGone(why)
        error.retry_after_s = left
        raise error
    time.sleep(max(0.0, left))
    failure = death = ""
    for _ in range(BUILDS):
        history.note()
        failure, death = _launch(place, reference, linger, lock)
        if not failure and not death:
            return True
        if failure:
            break
        time.sleep(max(0.0, history.left()))
    why = failure or f"it {death} while it was built, {BUILDS} times in a row"
    sentence = f"cannot start the process of {reference}: {why}"
    history.note(sentence)
    raise ServerGone(sentence)


def _launch(place: Place, reference: str, linger: float, lock: int) -> tuple[str, str]:
    """Start a process. Return why its model cannot be built, and how it died; "" if it listens.

    The process holds the lock, too, until it listens. So no other client starts a second one if
    this client ends.
    """
    ours, theirs = os.pipe()
    arguments: list[Any] = [reference, str(place.path), linger, theirs, lock]
    # programs that import their application from the folder may no longer have it on the path
    search = [*sys.path, os.getcwd()]
    code = (
        f"import sys; sys.path[:] = {search!r}; "
        f"from {__package__} import server; server.main(*{arguments!r})"
    )
    with os.fdopen(ours, "rb") as report:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs, lock],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__ if sys.__stderr__ is not None else subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        said = _read_report(report, process)
    try:
        daemon_thread("process", process.wait).start()  # so that the process ends whole
    except RuntimeError:  # this interpreter is ending, and Python 3.12 starts no thread
        process.returncode = 0  # nobody waits for it
    if said:
        return said.removeprefix(READY), ""
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    process.kill()
    code_of_exit = process.wait()
    if code_of_exit == -signal.SIGKILL:
        return "", "was killed, as systems do when memory runs out,"
    if code_of_exit < 0:
        return "", f"got {signal.Signals(-code_of_exit).name}"
    return "", f"exited with {code_of_exit}"


def _read_report(report: BinaryIO, process: subprocess.Popen[bytes]) -> str:
    """Return the line that a process reports, "" if the process ends without one.

    A fork of the process may hold the pipe open.
    """
    ended = False
    while not select.select([report], [], [], 0 if ended else ALIVE_INTERVAL)[0]:
        if ended:
            return ""
        ended = process.poll() is not None
    return report.readline().decode().rstrip("\n")


READY: Final = "ready"
"""Report of a process that listens. Any other report is the reason why it cannot."""
