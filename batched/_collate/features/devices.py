"""Transfers of features to the device of the function, and of outputs to the device of the callers.

There is one transfer for each feature and each output, and none for data that is there already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..arrays import Array


@dataclass
class Devices:
    """Devices on which a batch function gets its features and its callers their results."""

    device: Any
    """Device of torch; None: features stay on their device."""
    output_device: Any
    """The same for results."""

    def resolve(self) -> None:
        """Give "cuda" the index of the current device of this thread, that of the first caller.

        The current device of a worker would be GPU 0.
        """
        self.device = _with_index(self.device)
        self.output_device = _with_index(self.output_device)

    def to_function(self, features: dict[str, Array]) -> dict[str, Array]:
        """Return features on the device of the function.

        An array of numpy becomes a tensor if a tensor can hold its elements.
        """
        if self.device is None:
            return features
        return {name: self._send(array) for name, array in features.items()}

    def _send(self, array: Array) -> Array:
        torch = sys.modules["torch"]
        if not isinstance(array, torch.Tensor):
            try:  # a copy, because no tensor has some orders of bytes and strides
                array = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), "C"))
            except TypeError:  # strings, objects
                return array
        if self.device.type == "cuda" and array.device.type == "cpu":
            # the allocator of torch uses pinned memory again once its transfer has ended
            return array.pin_memory().to(self.device, non_blocking=True)
        return array.to(self.device)

    def to_callers(self, array: Array) -> Array:
        """Return an output on the device of the callers, without the graph of its gradients.

        The graph would keep the whole batch alive.
        """
        if getattr(array, "requires_grad", False):
            array = array.detach()
        if self.output_device is not None and hasattr(array, "is_cuda"):
            array = array.to(self.output_device)
        return array


def _with_index(device: Any) -> Any:
    try:
        return device and sys.modules["torch"].empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used: {error}") from None


def stream_wait(events: Iterable[Any]) -> None:
    """Let the current streams of this thread wait for `ready_events`."""
    for device, event in events:
        sys.modules["torch"].cuda.current_stream(device).wait_event(event)
