"""Transfers of features to the device of the function, and of outputs to the device of the callers.

There is one transfer for each feature and each output, and none for data that is there already.
Pinned memory and streams let these transfers run while the GPU computes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

from ..arrays import Array, find_imported
from .spec import FeatureSpec, NumpySpec


class Devices:
    """Devices on which a batch function gets its features and its callers their results."""

    def __init__(self, device: Any, output_device: Any) -> None:
        """Take devices as `torch.device` does; None: features, or results, stay on their device."""
        if device is not None or output_device is not None:
            import torch

            device = None if device is None else torch.device(device)
            output_device = None if output_device is None else torch.device(output_device)
        self._device = device
        self._output_device = output_device
        self._staging = _PinnedBuffers() if device is not None and device.type == "cuda" else None

    def resolve(self) -> None:
        """Give "cuda" the index of the current device of this thread, the first caller's.

        The current device of a worker would be GPU 0.
        """
        self._device = _with_index(self._device)
        self._output_device = _with_index(self._output_device)

    def enter_stream(self) -> None:
        """Let this thread use a stream of its own if the device of the function is a GPU."""
        if self._staging is not None:
            cuda = sys.modules["torch"].cuda
            with cuda.device(self._device):  # a new stream is of the current device
                stream = cuda.Stream()
            cuda.set_stream(stream)

    def allocate(self, spec: FeatureSpec, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Return an array for a feature, and the view through which it is written.

        The array goes `to_function` next.
        """
        if self._staging is None or (spec.device is not None and spec.device.type != "cpu"):
            return spec.allocate(shape)
        return self._staging.allocate(spec, shape) or spec.allocate(shape)

    def to_function(self, array: Array) -> Array:
        """Return `array` on the device of the function.

        An array of numpy becomes a tensor if a tensor can hold its elements.
        """
        if self._device is None:
            return array
        if self._staging is not None:
            moved = self._staging.send(array, self._device)
            if moved is not None:
                return moved
        torch = sys.modules["torch"]
        if not isinstance(array, torch.Tensor):
            try:
                array = torch.from_numpy(array if array.flags.writeable else array.copy())
            except TypeError:  # strings, objects
                return array
            except ValueError:  # an order of bytes, or strides, that tensors do not have
                array = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        return array.to(self._device)

    def to_callers(self, arrays: Iterable[Array]) -> list[Array]:
        """Return outputs on the device of the callers, without the graph of their gradients.

        The graph would keep the whole batch alive.
        """
        tensors = find_imported("torch", "Tensor")
        moved: list[Array] = []
        for array in arrays:
            if isinstance(array, tensors):
                if array.requires_grad:
                    array = array.detach()
                if self._output_device is not None:
                    array = array.to(self._output_device)
            moved.append(array)
        return moved


class _PinnedBuffers(threading.local):
    """Pinned host memory of one thread. A buffer is used again once its data is on the device."""

    def __init__(self) -> None:
        # by feature: a tensor, and the event of its arrival if its transfer has begun
        self._buffers: dict[str, tuple[Any, Any]] = {}
        self._latest: tuple[str, Any] = "", None  # feature and tensor of the last allocation

    def allocate(self, spec: FeatureSpec, shape: tuple[int, ...]) -> tuple[Array, Array] | None:
        """Return a pinned tensor of this shape, and the view through which it is written.

        Return None for elements that no tensor can hold.
        """
        torch = sys.modules["torch"]
        if isinstance(spec, NumpySpec):
            try:
                dtype = torch.from_numpy(
                    sys.modules["numpy"].empty(0, spec.dtype.newbyteorder("="))
                ).dtype
            except TypeError:
                return None
        else:
            dtype = spec.dtype
        memory, arrived = self._buffers.get(spec.name, (None, None))
        if arrived is not None:
            arrived.synchronize()
        size = torch.Size(shape).numel()
        if memory is None or memory.dtype is not dtype or memory.numel() < size:
            memory = torch.empty(size + size // 2, dtype=dtype, device="cpu", pin_memory=True)
        array = memory[:size].view(shape)
        self._buffers[spec.name] = memory, None
        self._latest = spec.name, array
        return array, array.numpy() if isinstance(spec, NumpySpec) else spec.view(array)

    def send(self, array: Array, device: Any) -> Array | None:
        """Return the array of the last allocation on the device, or None for any other array.

        The array is sent without waiting. Its memory is not used again before it has arrived.
        """
        name, latest = self._latest
        if latest is not array:
            return None
        torch = sys.modules["torch"]
        moved = array.to(device, non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)
        arrived.record(torch.cuda.current_stream(moved.device))
        self._buffers[name] = self._buffers[name][0], arrived
        return moved


def _with_index(device: Any) -> Any:
    """Return `device`, with the index of the current device if it is "cuda" without an index."""
    if device is None or device.type != "cuda" or device.index is not None:
        return device
    torch = sys.modules["torch"]
    return torch.device("cuda", torch.cuda.current_device())


def stream_wait(events: Iterable[Any]) -> None:
    """Let the current streams of this thread wait for `ready_events`."""
    for device, event in events:
        sys.modules["torch"].cuda.current_stream(device).wait_event(event)


def keep_for_stream(tensors: Iterable[Array]) -> None:
    """Keep the memory of tensors on GPUs until the current streams of this thread have used it.

    Another stream has allocated this memory.
    """
    kinds = find_imported("torch", "Tensor")
    for each in tensors:
        if isinstance(each, kinds) and each.is_cuda:
            each.record_stream(sys.modules["torch"].cuda.current_stream(each.device))
