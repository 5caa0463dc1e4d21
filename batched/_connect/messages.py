"""Messages between a client and a model process, as frames of bytes on a socket.

A frame has a header, the places of its large buffers, and a pickle. At the end are the buffers for
which the shared memory had no room. The module has no I/O: its callers read and write the socket.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from .._collate.arrays import find_imported
from .memory import LARGE, Incoming, Outgoing

CALL: Final = 1
"""A call: its arguments. Client to server."""
CANCEL: Final = 2
"""The caller of a call has gone. Client to server."""
RESULT: Final = 3
"""The result of a call. Server to client."""
ERROR: Final = 4
"""The error of a call. Server to client."""
FREE: Final = 5
"""Offsets of slots of shared memory that are free again. Both ways."""
STATS: Final = 6
"""A request of statistics, and its answer."""
RESET: Final = 7
"""A request to set the statistics to zero, and its answer."""

CHUNK: Final = 1 << 18
"""Most bytes that are received at once."""

_HEADER: Final = struct.Struct("<QQBI")
"""Bytes after the header, number of the call, kind, number of large buffers."""
_PLACE: Final = struct.Struct("<qQ")
"""Offset of a buffer in the shared memory, -1 for one at the end of the frame, and its bytes."""

Message = tuple[bytes, list[memoryview]]
"""A pickle, and the large buffers to which it refers."""


def pickled(value: object) -> Message:
    """Return `value` as a pickle and its large buffers, which still belong to arrays of `value`.

    Raises:
        Exception: an object of `value` cannot be pickled.
    """
    large: list[memoryview] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        large.append(raw)
        return False

    tensors = find_imported("torch", "Tensor")
    if not tensors:
        return pickle.dumps(value, 5, buffer_callback=stays), large
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5, buffer_callback=stays)
    pickler.dispatch_table = _reducers(*tensors)
    pickler.dump(value)
    return file.getvalue(), large


@lru_cache
def _reducers(tensor: Any) -> ChainMap[Any, Callable[..., Any]]:
    return ChainMap({tensor: _reduce_tensor}, copyreg.dispatch_table)


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor to its bytes. A tensor of a GPU arrives on the CPU."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor.__reduce_ex__(5)
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(raw), tensor.dtype, tuple(tensor.shape))


def _tensor(raw: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    if not memoryview(raw).nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


@dataclass(slots=True)
class Frame:
    """A frame that has arrived."""

    kind: int
    number: int
    _pickle: bytes
    _places: Sequence[tuple[int, int]]
    _inline: bytes
    _incoming: Incoming

    def load(self) -> Any:
        """Return the value of the frame. Call either this method or `drop`, once.

        Raises:
            Exception: the value cannot be unpickled in this process.
        """
        if not self._places:
            return pickle.loads(self._pickle)
        return pickle.loads(self._pickle, buffers=list(self._buffers()))

    def drop(self) -> None:
        """Free the shared memory of a frame that nobody reads."""
        for _ in self._buffers():
            pass

    def _buffers(self) -> Iterator[Any]:
        start = 0
        for offset, size in self._places:
            if offset >= 0:
                yield self._incoming.view(offset, size)
            else:
                yield bytearray(self._inline[start : start + size])  # so arrays can be written to
                start += size


class Channel:
    """One end of a connection: bytes of messages, and frames of bytes."""

    def __init__(self, outgoing: Outgoing, incoming: Incoming) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._received = bytearray()  # the begin of the next frame

    def write(self, kind: int, number: int, message: Message | None = None) -> list[bytes]:
        """Return the bytes of a frame. One thread at a time may write."""
        parts = []
        if dropped := self._incoming.dropped:
            offsets = [dropped.popleft() for _ in range(len(dropped))]
            data = struct.pack(f"<{len(offsets)}Q", *offsets)
            parts += [_HEADER.pack(len(data), 0, FREE, 0), data]
        data, buffers = message or (b"", [])
        if not buffers:
            parts += [_HEADER.pack(len(data), number, kind, 0), data]
            return parts
        places: list[bytes] = []
        inline: list[bytes] = []
        for buffer in buffers:
            offset = self._outgoing.put(buffer)
            places.append(_PLACE.pack(-1 if offset is None else offset, buffer.nbytes))
            if offset is None:
                inline.append(bytes(buffer))
        size = sum(map(len, [*places, data, *inline]))
        return [*parts, _HEADER.pack(size, number, kind, len(buffers)), *places, data, *inline]

    def read(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Return the frames that `data`, the next bytes of the socket, completes."""
        received = self._received
        received += data
        frames: list[Frame] = []
        start, end = 0, len(received)
        with memoryview(received) as view:
            while end - start >= _HEADER.size:
                size, number, kind, count = _HEADER.unpack_from(view, start)
                begin = start + _HEADER.size
                if begin + size > end:
                    break
                start = begin + size
                if kind == FREE:
                    offsets = struct.iter_unpack("<Q", view[begin:start])
                    self._outgoing.freed.extend([offset for (offset,) in offsets])
                    continue
                if not count:
                    frames.append(
                        Frame(kind, number, bytes(view[begin:start]), (), b"", self._incoming)
                    )
                    continue
                places = [
                    _PLACE.unpack_from(view, begin + each * _PLACE.size) for each in range(count)
                ]
                begin += count * _PLACE.size
                inline = start - sum([length for offset, length in places if offset < 0])
                frames.append(
                    Frame(
                        kind,
                        number,
                        bytes(view[begin:inline]),
                        places,
                        bytes(view[inline:start]),
                        self._incoming,
                    )
                )
        del received[:start]
        return frames
