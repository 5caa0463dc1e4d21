"""Questions: the content of requests, prepared and checked in the thread of each caller."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import openai
from openai.resources.chat.completions import AsyncCompletions

from .._core.checks import suggest
from .._services.prompts import PromptPreparation, check_chat, is_id
from .settings import ChatSettings

CHARACTERS: Final = 4
"""Characters of a token, as a rule of thumb for English."""
ROLE: Final = 4
"""Tokens around the content of a message, for its role."""
IMAGE: Final = 1000
"""Tokens of a part of a message without text, for example of an image of medium size."""

RESERVED: Final = {
    "messages": "they are made of the prompt",
    "model": "it is the client's own",
    "n": "a call has one answer",
    "stream": "an answer is returned once it is whole",
    "stream_options": "an answer is returned once it is whole",
    "timeout": "the client has timeout_s",
}
"""Parameters of chat completions that callers cannot set, and the reasons."""


@dataclass(frozen=True, slots=True)
class Question:
    """Messages and parameters of the requests for one prompt."""

    messages: list[Mapping[str, Any]]
    parameters: Mapping[str, Any]
    prompt_tokens: int
    """Estimated tokens of the messages."""
    most_tokens: int | None
    """Limit of the tokens of the answer; None: unlimited."""


class ChatPreparation(PromptPreparation):
    """Preparation of questions from prompts and parameters."""

    def __init__(
        self,
        name: str,
        settings: ChatSettings,
        parameters: Mapping[str, Any],
        known: Collection[str],
    ) -> None:
        """Check `parameters`, which hold for all questions; `known` are settings of the client."""
        self._name = name  # of the client, for messages
        self._system = settings.system
        self._known = {*inspect.signature(AsyncCompletions.create).parameters} - {"self"}
        self._reserved = dict(RESERVED)
        if settings.schema is not None:
            self._reserved["response_format"] = "it is made of schema"
        self._check(parameters, known)
        self._parameters = dict(parameters)
        if settings.schema is not None:
            self._parameters["response_format"] = _response_format(settings.schema)

    def prepare(self, given: Any, settings: Mapping[str, Any], _: object = None, /) -> Question:
        """Return the question for a text or a chat.

        Raises:
            TypeError, ValueError: the prompt is neither, or a parameter is unknown.
        """
        name = self._name
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

    def _check(self, parameters: Mapping[str, Any], known: Collection[str] = ()) -> None:
        """Raise a TypeError for the first parameter that is reserved or unknown."""
        for parameter in parameters:
            if parameter in self._reserved:
                raise TypeError(
                    f"{self._name}: {parameter} cannot be set; {self._reserved[parameter]}"
                )
            if parameter in self._known or parameter in known:
                continue
            hint = suggest(parameter, {*self._known, *known} - {*self._reserved})
            hint = hint or "; parameters of this service alone go into extra_body={...}"
            raise TypeError(f"{self._name}: chat completions have no parameter {parameter!r}{hint}")


def _response_format(schema: Any) -> dict[str, Any]:
    """Return the description of a pydantic class by which a service is asked for JSON."""
    # the schema as OpenAI wants it: all fields required, no additional properties
    function = openai.pydantic_function_tool(schema)["function"]
    return {
        "type": "json_schema",
        "json_schema": {
            "name": schema.__name__,
            "schema": function.get("parameters", {}),
            "strict": True,
        },
    }


def _tokens(content: Any) -> int:
    """Estimate the tokens of a message."""
    if isinstance(content, str):
        return len(content) // CHARACTERS + ROLE
    if not isinstance(content, list | tuple):
        return ROLE
    return sum(
        _tokens(part["text"]) if isinstance(part, Mapping) and "text" in part else IMAGE
        for part in content
    )
