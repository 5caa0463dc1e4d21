"""One model process for many client processes: calls cross a Unix socket, arrays shared memory."""

import socket
from typing import Final

UNIX: Final = "unix:"
"""Begin of the address of a process that was started by hand."""


def check_system(user: str) -> None:
    """Raise `OSError` if `user` cannot work on this system, because it has no Unix sockets."""
    if not hasattr(socket, "send_fds"):
        raise OSError(f"{user} needs Unix sockets, which Linux and macOS have, and Windows has not")
