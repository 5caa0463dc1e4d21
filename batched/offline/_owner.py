"""The owner of a progress file: which process of which host may write to it, in a small file beside
it.

SQLite's lock keeps a second run out; this file says who has the lock, for the message that the
second one gets. It is also the fence where locks fail, as on a network disk whose server gave the
lock away while this process was cut off: a run that takes over writes another token here first, and
each transaction begins by reading it. It cannot lie in the database: a connection that has locked
the file for itself reads what it has in memory, and would never see the token of another one.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Final

from ..errors import RunLocked

_NETWORK_DISK: Final = re.compile(
    r"nfs4?|cifs|smb3|smbfs|afs|ceph|lustre|gpfs|beegfs|fuse(\.(?!fuse-overlayfs|mergerfs).+)?"
).fullmatch
"""Filesystems of a network. What is FUSE mostly is one, such as sshfs or a mounted bucket."""


class Owner:
    """The process that has locked a progress file."""

    def __init__(self, progress: Path) -> None:
        self._progress = progress
        self._path = _path(progress)
        self._token = secrets.token_hex(16)

    def take_over(self) -> None:
        """Makes this process the owner; it has the lock."""
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "token": self._token}
        self._path.write_text(json.dumps(owner), encoding="utf-8")

    def confirm(self) -> None:
        """Raises `RunLocked` if another process has taken over."""
        if _read(self._progress).get("token") != self._token:
            raise RunLocked(
                f"{self._progress} was taken over by {describe_owner(self._progress)}; this run "
                "writes nothing more to it, and what it had committed stays"
            )

    def leave(self) -> bool:
        """Removes the file, the lock being held; False if another process has taken over."""
        if _read(self._progress).get("token") != self._token:
            return False
        self._path.unlink()
        return True


def describe_owner(progress: Path) -> str:
    """The owner of a progress file, in words."""
    owner = _read(progress)
    if not owner:  # it is just being opened, or closed
        return "another run"
    return f"the run of process {owner['pid']} on {owner['host']}"


def network_disk(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Kind of filesystem of the folder of `path`, if several machines may share it; only Linux
    tells.
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


def _read(progress: Path) -> dict[str, object]:
    """What the file says; nothing, if it is missing or being written."""
    try:
        owner: dict[str, object] = json.loads(_path(progress).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return owner
