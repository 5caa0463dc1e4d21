"""Batching for functions that coroutines await."""

from .._connect.connected import AsyncConnected as connect
from .._function.decorator import async_dynamically as dynamically
from . import inference

__all__ = ["connect", "dynamically", "inference"]
