"""First messages of a connection: each end says who it is, and sends its shared memory along.

Each message is one line of JSON, so that any two versions of this library can read each other's.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, Final

from .._installation import __version__
from .memory import Incoming, Outgoing, new_file
from .messages import Channel
from .place import check_peer

PATIENCE: Final = 30.0
"""Time for the other end to answer (s)."""
_MOST_BYTES: Final = 1 << 16

Greeting = dict[str, Any]
"""`version` of the library, and for a server `name`, `features` and `credit`, or `refused`."""


def greet(link: socket.socket, greeting: Greeting) -> tuple[Greeting, Channel]:
    """Greet the server as a client. Return the server's greeting, and the channel.

    Raises:
        EOFError: the server closed the connection, because it is ending.
        ServerGone: the server belongs to another user.
    """
    check_peer(link)
    link.settimeout(PATIENCE)
    try:
        outgoing = _send(link, greeting)
    except ConnectionError:
        raise EOFError from None
    answer, incoming = _receive(link)
    link.settimeout(None)
    return answer, Channel(outgoing, incoming)


def welcome(link: socket.socket, greeting: Greeting) -> tuple[Greeting, Channel]:
    """Greet a client as the server. Return the client's greeting, and the channel.

    The server refuses a client with another version of the library.

    Raises:
        EOFError: the client closed the connection, or was refused.
        ServerGone: the client belongs to another user.
    """
    check_peer(link)
    link.settimeout(PATIENCE)
    theirs, incoming = _receive(link)
    if theirs["version"] != __version__:
        greeting = {
            "refused": f"its model process has batched {__version__}, and this process batched "
            f"{theirs['version']}; restart the model process with the same version"
        }
    elif theirs.get("features", greeting["features"]) is not greeting["features"]:
        kind, module = (
            ("features", "batched.inference") if greeting["features"] else ("items", "batched")
        )
        greeting = {
            "refused": f"{greeting['name']} is a function of {kind}; connect to it by "
            f"{module}.connect or {module.replace('batched', 'batched.aio')}.connect"
        }
    outgoing = _send(link, greeting)
    if "refused" in greeting:
        raise EOFError
    link.settimeout(None)
    return theirs, Channel(outgoing, incoming)


def _send(link: socket.socket, greeting: Greeting) -> Outgoing:
    file = new_file()
    try:
        line = json.dumps({"version": __version__, **greeting}).encode() + b"\n"
        socket.send_fds(link, [line], [file])
        return Outgoing(file)
    finally:
        os.close(file)


def _receive(link: socket.socket) -> tuple[Greeting, Incoming]:
    files: list[int] = []
    try:
        line, files, _, _ = socket.recv_fds(link, _MOST_BYTES, 1)
        while line and not line.endswith(b"\n"):
            more = link.recv(_MOST_BYTES)
            line = line + more if more else b""
        if not line or not files:
            raise EOFError
        greeting: Greeting = json.loads(line)
        return greeting, Incoming(files[0])
    except ConnectionError:
        raise EOFError from None
    finally:
        for file in files:
            os.close(file)
