"""Batching for functions of arrays and tensors that coroutines await."""

from .._connect.connected import AsyncConnectedInference as connect  # noqa: N813  # called as a function
from .._function.decorator import async_inference_dynamically as dynamically

__all__ = ["connect", "dynamically"]
