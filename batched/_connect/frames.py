"""Frames between a client and a model process. Each carries all messages that were ready.

A message is a pickle of its own, which its caller makes and reads, after the large buffers to which
it refers. Each of these parts has a header. A large part is in the shared memory while that has
room. The module has no I/O.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import sys
from array import array
from collections import ChainMap
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from .._collate.arrays import find_imported, is_dense
from .._services.failures import to_remote
from ..errors import RemoteError
from .memory import LARGE, Incoming, Outgoing

BUFFER: Final = 0
"""A large buffer of the message that follows. Both ways."""
FREE: Final = 1
"""Offsets of slots of shared memory that are free again. Both ways."""
CALL: Final = 2
"""A call: its arguments. Client to server. From here on, kinds of messages."""
CANCEL: Final = 3
"""The caller of a call has gone. Client to server."""
RESULT: Final = 4
"""The result of a call. Server to client."""
ERROR: Final = 5
"""The error of a call. Server to client."""
STATS: Final = 6
"""A request of statistics, and its answer."""
RESET: Final = 7
"""A request to set the statistics to zero, and its answer."""

CHUNK: Final = 1 << 17
"""Most bytes that are received at once."""
MAX_MESSAGE_BYTES: Final = 1 << 30
"""Most bytes of a message."""

_HEADER: Final = struct.Struct("<QBqQ")
"""Number of the call, kind, offset in the shared memory or -1 for a part that follows, bytes."""

Message = tuple[bytes, Sequence[Any]]
"""A pickle, and the large buffers to which it refers."""
Numbered = tuple[int, int, Message]
"""Number of the call, kind, and message."""
NOTHING: Final[Message] = b"", ()


def pickled(value: object, kind: Any = pickle.Pickler, least: float = LARGE) -> Message:
    """Return `value` as a pickle and its large buffers, which still belong to arrays of `value`.

    `kind` is a class of picklers. Buffers of fewer than `least` bytes are a part of the pickle.

    Raises:
        Exception: an object of `value` cannot be pickled, or is too large.
    """
    large: list[memoryview] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < least:
            return True
        large.append(raw)
        return False

    tensors = find_imported("torch", "Tensor")
    if tensors or kind is not pickle.Pickler:
        file = io.BytesIO()
        pickler = kind(file, 5, buffer_callback=stays)
        if tensors:
            pickler.dispatch_table = _reducers(kind, *tensors)
        pickler.dump(value)
        data = file.getvalue()
    else:
        data = pickle.dumps(value, 5, buffer_callback=stays)
    if len(data) + sum(map(len, large)) > MAX_MESSAGE_BYTES - LARGE:
        raise ValueError(f"it has more than {MAX_MESSAGE_BYTES >> 30} GiB")
    return data, large


@lru_cache
def _reducers(kind: Any, tensor: Any) -> ChainMap[Any, Callable[..., Any]]:
    known = copyreg.dispatch_table if kind is pickle.Pickler else kind.dispatch_table
    return ChainMap({tensor: _reduce_tensor}, known)


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor to its bytes. A tensor of a GPU arrives on the CPU."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    torch = sys.modules["torch"]
    if not is_dense(tensor) or tensor.is_quantized or not tensor.numel():
        return tensor.__reduce_ex__(5)
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(raw), tensor.dtype, tensor.shape)


def _tensor(raw: Any, dtype: Any, shape: Any) -> Any:
    import torch

    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def load(message: Message) -> Any:
    """Return the value of a message.

    Raises:
        Exception: the value cannot be unpickled in this process.
    """
    return pickle.loads(message[0], buffers=message[1])


class Channel:
    """One end of a connection: messages, and the bytes of frames."""

    def __init__(self, outgoing: Outgoing | None = None, incoming: Incoming | None = None) -> None:
        self.outgoing = outgoing
        self.incoming = incoming
        self._received = bytearray()  # the begin of the next part
        self._wanted = 0  # bytes of this part, if they are known
        self._buffers: tuple[Any, ...] = ()  # large buffers of the next message

    def write(self, messages: Sequence[Numbered]) -> bytes:
        """Return the bytes of a frame with `messages`. One thread at a time may write."""
        parts: list[Any] = []
        if self.incoming is not None and (dropped := self.incoming.dropped):
            offsets = array("Q", [dropped.popleft() for _ in range(len(dropped))])
            messages = [(0, FREE, (offsets.tobytes(), ())), *messages]
        for number, kind, (data, buffers) in messages:
            for buffer in buffers:
                parts += self._part(number, BUFFER, buffer)
            if len(data) < LARGE:
                parts += _HEADER.pack(number, kind, -1, len(data)), data
            else:
                parts += self._part(number, kind, data)
        return b"".join(parts)

    def _part(self, number: int, kind: int, data: Any) -> tuple[Any, ...]:
        offset = -1 if self.outgoing is None else self.outgoing.put(data)
        header = _HEADER.pack(number, kind, offset, len(data))
        return (header, data) if offset < 0 else (header,)

    def read(self, data: memoryview) -> list[Numbered]:
        """Return the messages that `data`, the next bytes of the socket, completes.

        Raises:
            ValueError: the bytes are no frames.
        """
        self._received += data
        if len(self._received) < self._wanted:
            return []
        messages: list[Numbered] = []
        received, buffers = bytes(self._received), self._buffers
        start, end, most = 0, _HEADER.size, len(received)
        while end <= most:
            number, kind, offset, size = _HEADER.unpack_from(received, start)
            part: Any
            if offset >= 0:
                part = self._shared(offset, size)
            else:
                first, end = end, end + size
                if end > most:
                    break
                part = received[first:end]
            start, end = end, end + _HEADER.size
            if kind > FREE:
                messages.append((number, kind, (part, buffers)))
                buffers = ()
            elif kind == BUFFER:  # writable, as arrays are
                buffers += (part if offset >= 0 else bytearray(part),)
            elif self.outgoing is not None:
                self.outgoing.freed.extend(array("Q", part))
        self._wanted, self._buffers = end - start, buffers
        if self._wanted > MAX_MESSAGE_BYTES:
            raise ValueError(f"a frame of {self._wanted} bytes")
        del self._received[:start]
        return messages

    def _shared(self, offset: int, size: int) -> memoryview:
        if self.incoming is None:
            raise ValueError("a buffer in shared memory, which was not sent")
        return self.incoming.view(offset, size)


def error_message(error: BaseException) -> Message:
    """Return an error with its causes and its text, for `restored`."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__
    return pickled(([*map(_portable, chain)], to_remote(error)))


def _portable(error: BaseException) -> bytes | None:
    """Return a pickle of `error`, or of its class and all state that can be pickled."""
    args = [each if _copied(each) else repr(each) for each in error.args]
    state = {name: each for name, each in vars(error).items() if _copied(each)}
    return _copied(error) or _copied((type(error), args, state))


def _copied(value: object) -> bytes | None:
    try:
        data = pickle.dumps(value, 5)
        pickle.loads(data)
    except BaseException:  # of a class
        return None
    return data


class _ErrorReader(pickle.Unpickler):
    """Reader of an error that never imports the module `model`, or a part of it."""

    model: str

    def find_class(self, module: str, name: str) -> Any:
        is_in_model = f"{module}.".startswith(f"{self.model}.")
        if is_in_model and self.model not in sys.modules:
            raise ImportError(module)
        return super().find_class(module, name)


def restored(chain: list[Any], remote: RemoteError, model: str = "") -> BaseException:
    """Return an error of another process. The `RemoteError` stands for an unknown class.

    A class of the module `model`, which takes long to import, is unknown until it is imported.
    """
    errors: list[BaseException] = []
    with suppress(Exception):  # a class may not be importable here
        for data in chain:
            reader = _ErrorReader(io.BytesIO(data))
            reader.model = model
            found = reader.load()
            if type(found) is tuple:
                kind, args, state = found
                found = kind.__new__(kind, *args)
                found.__setstate__(state)
            errors.append(found)
    errors = errors or [remote]
    for effect, cause in pairwise(errors):
        effect.__cause__ = cause
    if remote.lines:
        errors[0].add_note(f"In the model process:\n{remote.lines}")
    return errors[0]
