"""Chat services as batched functions: `ChatClient`; needs the extra `chat`."""

from ._chat.client import ChatClient
from ._chat.records import ChatAnswer, Usage

__all__ = ["ChatAnswer", "ChatClient", "Usage"]
