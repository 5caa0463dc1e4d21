"""Result of a call, with details."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "time"]


@dataclass(frozen=True)
class Generation:
    """A text with details of its generation."""

    text: str
    """New text, without the prompt, special tokens and the stop string."""
    tokens: list[int]
    """New tokens, the terminator included."""
    finish_reason: FinishReason
    """"stop": a terminator, a stop string or a stopping criterion; "length": `max_new_tokens`, or
    the last position of the model; "time": `max_time`.
    """
    prompt_tokens: int
    """Number of tokens of the prompt."""
    value: Any = None
    """With `schema`: the instance, or the value of the JSON."""
