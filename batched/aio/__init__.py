"""Batching for functions that coroutines await."""

from .._function.decorator import async_dynamically as dynamically
from . import inference

__all__ = ["dynamically", "inference"]
