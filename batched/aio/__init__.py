"""Batching for functions that coroutines await."""

from .._decorator import async_dynamically as dynamically

__all__ = ["dynamically"]
