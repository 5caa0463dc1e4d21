"""Chat completions: items prepared and checked in the thread of each caller, and requests."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import openai
from openai.resources.chat.completions import AsyncCompletions

from .._core.checks import suggest
from .._services.prompts import PromptPreparation, check_chat
from .answers import LIST, Answer, read_choice
from .items import Item
from .records import ChatAnswer

CHARACTERS: Final = 4
"""Characters of a token, as a rule of thumb for English."""
ROLE: Final = 4
"""Tokens around the content of a message, for its role."""
USUAL_ANSWER: Final = 256
"""Expected length of the first answers, without a limit (tokens)."""
IMAGE: Final = 1000
"""Tokens of a part of a message without text, for example of an image of medium size."""

TOOLS: Final = "a client calls no tools; it returns the text of one answer"
RESERVED: Final = {
    "messages": "they are made of the prompt",
    "model": "it is the client's own",
    "n": "a call has one answer",
    "stream": "an answer is returned once it is whole",
    "stream_options": "an answer is returned once it is whole",
    "timeout": "the client has timeout_s",
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call"), TOOLS),
}
"""Parameters of chat completions that callers cannot set, and the reasons."""


class ChatRequests(PromptPreparation):
    """Chat completions of one client: preparation of prompts, requests, and results."""

    most_items = 1
    most_tokens = length = None

    def __init__(self, name: str, settings: Any, parameters: Mapping[str, Any]) -> None:
        """Check `parameters`, which hold for all prompts."""
        self._name = name  # of the client, for messages
        self._settings = settings
        self._told = False  # that answers are cut off
        self.prices = settings.prices
        of_client = "it is set for the client, by client.with_options(...)"
        self._reserved = dict.fromkeys(vars(settings), of_client) | RESERVED
        if settings.schema is not None:
            self._reserved["response_format"] = "it is made of schema"
        check_parameters(name, AsyncCompletions.create, parameters, self._reserved, vars(settings))
        self._parameters = dict(parameters)
        if settings.schema is not None:
            self._parameters["response_format"] = _response_format(settings.schema)

    def prepare(self, given: Any, settings: Mapping[str, Any], _: object = None, /) -> Item:
        """Return the item for a text or a chat.

        Raises:
            TypeError, ValueError: the prompt is neither, or a parameter is unknown.
        """
        name, system = self._name, self._settings.system
        check_parameters(name, AsyncCompletions.create, settings, self._reserved)
        if isinstance(given, str):
            if not given.strip():
                raise ValueError(f"{name} got an empty prompt")
            messages: list[Mapping[str, Any]] = [{"role": "user", "content": given}]
        elif isinstance(given, list | tuple):
            check_chat(name, given)
            messages = [*map(dict, given)]
        else:
            raise TypeError(f"{name} takes a text or a list of messages, got {given!r:.60}")
        if system is not None and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": system})
        parameters = {**self._parameters, **settings}
        most = parameters.get("max_completion_tokens", parameters.get("max_tokens"))
        return Item(
            messages,
            sum(_tokens(message.get("content")) for message in messages),
            most if isinstance(most, int) else None,
            parameters,
        )

    async def send(self, http: Any, items: list[Item]) -> Any:
        """Return the raw response to the request for one prompt."""
        (item,) = items
        return await http.chat.completions.with_raw_response.create(
            model=self._settings.model,
            messages=item.content,
            **item.parameters,
        )

    def read(self, answer: Answer, items: list[Item], request_id: str | None) -> list[Any]:
        """Return the result for each prompt, of which a request has one.

        Raises:
            Unusable: the answer has none.
        """
        result: Any = read_choice(answer, self._settings.schema)
        assert answer.choices is not None
        if self._settings.details:
            result = ChatAnswer(
                result,
                answer.choices[0].was_cut,
                getattr(answer.usage, "prompt_tokens", None),
                getattr(answer.usage, "completion_tokens", None),
                request_id,
            )
        elif answer.choices[0].was_cut and not self._told and self._settings.schema is None:
            self._told = True
            logging.getLogger("batched").warning(
                "%s: an answer was cut off at its limit of tokens; details=True tells which",
                self._name,
            )
        return [result for _ in items]


def check_parameters(
    name: str,
    function: Any,
    parameters: Collection[str],
    reserved: Mapping[str, str],
    known: Collection[str] = (),
) -> None:
    """Raise a TypeError for the first parameter that is reserved, or that `function` lacks."""
    taken = {*inspect.signature(function).parameters} - {"self"}
    for parameter in parameters:
        if parameter in reserved:
            raise TypeError(f"{name}: {parameter} cannot be set; {reserved[parameter]}")
        if parameter not in taken and parameter not in known:
            hint = suggest(parameter, {*taken, *known} - {*RESERVED})
            raise TypeError(
                f"{name}: the service has no parameter {parameter!r}{hint}; parameters of this "
                "service alone go into extra_body={...}"
            )


def _response_format(schema: Any) -> dict[str, Any]:
    """Return the description of a pydantic class by which a service is asked for JSON."""
    # the schema as OpenAI wants it: all fields required, no additional properties
    form: Any = openai.pydantic_function_tool(schema)["function"].get("parameters", {})
    if form.get("type") == "array":  # the root must be an object
        definitions = {"$defs": form.pop("$defs")} if "$defs" in form else {}
        form = {"type": "object", "properties": {LIST: form}, "required": [LIST], **definitions}
        form["additionalProperties"] = False
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", schema.__name__)[:64]
    return {
        "type": "json_schema",
        "json_schema": {"name": name, "schema": form, "strict": True},
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
