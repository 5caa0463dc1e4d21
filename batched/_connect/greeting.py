"""First messages of a connection: each end says who it is, and sends its shared memory along.

Each message is one line of JSON, so that any two versions of this library can read each other's.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress
from typing import Any, Final

from .._installation import __version__
from ..errors import ServerGone
from .frames import Channel
from .memory import Incoming, Outgoing, new_file

PATIENCE: Final = 30.0
"""Time for a model process to answer (s)."""
MOST_BYTES: Final = 1 << 12
"""Most bytes of a greeting."""

Greeting = dict[str, Any]
"""`version` of the library, and for a server `name`, `features` and `ahead`."""


def line_of(greeting: Greeting) -> bytes:
    return json.dumps({"version": __version__, **greeting}).encode() + b"\n"


def greet(
    link: socket.socket, ours: Greeting, seconds: float, *, first: bool = True
) -> tuple[Greeting, Channel]:
    """Exchange greetings, within `seconds`. Return that of the other end, and the channel.

    A client greets first, and a server answers, so that no frame follows a greeting at once. So
    the first bytes are a greeting, or none came.

    Raises:
        ServerGone: the other end belongs to another user.
        EOFError: it has closed the connection, because it is ending.
        OSError: it did not greet in time.
        ValueError: it sent no greeting.
    """
    if hasattr(socket, "SO_PEERCRED"):  # elsewhere the rights of the folder protect alone
        _, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            raise ServerGone(
                f"the process at the other end of the socket belongs to user {uid}, this one to "
                f"user {os.geteuid()}; only processes of one user may share a model process"
            )
    link.settimeout(seconds)
    channel = Channel()
    if first:
        _send(link, ours, channel)
    data = b""
    with suppress(ConnectionError):
        data, files, *_ = socket.recv_fds(link, MOST_BYTES, 1)
        for file in files:
            channel.incoming = Incoming(file)
    if not data:
        raise EOFError
    theirs = json.loads(data)
    if not first:
        _send(link, ours, channel)
    link.settimeout(None)
    return theirs, channel


def _send(link: socket.socket, greeting: Greeting, channel: Channel) -> None:
    with suppress(ConnectionError):  # it may have closed
        if not hasattr(os, "memfd_create"):  # macOS
            link.sendall(line_of(greeting))
            return
        with new_file() as file:
            channel.outgoing = Outgoing(file.fileno())
            socket.send_fds(link, [line_of(greeting)], [file.fileno()])


def check_server(server: Greeting, features: bool | None) -> None:
    """Raise ServerGone unless a client of this version, with or without `features`, may call."""
    if server["version"] != __version__:
        raise ServerGone(
            f"its model process has batched {server['version']}, and this process batched "
            f"{__version__}; restart the model process with the same version"
        )
    if features not in (None, server["features"]):
        module = "inference." if server["features"] else ""
        raise ServerGone(
            f"{server['name']} needs batched.{module}connect or batched.aio.{module}connect"
        )
