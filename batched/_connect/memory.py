"""Shared memory of one direction of a connection: the sender fills slots, the receiver frees them.

The memory has no name. Its file descriptor crosses the socket, and the system frees the memory with
the last process that uses it, however that process ends. A slot is free again once the receiver has
dropped every object that uses it. So the receiver need not copy arrays, and may keep them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections import defaultdict, deque
from functools import lru_cache
from typing import Any, Final
from weakref import WeakSet

LARGE: Final = 1 << 16
"""Bytes from which a buffer crosses in shared memory. It is the size of the smallest slot."""
CAPACITY: Final = 1 << 26
"""Bytes of the memory of one direction. The system provides only pages that were written to."""


def new_file() -> int:
    """Return the descriptor of an empty file without a name, as large as the memory."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("batched")
    else:  # macOS has no memfd_create
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, CAPACITY)
    return descriptor


class Outgoing:
    """Memory into which this process puts buffers. One thread at a time calls `put`."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, CAPACITY)
        self.freed: deque[int] = deque()
        """Offsets of slots whose buffers the receiver has dropped. Any thread may append."""
        self._end = 0  # of the part of the memory that was ever used
        self._unused: defaultdict[int, list[int]] = defaultdict(list)  # offsets of slots, by size
        self._used: dict[int, int] = {}  # sizes of the slots in use, by offset

    def put(self, buffer: memoryview) -> int | None:
        """Copy `buffer` into a slot. Return the slot's offset, or None if no slot is free."""
        while self.freed:
            offset = self.freed.popleft()
            self._unused[self._used.pop(offset)].append(offset)
            if not self._used:  # other sizes may come next
                self._end = 0
                self._unused.clear()
        size = _slot_size(buffer.nbytes)
        if unused := self._unused[size]:
            offset = unused.pop()
        elif self._end + size <= CAPACITY:
            offset, self._end = self._end, self._end + size
        else:
            return None
        self._used[offset] = size
        self._map[offset : offset + buffer.nbytes] = buffer
        return offset


class Incoming:
    """Memory in which the other process puts buffers for this one.

    A fork may keep arrays, too. So slots that are in use at a fork are never free again.
    """

    def __init__(self, descriptor: int) -> None:
        _incoming.add(self)
        self._map = mmap.mmap(descriptor, CAPACITY)
        self.dropped: deque[int] = deque()
        """Offsets of slots that nothing uses any more, of which the sender does not know yet.

        Any thread may append, also in the middle of a garbage collection.
        """

    def view(self, offset: int, size: int) -> memoryview:
        """Return the `size` bytes at `offset`, writable. The last reference frees the slot."""
        slot = _slot_type(_slot_size(size)).from_buffer(self._map, offset)
        slot.offset, slot.dropped = offset, self.dropped
        return memoryview(slot)[:size]


_incoming: WeakSet[Incoming] = WeakSet()


def _before_fork() -> None:
    for incoming in list(_incoming):
        incoming.dropped = deque(incoming.dropped)  # slots in use refer to the old object


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork)


def _slot_size(size: int) -> int:
    """Return the size of the slots for `size` bytes: a power of two."""
    return 1 << (size - 1).bit_length()


@lru_cache
def _slot_type(size: int) -> Any:
    def drop(slot: Any) -> None:
        slot.dropped.append(slot.offset)

    return type("Slot", (ctypes.c_ubyte * size,), {"__del__": drop})
