"""Answers of a service: their results, or the reason why they have none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from .settings import first_error

BEGINNING: Final = re.compile(r"[{\[]")
"""First character of an object or a list of JSON."""
CUT: Final = ("length", "model_length")
"""Reasons for the end of a text that is as long as it may be; the second is Mistral's."""
BROKEN_OFF: Final = ("error", "abort", "aborted", "insufficient_system_resource")
"""Reasons for the end of a text that is not whole, of OpenRouter, vLLM, SGLang and DeepSeek."""
LIST: Final = "items"
"""Property of the object by which a service is asked for a list."""


class Unusable(Exception):
    """An answer without a result."""

    def __init__(self, why: str, *, again: bool, text: str | None = None) -> None:
        super().__init__(why)
        self.again = again  # whether another request may have a result
        self.text = text  # JSON that the model could correct


class Message(BaseModel):
    """Message of the model."""

    content: Any = None
    refusal: Any = None


class Choice(BaseModel):
    """One of the messages that a service offers; a request asks for one."""

    message: Message | None = None
    finish_reason: Any = None

    @property
    def was_cut(self) -> bool:
        """Whether the text has as many tokens as it may have."""
        return self.finish_reason in CUT


class Tokens(BaseModel):
    """Tokens that a request took, as the service counts them."""

    prompt_tokens: int
    completion_tokens: int | None = None


class Answer(BaseModel):
    """Body of an answer, of which any part may be missing."""

    error: Any = None
    choices: list[Choice] | None = None
    data: Any = None
    usage: Tokens | Any = None


def read_answer(content: bytes) -> Answer:
    """Return the answer with this body.

    Raises:
        Unusable: the body is of another kind, or is the description of an error.
    """
    try:
        answer = Answer.model_validate_json(content)
    except ValidationError as error:
        raise Unusable(
            "its answer has the wrong form (of another base_url?), or was cut off: "
            f"{first_error(error)}",
            again=True,
        ) from None
    if answer.error:
        raise Unusable(f"it answered with an error: {message_of(answer.error)}", again=True)
    return answer


def message_of(error: Any) -> str:
    """Return the message in the object by which a service describes an error."""
    message = error.get("message") if isinstance(error, Mapping) else None
    return f"{message or error}"[:500]


def read_choice(answer: Answer, schema: Any) -> Any:
    """Return the text of a chat completion or, with a pydantic class, an instance of `schema`.

    Raises:
        Unusable: there is none.
    """
    choice = answer.choices[0] if answer.choices else Choice()
    reason, message = choice.finish_reason, choice.message
    if message is None:
        raise Unusable("its answer has no message", again=True)
    if reason == "content_filter":
        raise Unusable("its filter held the answer back (content_filter)", again=False)
    if reason in BROKEN_OFF:
        raise Unusable(f"it broke the answer off (finish_reason {reason!r})", again=True)
    if message.refusal:
        raise Unusable(f"the model refused: {message.refusal}"[:500], again=False)
    content = message.content
    if isinstance(content, list):  # in parts
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "".join(part for part in parts if isinstance(part, str))
    if not isinstance(content, str) or not content.strip():
        raise Unusable(
            f"its answer has no text (content is {content!r:.60}, finish_reason {reason!r})",
            again=not choice.was_cut,
        )
    if schema is None:
        return content
    try:
        return _read_json(content, schema)
    except ValidationError as error:
        if choice.was_cut:
            raise Unusable(
                "its JSON was cut off at the most tokens that it may have (finish_reason "
                f"{reason!r})",
                again=False,
            ) from None
        why = f"its JSON does not fit {schema.__name__}: {first_error(error)}"
        raise Unusable(why, again=True, text=content) from None


def _read_json(text: str, schema: Any) -> Any:
    """Return the first JSON in a text that fits: after reasoning, in prose, or in a block of code.

    Raises:
        ValidationError: nothing fits; the error is about the first JSON, if there is one.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    found, end = [text], 0
    for begun in BEGINNING.finditer(text):
        if begun.start() >= end:  # not within the last one
            try:
                value, end = json.JSONDecoder(strict=False).raw_decode(text, begun.start())
            except (ValueError, RecursionError) as error:
                end = getattr(error, "pos", end)  # a part of broken JSON is no answer
                continue
            found += text[begun.start() : end], json.dumps(value)  # with its line breaks escaped
            if isinstance(value, dict) and [*value] == [LIST]:
                found.append(json.dumps(value[LIST]))
    errors = []
    for each in found:
        try:
            return schema.model_validate_json(each)
        except ValidationError as error:
            errors.append(error)
    raise errors[min(2, len(errors) - 1)]
