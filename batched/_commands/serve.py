"""Command serve: the model process of connected functions, run by hand."""

from __future__ import annotations

import argparse
import os
import socket
from contextlib import closing
from typing import Final

from .._connect import UNIX, check_system
from .._connect.place import Place, served_here
from .._connect.server import ModelServer, find_function
from .._connect.starting import find
from ..errors import ServerGone
from .reference import argument_error, import_attribute

NOT_READY: Final = 1
"""Exit status of `--check` if no process listens."""


def serve(args: argparse.Namespace) -> int:
    """Serve a batched function until SIGTERM or Ctrl-C. Return the exit status.

    Raises:
        OSError: this system has no Unix sockets.
        argparse.ArgumentError: the function or the socket cannot be used.
    """
    check_system("batched serve")
    if args.check:
        return _check(args)
    if args.target is None:
        raise argument_error("name the function as module:function")
    path = args.socket.expanduser().absolute()
    place = Place(path)
    served_here.add(path)
    import_attribute(args.target)  # first: its errors name the module
    try:
        function = find_function(args.target)
        server = ModelServer(function, place.listen(), place)
    except (ServerGone, TypeError, OSError) as error:
        raise argument_error(str(error)) from error

    def ready() -> None:
        print(f"{server.name} is served on {UNIX}{path}", flush=True)
        _notify("READY=1")

    server.run(ready, lambda: _notify("STOPPING=1"))
    return 0


def _check(args: argparse.Namespace) -> int:
    """Print whether a process listens on the socket, and return the exit status."""
    found = find(f"{UNIX}{args.socket.expanduser().absolute()}", {})
    if found is None:
        print(f"no process listens at {args.socket}")
        return NOT_READY
    with closing(found[0]):
        print(f"{found[1]['name']} is served on {UNIX}{args.socket}")
    return 0


def _notify(state: str) -> None:
    """Tell systemd the state of this service, if systemd has started it (see sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.connect("\0" + address[1:] if address.startswith("@") else address)
            link.sendall(state.encode())
