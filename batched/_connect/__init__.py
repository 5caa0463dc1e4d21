"""One model process for many client processes: calls cross a Unix socket, arrays shared memory."""

from typing import Final

UNIX: Final = "unix:"
"""Begin of the address of a process that was started by hand."""
