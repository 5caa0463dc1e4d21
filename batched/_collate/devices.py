"""Where features go and where outputs come from: one transfer per feature, one per output, none
where all is there already.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

from .fields import Array, Field, NumpyField


class Devices:
    """The devices that a batch function wants its features on and its callers their results."""

    def __init__(self, device: Any, output_device: Any) -> None:
        """Both are None, for wherever they are, or what `torch.device` takes."""
        if device is not None or output_device is not None:
            import torch

            device = None if device is None else torch.device(device)
            output_device = None if output_device is None else torch.device(output_device)
        self._device = device
        self._output_device = output_device
        self._staging = _Staging() if device is not None and device.type == "cuda" else None

    def blank(self, field: Field, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """A fresh array for features of `field`, and the view that it is written through; it goes
        `inward` next.
        """
        if self._staging is None or (field.device is not None and field.device.type != "cpu"):
            return field.blank(shape)
        return self._staging.blank(field, shape) or field.blank(shape)

    def inward(self, array: Array) -> Array:
        """The array where the function wants it; arrays of numpy as tensors, but for those that
        have no numbers in them.
        """
        if self._device is None:
            return array
        if self._staging is not None:
            sent = self._staging.sent(array, self._device)
            if sent is not None:
                return sent
        torch = sys.modules["torch"]
        if not isinstance(array, torch.Tensor):
            strides_fit = all(
                stride >= 0 and stride % (array.itemsize or 1) == 0 for stride in array.strides
            )
            # what torch cannot share
            if not (array.flags.writeable and array.dtype.isnative and strides_fit):
                array = array.astype(array.dtype.newbyteorder("="))
            try:
                array = torch.from_numpy(array)
            except TypeError:  # strings, objects
                return array
        return array.to(self._device)

    def outward(self, arrays: Iterable[Array]) -> list[Array]:
        """The outputs where callers want them, without the graph of their gradients, which would
        keep the whole batch alive.
        """
        torch = sys.modules.get("torch")
        if torch is None:
            return list(arrays)
        moved: list[Array] = []
        for array in arrays:
            out = array
            if isinstance(array, torch.Tensor):
                if array.requires_grad:
                    out = array.detach()
                if self._output_device is not None:
                    out = out.to(self._output_device)
            moved.append(out)
        return moved


class _Staging:
    """Pinned memory of each thread, by feature, used again once what was sent from it has
    arrived.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def blank(self, field: Field, shape: tuple[int, ...]) -> tuple[Array, Array] | None:
        """A pinned tensor of that shape, and the view it is written through; None for what no
        tensor can hold.
        """
        torch = sys.modules["torch"]
        if isinstance(field, NumpyField):
            try:
                dtype = torch.from_numpy(
                    sys.modules["numpy"].empty(0, field.dtype.newbyteorder("="))
                ).dtype
            except TypeError:
                return None
        else:
            dtype = field.dtype
        buffers = self._buffers()
        memory, arrived = buffers.get(field.name, (None, None))
        if arrived is not None:
            arrived.synchronize()
        size = torch.Size(shape).numel()
        if memory is None or memory.dtype is not dtype or memory.numel() < size:
            memory = torch.empty(size + size // 2, dtype=dtype, device="cpu", pin_memory=True)
        array = memory[:size].view(shape)
        buffers[field.name] = memory, None
        self._of_thread.staged = field.name, array
        return array, array.numpy() if isinstance(field, NumpyField) else field.view(array)

    def sent(self, array: Array, device: Any) -> Array | None:
        """The array on the device, if it is the one that was made last; its memory waits for the
        transfer.
        """
        name, staged = getattr(self._of_thread, "staged", ("", None))
        if staged is None or staged is not array:
            return None
        torch = sys.modules["torch"]
        moved = array.to(device, non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)
        arrived.record(torch.cuda.current_stream(moved.device))
        buffers = self._buffers()
        buffers[name] = buffers[name][0], arrived
        return moved

    def _buffers(self) -> dict[str, tuple[Any, Any]]:
        buffers: dict[str, tuple[Any, Any]] | None = getattr(self._of_thread, "buffers", None)
        if buffers is None:
            buffers = self._of_thread.buffers = {}
        return buffers


def made(tensors: Iterable[Array]) -> list[Any]:
    """Events of the moment when all of `tensors` that are on a GPU will have been computed, by the
    streams of this thread.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    devices = {
        tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda
    }
    events = []
    for device in devices:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        events.append((device, event))
    return events


def wait_here(events: Iterable[Any]) -> None:
    """Has the streams of this thread wait for what they did not make themselves."""
    for device, event in events:
        sys.modules["torch"].cuda.current_stream(device).wait_event(event)


def wait_for(tensors: Iterable[Array]) -> None:
    """Returns once `tensors` have been computed."""
    for _, event in made(tensors):
        event.synchronize()
