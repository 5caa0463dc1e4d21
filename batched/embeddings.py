"""Services of embeddings as batched functions: `EmbeddingClient`; needs the extra `chat`."""

from ._chat.client import EmbeddingClient
from ._chat.records import Usage

__all__ = ["EmbeddingClient", "Usage"]
