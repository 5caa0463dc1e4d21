"""Batching for functions that coroutines await."""

from .._connect.connected import AsyncConnected as connect  # noqa: N813  # called as a function
from .._function.continuous import async_continuously as continuously
from .._function.decorator import async_dynamically as dynamically
from . import inference

__all__ = ["connect", "continuously", "dynamically", "inference"]
