"""Batching for functions of arrays and tensors that coroutines await."""

from .._decorator import async_inference_dynamically as dynamically

__all__ = ["dynamically"]
