"""Answers of a chat service: their text or object, or the reason why they have none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from .settings import first_error


class Unusable(Exception):
    """An answer without a result."""

    def __init__(self, why: str, *, again: bool) -> None:
        super().__init__(why)
        self.again = again  # whether another request may have a result


class Tokens(NamedTuple):
    """Tokens that a request took, as the service counts them."""

    prompt: int
    completion: int


def parse_body(content: bytes) -> Mapping[str, Any]:
    """Return the object in the body of an answer.

    Raises:
        Unusable: there is none.
    """
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise Unusable(
            f"its answer is no JSON, or was cut off: {content[:60]!r}", again=True
        ) from None
    if not isinstance(body, dict):
        raise Unusable(f"its answer is no JSON object: {content[:60]!r}", again=True)
    if body.get("error"):
        raise Unusable(f"it answered with an error: {message_of(body['error'])}", again=True)
    return body


def message_of(error: Any) -> str:
    """Return the message in the object by which a service describes an error."""
    message = error.get("message") if isinstance(error, Mapping) else None
    return f"{message or error}"[:500]


def read_tokens(body: Mapping[str, Any]) -> Tokens | None:
    """Return the tokens that the request took, None if the service does not count them."""
    usage = body.get("usage")
    if not isinstance(usage, Mapping):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not isinstance(prompt, int):
        return None
    return Tokens(prompt, completion if isinstance(completion, int) else 0)


def read_result(body: Mapping[str, Any], schema: Any) -> Any:
    """Return the text in an answer or, with the pydantic class `schema`, an instance of it.

    Raises:
        Unusable: there is none.
    """
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Unusable("its answer has no choices", again=True)
    reason, message = choices[0].get("finish_reason"), choices[0].get("message")
    if not isinstance(message, dict):
        raise Unusable("its answer has no message", again=True)
    if reason == "content_filter":
        raise Unusable("its filter held the answer back (content_filter)", again=False)
    if message.get("refusal"):
        raise Unusable(f"the model refused: {message['refusal']}"[:500], again=False)
    content = message.get("content")
    was_cut = reason == "length"
    if not isinstance(content, str) or not content.strip():
        raise Unusable(
            f"its answer has no text (content is {content!r:.60}, finish_reason {reason!r})",
            again=not was_cut,
        )
    if schema is None:
        return content
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        if was_cut:
            raise Unusable(
                "its JSON was cut off at the most tokens that it may have (finish_reason 'length')",
                again=False,
            ) from None
        raise Unusable(
            f"its JSON does not fit {schema.__name__}: {first_error(error)}", again=True
        ) from None
