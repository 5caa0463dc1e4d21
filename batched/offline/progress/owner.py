"""The owner of a progress file: its process and host, in a small file beside it.

SQLite's lock keeps a second run out, also from reading. This file says who has the lock, for the
message that the second run gets.
"""

from __future__ import annotations

import json
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

_NETWORK_DISK: Final = re.compile(
    r"nfs4?|cifs|smb3|smbfs|afs|ceph|lustre|gpfs|beegfs|fuse(\.(?!fuse-overlayfs|mergerfs).+)?"
).fullmatch
"""Filesystems of a network. Most of FUSE is one: sshfs, a mounted bucket."""


def note_owner(progress: Path) -> None:
    """Note this process, which has the lock."""
    owner = {"pid": os.getpid(), "host": socket.gethostname()}
    _path(progress).write_text(json.dumps(owner), encoding="utf-8")


def remove_owner(progress: Path) -> None:
    """Remove the note, the lock being held."""
    with suppress(OSError):
        _path(progress).unlink()


def describe_owner(progress: Path) -> str:
    """Return the owner of a progress file in words."""
    with suppress(FileNotFoundError, ValueError):  # it is just being opened, or closed
        owner = json.loads(_path(progress).read_text(encoding="utf-8"))
        return f"the run of process {owner['pid']} on {owner['host']}"
    return "another run"


def network_disk(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the kind of filesystem of the folder of `path`, if several machines may share it.

    Only Linux tells.
    """
    try:
        device = path.resolve().parent.stat().st_dev
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:  # 36 35 98:0 / /mnt rw,noatime master:1 - ext3 /dev/root rw
        mount, _, filesystem = line.partition(" - ")
        kind = filesystem.partition(" ")[0]
        if mount.split(" ")[2] == number and _NETWORK_DISK(kind):
            return kind
    return None


def _path(progress: Path) -> Path:
    return progress.with_name(f"{progress.name}.owner")
