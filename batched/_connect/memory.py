"""Shared memory of one direction of a connection: the sender fills slots, the receiver frees them.

The memory has no name. Its file descriptor crosses the socket, and the system frees the memory with
the last process that uses it, however that process ends. The file is sealed, so that no sender can
shrink the receiver's memory. A slot is free again once the receiver has dropped every object
that uses it. So the receiver need not copy arrays, and may keep them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import defaultdict, deque
from functools import lru_cache
from typing import Any, BinaryIO, Final

LARGE: Final = 1 << 16
"""Bytes from which a buffer crosses in shared memory. It is the size of the smallest slot."""
CAPACITY: Final = 1 << 26
"""Bytes of the memory of one direction. The system provides only pages that were written to."""


def new_file() -> BinaryIO:
    """Return a sealed file without a name."""
    import fcntl  # not on Windows

    descriptor = os.memfd_create("batched", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = os.fdopen(descriptor, "r+b", buffering=0)
    file.truncate(CAPACITY)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return file


class Outgoing:
    """Memory into which this process puts buffers. One thread at a time calls `put`."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, CAPACITY)
        self.freed: deque[int] = deque()
        """Offsets of slots that the receiver has dropped. Any thread may append."""
        self._end = 0  # of the part of the memory that was ever used
        self._unused: defaultdict[int, list[int]] = defaultdict(list)  # offsets of slots, by size
        self._used: dict[int, int] = {}  # sizes of the slots in use, by offset

    def put(self, buffer: bytes | memoryview) -> int:
        """Copy `buffer` into a slot. Return the slot's offset, or -1 if no slot is free."""
        while self.freed:
            offset = self.freed.popleft()
            self._unused[self._used.pop(offset, 0)].append(offset)
            if not self._used:  # other sizes may come next
                self._end = 0
                self._unused.clear()
        size = _slot_size(len(buffer))
        if unused := self._unused[size]:
            offset = unused.pop()
        elif self._end + size <= CAPACITY:
            offset, self._end = self._end, self._end + size
        else:
            return -1
        self._used[offset] = size
        self._map[offset : offset + len(buffer)] = buffer
        return offset


class Incoming:
    """Memory in which the other process puts buffers for this one. It closes the descriptor.

    A fork may keep arrays, too. So slots that are in use at a fork are never free again.

    Raises:
        ValueError, OSError: the other process could shrink the memory, or it is too small.
    """

    def __init__(self, descriptor: int) -> None:
        import fcntl

        with open(descriptor, "r+b", buffering=0) as file:
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("its shared memory is not sealed")
            self._map = mmap.mmap(descriptor, CAPACITY)
        self.dropped: deque[int] = deque()
        """Offsets of slots that nothing uses any more, of which the sender does not know yet.

        Any thread may append, also in the middle of a garbage collection.
        """

    def view(self, offset: int, size: int) -> memoryview:
        """Return the `size` bytes at `offset`, writable. The last reference frees the slot.

        Raises:
            ValueError: the slot is outside the memory.
        """
        slot = _slot_type(_slot_size(size)).from_buffer(self._map, offset)
        slot.offset, slot.dropped, slot.forks = offset, self.dropped, len(_forks)
        return memoryview(slot)[:size]


_forks: list[None] = []  # an entry for each fork

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=lambda: _forks.append(None))


def _slot_size(size: int) -> int:
    """Return the size of the slots for `size` bytes: a power of two."""
    return 1 << max(size - 1, LARGE - 1).bit_length()


@lru_cache
def _slot_type(size: int) -> Any:
    def drop(slot: Any) -> None:
        if slot.forks == len(_forks):
            slot.dropped.append(slot.offset)

    return type("Slot", (ctypes.c_ubyte * size,), {"__del__": drop})
