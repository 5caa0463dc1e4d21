"""Owner of a progress file: its process and host, in a small file next to it.

The lock of SQLite keeps a second run out, also from reading. The error of the second run names the
owner. The lock may not hold on a network disk: a progress file belongs on a local disk.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path


def note_owner(progress: Path) -> None:
    """Record that this process has the lock."""
    owner = {"pid": os.getpid(), "host": socket.gethostname()}
    _path(progress).write_text(json.dumps(owner), encoding="utf-8")


def remove_owner(progress: Path) -> None:
    """Remove the record while the lock is held."""
    with suppress(OSError):
        _path(progress).unlink()


def describe_owner(progress: Path) -> str:
    """Return the owner of a progress file in words."""
    with suppress(FileNotFoundError, ValueError):  # the file is just being opened, or closed
        owner = json.loads(_path(progress).read_text(encoding="utf-8"))
        return f"the run of process {owner['pid']} on {owner['host']}"
    return "another run"


def _path(progress: Path) -> Path:
    return progress.with_name(f"{progress.name}.owner")
