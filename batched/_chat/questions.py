"""Questions: what is sent for one prompt, made and checked in the thread of whoever asks."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .._services.prompts import check_chat, is_id, is_prompt

CHARACTERS: Final = 4
"""Characters of a token, as a rule of thumb for English."""
IMAGE: Final = 1000
"""Tokens of a part of a message that is no text, as an image of middling size."""

NOT_TO_BE_SET: Final = {
    "messages": "they are made of the prompt",
    "model": "it is the client's own",
    "n": "a call has one answer",
    "stream": "an answer is returned once it is whole",
    "stream_options": "an answer is returned once it is whole",
    "timeout": "the client has timeout_s",
}
"""Parameters of chat completions that are not the caller's, and why."""


@dataclass(frozen=True, slots=True)
class Question:
    """Messages and parameters that are sent for one prompt."""

    messages: list[Mapping[str, Any]]
    parameters: Mapping[str, Any]
    prompt_tokens: int
    """As estimated."""
    most_tokens: int | None
    """Tokens that the answer may have; None: unlimited."""


class ChatPreparation:
    """Maker of questions."""

    def __init__(
        self,
        name: str,
        system: str | None,
        parameters: Mapping[str, Any],
        *,
        schema: bool,
        settings: Collection[str],
    ) -> None:
        from openai.resources.chat.completions import AsyncCompletions

        self._name = name  # of the client, for messages
        self._system = system
        self._known = set(inspect.signature(AsyncCompletions.create).parameters) - {"self"}
        self._refused = dict(NOT_TO_BE_SET)
        if schema:
            self._refused["response_format"] = "it is made of schema"
        self._check(parameters, settings)
        self._parameters = dict(parameters)  # of every question

    def is_one(self, given: Any, /) -> bool:
        return is_prompt(given)

    def prepare(self, given: Any, settings: Mapping[str, Any], /) -> Question:
        """The question that a text or a chat is.

        Raises:
            TypeError, ValueError: it is none, or a setting is unknown.
        """
        name = self._name
        if settings:
            self._check(settings)
        if isinstance(given, str):
            if not given.strip():
                raise ValueError(f"{name} got an empty prompt")
            messages: list[Mapping[str, Any]] = [{"role": "user", "content": given}]
        elif isinstance(given, Sequence) and given and is_id(given[0]):
            raise TypeError(
                f"{name} takes a text or a list of messages, got ids of tokens, which only a model "
                "in this process takes"
            )
        elif isinstance(given, list | tuple):
            check_chat(name, given)
            messages = [dict(message) for message in given]
        else:
            raise TypeError(f"{name} takes a text or a list of messages, got {given!r:.60}")
        if self._system is not None and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": self._system})
        parameters = {**self._parameters, **settings}
        most = parameters.get("max_completion_tokens", parameters.get("max_tokens"))
        return Question(
            messages,
            parameters,
            sum(_tokens(message.get("content")) for message in messages),
            most if isinstance(most, int) else None,
        )

    def _check(self, parameters: Mapping[str, Any], settings: Collection[str] = ()) -> None:
        known = {*settings, *self._known} - {*self._refused}
        for parameter in parameters:
            if parameter in self._refused:
                raise TypeError(
                    f"{self._name}: {parameter} cannot be set; {self._refused[parameter]}"
                )
            if parameter not in known:
                alike = difflib.get_close_matches(parameter, known, 1)
                hint = (
                    f"did you mean {alike[0]!r}?"
                    if alike
                    else "what only this service knows goes into extra_body={...}"
                )
                raise TypeError(
                    f"{self._name}: chat completions have no parameter {parameter!r}; {hint}"
                )


def _tokens(content: Any) -> int:
    """Estimate of the tokens of a message."""
    if isinstance(content, str):
        return len(content) // CHARACTERS + 4  # and those around it, for its role
    if not isinstance(content, list | tuple):
        return 4
    return sum(
        _tokens(part["text"]) if isinstance(part, Mapping) and "text" in part else IMAGE
        for part in content
    )
