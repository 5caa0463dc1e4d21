"""Prompts: recognition of texts, chats and ids of tokens, and calls with one or several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Final, TypeAlias

from .._function.preparation import Preparation

Message: TypeAlias = Mapping[str, Any]
"""Message of a chat: its `role`, and its `content`."""

Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]
"""A text, a list of messages, or a list of ids."""

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that messages can have."""


def is_prompt(given: Sequence[Any]) -> bool:
    """Return whether a list is one prompt, a chat or ids, rather than a list of prompts."""
    first = given[0]
    return (isinstance(first, Mapping) and "role" in first) or is_id(first)


def is_id(value: object) -> bool:
    """Return whether a value can be the id of a token. Integers of numpy can, too."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_chat(name: str, messages: Sequence[Any]) -> None:
    """Raise an error that names the first wrong message of a chat.

    Raises:
        TypeError: a message is no mapping.
        ValueError: there is no message, the role of a message is missing or unknown, or a message
            has neither content nor calls of tools.
    """
    if not messages:
        raise ValueError(f"{name} got an empty chat; it needs at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(
                f"{name}: message {number} of a chat must be a dict with role and content, got "
                f"{message!r:.60}; several prompts are a list"
            )
        role = message.get("role")
        if role not in ROLES:
            raise ValueError(
                f"{name}: message {number} has the role {role!r}; roles are {', '.join(ROLES)}"
            )
        if message.get("content") is None and "tool_calls" not in message:
            raise ValueError(f"{name}: message {number} has no content")


class PromptPreparation(Preparation):
    """Preparation of prompts. The keyword arguments of a call are settings of its prompts.

    Calls with different settings share a batch: the items carry their settings.
    """

    takes_settings = True

    def is_one(self, given: Any, /) -> bool:
        return is_prompt(given)
