"""Chat services as batched functions: `ChatClient`; needs the extra `chat`."""

from ._chat.client import ChatClient, ChatUsage

__all__ = ["ChatClient", "ChatUsage"]
