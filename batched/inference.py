"""Batching for functions of arrays and tensors.

Calls are padded to one batch, and each caller gets its own rows.
"""

from ._connect.connected import ConnectedInference as connect  # noqa: N813  # called as a function
from ._function.decorator import inference_dynamically as dynamically

__all__ = ["connect", "dynamically"]
